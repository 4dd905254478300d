"""Text of requests and outputs: characters, stop strings, bad words, samples."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_client import (
    EngineClient,
    EngineRequest,
    FinishReason,
    RequestRefusedError,
    SamplingParams,
    StreamError,
    connect,
)
from engine_client.text import LIMIT, Detokenizer, PlainTokenizer, StopMatcher, Transcript, prepare
from engine_client.tools.mock_engine import MockEngine
from tests.helpers import scaled
from tests.scenarios.rig import address

BOS, EOS = 256, 257


class ByteTokenizer:
    """One token for each byte; with the keyword arguments that transformers take."""

    eos_token_id = EOS

    def __init__(self) -> None:
        self.longest = 0
        self.calls = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.calls += 1
        self.longest = max(self.longest, len(token_ids))
        special = {} if skip_special_tokens else {BOS: b"<s>", EOS: b"</s>"}
        parts = [bytes([one]) if one < BOS else special.get(one, b"") for one in token_ids]
        return b"".join(parts).decode(errors="replace")


class Encoding:
    """What the package tokenizers returns."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


class EncodingTokenizer:
    """No keyword arguments, no end of sequence, ids in an object."""

    def encode(self, text: str) -> Encoding:
        return Encoding(list(text.encode()))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class PieceTokenizer:
    """Tokens are numbers of pieces of bytes, cut anywhere."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.longest = 0
        self.calls = 0

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(text.encode())]

    def decode(self, ids: list[int]) -> str:
        self.calls += 1
        self.longest = max(self.longest, len(ids))
        return b"".join(self.pieces[one] for one in ids).decode(errors="replace")


class SpaceTokenizer:
    """Words that begin with a space, the first of which is dropped, and bytes for what is no word.

    A run of bytes that is no text is as many U+FFFD, whatever is good in it.
    """

    def __init__(self) -> None:
        self.words: list[str] = []
        self.longest = 0

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in text.split(" "):
            if word.isascii():
                ids.append(self._id("\u2581" + word))
            else:
                ids.append(self._id("\u2581"))
                ids += [self._id(f"<{byte:02x}>") for byte in word.encode()]
        return ids

    def _id(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    def decode(self, ids: list[int]) -> str:
        self.longest = max(self.longest, len(ids))
        text, run = "", b""
        for word in [*(self.words[one] for one in ids), "\u2581"]:
            if len(word) == 4 and word[0] == "<":
                run += bytes([int(word[1:3], 16)])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            text += word.replace("\u2581", " ")
        return text[:-1].removeprefix(" ")


TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab \n\u00e9\u20ac\U0001f600\ufffd\u0301"), st.characters(codec="utf-8")
    ),
    max_size=80,
)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """Cut bytes into pieces, none empty."""
    at = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(at)]


def pushed(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """Return what each token gives out, and then the end."""
    return [*map(detokenizer.push, ids), detokenizer.flush()]


# -- characters ------------------------------------------------------------------------------------


@given(TEXTS, st.lists(st.integers(0, 400), max_size=300))
def test_any_split_of_a_text_gives_the_text(text: str, places: list[int]) -> None:
    """However characters are spread over tokens, the pieces are the text and split none of them."""
    tokenizer = PieceTokenizer(cut(text.encode(), places))
    pieces = pushed(Detokenizer(tokenizer.decode), range(len(tokenizer.pieces)))
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    assert tokenizer.longest <= LIMIT


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=200))
@example(b"\x80" * 200, list(range(200)))
def test_bytes_that_are_no_text_are_decoded_as_a_whole_would_be(
    data: bytes, places: list[int]
) -> None:
    """Invalid bytes give what decoding all of them at once gives, within a bounded window."""
    tokenizer = PieceTokenizer(cut(data, places))
    pieces = pushed(Detokenizer(tokenizer.decode), range(len(tokenizer.pieces)))
    assert "".join(pieces) == data.decode(errors="replace")
    assert tokenizer.longest <= LIMIT


@given(
    st.lists(
        st.sampled_from(["a", "of", "\u20ac", "\U0001f600" * 9, "\u00e9" + "\n" * 12, ""]),
        max_size=60,
    ),
    st.integers(0, 30),
)
@example(["\u00e9" + "\n" * 30] * 3, 0)
def test_spaces_between_words_stay(words: list[str], known: int) -> None:
    """A decoder that drops a leading space, and one that decodes runs of bytes, lose nothing."""
    tokenizer = SpaceTokenizer()
    ids = tokenizer.encode(" ".join(words))
    whole = tokenizer.decode(ids)
    start = next(n for n in range(known, -1, -1) if "\ufffd" not in tokenizer.decode(ids[:n]))
    prompt, rest = ids[:start], ids[start:]
    pieces = pushed(Detokenizer(tokenizer.decode, prompt), rest)
    assert tokenizer.decode(prompt) + "".join(pieces) == whole


def test_a_character_is_given_out_with_its_last_byte() -> None:
    """Text is held back within a character only, and what is before that is not."""
    tokenizer = PieceTokenizer([b"ab\xe2", b"\x82", b"\xacc", b"\xf0\x9f"])
    pieces = pushed(Detokenizer(tokenizer.decode), range(4))
    assert pieces == ["ab", "", "\u20acc", "", "\ufffd"]


def test_the_cost_of_a_token_does_not_grow() -> None:
    """Ten thousand tokens are decoded in a short window, with about one call for each."""
    tokenizer = ByteTokenizer()
    text = "Gr\u00fc\u00dfe aus K\u00f6ln \U0001f600 " * 400
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pushed(Detokenizer(tokenizer.decode), ids)) == text
    assert tokenizer.longest <= 20
    assert tokenizer.calls <= 1.3 * len(ids)


def test_tokens_without_text_take_nothing_away() -> None:
    """Behind a thousand special tokens, the next word still has its space."""
    tokenizer = SpaceTokenizer()
    ids = tokenizer.encode("one two three")
    tokenizer.words.append("")
    ids[2:2] = [len(tokenizer.words) - 1] * 1000
    assert "".join(pushed(Detokenizer(tokenizer.decode), ids)) == "one two three"
    assert tokenizer.longest <= 64


def test_a_character_that_the_prompt_began_is_completed() -> None:
    """A prompt that ends within a character does not lose it."""
    tokenizer = PieceTokenizer([b"caf", b"\xc3", b"\xa9!"])
    assert pushed(Detokenizer(tokenizer.decode, [0, 1]), [2]) == ["\u00e9!", ""]
    tokenizer = PieceTokenizer([b"caf", b"\xc3", b"x"])
    assert pushed(Detokenizer(tokenizer.decode, [0, 1]), [2]) == ["x", ""]


def test_text_that_a_decoder_changes_afterwards_is_not_given_out_twice() -> None:
    """What comes behind the change is given out all the same."""
    tokenizer = PieceTokenizer([b"x", b"a \xe2", b"\x82\xac", b"b"])
    pieces = pushed(
        Detokenizer(lambda ids: tokenizer.decode(ids).replace(" \u20ac", "\u20ac")), range(4)
    )
    assert pieces == ["x", "a ", "\u20ac", "b", ""]


def test_a_copy_goes_its_own_way() -> None:
    """What is pushed into a copy is not seen by the other."""
    tokenizer = ByteTokenizer()
    params = SamplingParams(stop="\u20ac\u20acx")
    one = Transcript(tokenizer.decode, params)
    ids = tokenizer.encode("a\u20ac", add_special_tokens=False)
    assert one.read(ids[:2], ended=False, stopped=False).text == "a"
    two = one.copy()
    assert two.read(ids[2:], ended=True, stopped=False).text == "\u20ac"
    assert one.read([*ids[2:], ord("x")], ended=False, stopped=False) == ("\u20acx", None, 3)


# -- stop strings ----------------------------------------------------------------------------------


def first_stop(text: str, stop: Sequence[str], after: int) -> tuple[int, str] | None:
    """Look at every end behind ``after`` characters; return where a stop string begins."""
    for end in range(after + 1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                return end - len(string), string
    return None


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 30), max_size=30),
    st.integers(0, 10),
    st.booleans(),
)
@example("aaab", ["aab"], [1, 2, 3], 0, False)
@example("abaabab", ["abab"], [2, 5], 0, True)
@example("aab", ["b", "ab"], [1], 0, False)
@example("aab", ["ab", "b"], [1], 0, False)
def test_stop_strings_are_found_for_every_split(
    text: str, stop: list[str], places: list[int], free: int, include: bool
) -> None:
    """The match, the text before it and what is held back do not depend on the pieces."""
    matcher = StopMatcher(stop, include=include)
    pieces = [piece.decode() for piece in cut(text.encode(), places)]
    after = len("".join(pieces[:free]))
    expected = first_stop(text, stop, after)
    given_out, found = "", None
    for number, piece in enumerate(pieces):
        new, found = matcher.push(piece, counts=number >= free)
        given_out += new
        if expected is not None and not include:
            assert len(given_out) <= expected[0]
        if found is not None:
            break
    given_out += matcher.flush()
    if expected is None:
        assert (given_out, found) == (text, None)
    else:
        start, string = expected
        assert found == string
        assert given_out == text[: start + len(string) * include]


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    """Everything else is given out at once, and the rest as soon as it is known."""
    matcher = StopMatcher(["END", "\n\n"])
    assert matcher.push("text E") == ("text ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("\n") == ("EN", None)
    assert matcher.push("x") == ("\nx", None)
    assert matcher.push("..END..") == ("..", "END")


def transcript(text: str, step: int = 1, **params: Any) -> tuple[str, str | None, int]:
    """Read a text's tokens, ``step`` at once; return the text, the match and the tokens kept."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    made = Transcript(tokenizer.decode, SamplingParams(max_tokens=100, **params))
    seen, kept = "", 0
    for start in range(0, len(ids), step):
        ended = start + step >= len(ids)
        new, stop, count = made.read(ids[start : start + step], ended=ended, stopped=False)
        seen, kept = seen + new, kept + count
        if stop is not None:
            return seen, stop, kept
    return seen, None, kept


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_stop_strings_of_a_request(step: int) -> None:
    """Cut before or behind the string, not before ``min_tokens``, whatever the outputs' size."""
    text = "a\u20acb STOP c STOP d"
    assert transcript(text, step, stop="STOP") == ("a\u20acb ", "STOP", 10)
    assert transcript(text, step, stop=["x", "STOP"], include_stop_str_in_output=True) == (
        "a\u20acb STOP",
        "STOP",
        10,
    )
    assert transcript(text, step, stop=["STOP"], min_tokens=9) == ("a\u20acb ", "STOP", 10)
    assert transcript(text, step, stop=["STOP"], min_tokens=10) == ("a\u20acb STOP c ", "STOP", 17)
    assert transcript("x ST", step, stop=["STOP"]) == ("x ST", None, 4)


def test_the_token_that_stops_is_no_part_of_the_text() -> None:
    """Unless it is asked for; a stop string before it wins."""
    tokenizer = ByteTokenizer()
    for params, expected in [
        (SamplingParams(), ("ab", None, 3)),
        (SamplingParams(include_stop_str_in_output=True), ("abc", None, 3)),
        (SamplingParams(stop="b"), ("a", "b", 2)),
    ]:
        made = Transcript(tokenizer.decode, params)
        assert made.read(list(b"abc"), ended=True, stopped=True) == expected
    assert Transcript(tokenizer.decode, SamplingParams()).read([], ended=True, stopped=True) == (
        "",
        None,
        0,
    )


# -- tokenizers ------------------------------------------------------------------------------------


def test_arguments_are_passed_where_they_are_taken() -> None:
    """A tokenizer that takes no keyword arguments is called without."""
    plain = PlainTokenizer(ByteTokenizer())
    assert plain.encode("a", special=True) == [BOS, 97]
    assert plain.encode("a", special=False) == [97]
    assert plain.eos_token_id == EOS
    assert plain.decoder(SamplingParams())([97, EOS]) == "a"
    assert plain.decoder(SamplingParams(skip_special_tokens=False))([97, EOS]) == "a</s>"
    plain = PlainTokenizer(EncodingTokenizer())
    assert plain.encode("a", special=True) == plain.encode("a", special=False) == [97]
    assert plain.eos_token_id is None
    assert plain.decoder(SamplingParams())([97]) == "a"


def test_what_transformers_take_is_passed() -> None:
    """Through ``**kwargs`` too, and text that was given out is never cleaned up."""
    seen: list[dict[str, Any]] = []

    class Wrapper:
        def __init__(self) -> None:
            self.encode = ByteTokenizer().encode  # an attribute, not a method

        def decode(self, token_ids: list[int], **how: Any) -> str:
            seen.append(how)
            return ""

    plain = PlainTokenizer(Wrapper())
    assert plain.encode("a", special=False) == [97]
    plain.decoder(SamplingParams(spaces_between_special_tokens=False))([1])
    plain.decoder(SamplingParams())([1])
    common = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert seen == [{**common, "spaces_between_special_tokens": False}, common]


@pytest.mark.parametrize("wrong", [object(), "gpt2", 7])
def test_what_is_no_tokenizer_is_refused(wrong: Any) -> None:
    """The error says what a tokenizer has."""
    with pytest.raises(TypeError, match="encode and decode"):
        PlainTokenizer(wrong)


def test_a_tokenizer_that_returns_something_else_is_named() -> None:
    """Neither strings instead of ids, nor ids instead of text."""

    class Strange:
        def encode(self, text: str) -> list[str]:
            return ["a"]

        def decode(self, ids: list[int]) -> list[int]:
            return ids

    plain = PlainTokenizer(Strange())
    with pytest.raises(TypeError, match=r"tokenizer.encode must return token ids"):
        plain.encode("a", special=True)
    with pytest.raises(TypeError, match=r"tokenizer.decode must return a string"):
        Detokenizer(plain.decoder(SamplingParams())).push(1)


class WordTokenizer:
    """A few words, with and without a space before them."""

    vocabulary = ("bad", " bad", " ", "worse", "x", "y")

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            word = max((w for w in self.vocabulary if text.startswith(w)), key=len, default="")
            text = text[max(1, len(word)) :]
            ids += [self.vocabulary.index(word)] if word else []
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.vocabulary[one] for one in ids)


def test_bad_words_are_banned_at_the_beginning_and_within() -> None:
    """With a space too where that is another token, and not where it is one more."""
    plain = PlainTokenizer(WordTokenizer())
    assert plain.bad_words_token_ids(["bad", " bad", "worse", "xy"]) == [
        [0], [1], [0], [1], [3], [4, 5],
    ]  # fmt: skip

    class Stripping(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.strip())

    assert PlainTokenizer(Stripping()).bad_words_token_ids(["bad"]) == [[0]]
    with pytest.raises(RequestRefusedError, match="'\u20ac' has no tokens"):
        plain.bad_words_token_ids(["\u20ac"])


def test_a_request_goes_out_as_tokens() -> None:
    """The prompt and bad words as ids, with an end of sequence; stop strings stay here."""
    tokenizer = ByteTokenizer()
    params = SamplingParams(stop="x", bad_words="no", bad_words_token_ids=[[7]])
    request, made = prepare(
        EngineRequest("r", sampling_params=params, prompt="hi"), PlainTokenizer(tokenizer)
    )
    assert made is not None
    assert (request.prompt, request.prompt_token_ids) == (None, [BOS, 104, 105])
    sent = request.sampling_params
    assert sent is not None
    assert (sent.stop, sent.bad_words, sent.eos_token_id) == (None, None, EOS)
    assert sent.bad_words_token_ids == [[7], list(b"no")]
    request.check_tokens_only()
    assert sent.to_plain()["_eos_token_id"] == EOS
    own = EngineRequest("r", [1], SamplingParams(eos_token_id=3, ignore_eos=True))
    sent = prepare(own, PlainTokenizer(tokenizer))[0].sampling_params
    assert sent is not None
    assert sent.eos_token_id == 3
    _, made = prepare(
        EngineRequest("r", [1], SamplingParams(detokenize=False)), PlainTokenizer(tokenizer)
    )
    assert made is None


def test_a_prompt_is_text_or_tokens() -> None:
    """Not both, nothing else, and some tokens must come of it."""
    with pytest.raises(RequestRefusedError, match="prompt and prompt_token_ids are both given"):
        EngineRequest("r", [1], prompt="a")
    with pytest.raises(TypeError, match="prompt must be a string"):
        EngineRequest("r", prompt=[1])  # type: ignore[arg-type]
    with pytest.raises(RequestRefusedError, match="prompt has no tokens"):
        prepare(EngineRequest("r", prompt=""), PlainTokenizer(EncodingTokenizer()))


# -- requests --------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(**options: Any) -> Iterator[tuple[EngineClient, MockEngine]]:
    """A client of one reference engine in a thread."""
    with (
        address() as where,
        MockEngine(where, options=options) as engine,
        connect(where, connect_timeout=scaled(30), timeout=scaled(20)) as client,
    ):
        yield client, engine


def says(text: str, *more: int, **params: Any) -> SamplingParams:
    """Parameters with which the reference engine says a text, byte by byte."""
    trace = [*text.encode(), *more]
    params.setdefault("max_tokens", len(trace))
    return SamplingParams(trace_decode_token_ids=trace, **params)


def test_a_stream_has_text() -> None:
    """Each output has what its tokens add, the last one the rest; without a tokenizer, None."""
    with served() as (client, _):
        request = EngineRequest("a", sampling_params=says("\u20ac!"), prompt="x")
        with client.call(request, tokenizer=ByteTokenizer()) as stream:
            outputs = list(stream)
        assert [output.text for output in outputs] == ["", "", "\u20ac", "!"]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert "'!'" in repr(outputs[-1])
        with client.call(EngineRequest("a", [1], says("x"))) as stream:
            assert [output.text for output in stream] == [None]


def test_a_stop_string_ends_the_stream_and_aborts_once() -> None:
    """The last output has the string as its reason; the engine is told once, and stops."""
    with served(manual_steps=True) as (client, engine):
        request = EngineRequest("a", [1], says("one STOP two", stop="STOP"))
        stream = client.call(request, tokenizer=ByteTokenizer())
        assert client.call_utility("mock_step", 8) == [8]
        outputs = list(stream)
        assert "".join(output.text or "" for output in outputs) == "one "
        last = outputs[-1]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "STOP")
        assert stream.finish_reason is FinishReason.STOP
        with pytest.raises(StreamError, match="has ended"):
            stream.recv()
        assert client.active_requests == 0
        assert client.is_sleeping() is False
        assert [one.type for one in engine.log].count("ABORT") == 1
        stream.abort()
        stream.close()
        del stream
        client.abort("a")
        assert client.is_sleeping() is False
        assert [one.type for one in engine.log].count("ABORT") == 1
        assert client.call_utility("mock_step", 9) in ([0], [1])


def test_a_stop_string_in_the_engines_last_output_aborts_nothing() -> None:
    """The stop string is the reason all the same."""
    with served() as (client, engine):
        request = EngineRequest("a", [1], says("a STOP", stop=["STOP"]))
        outputs = list(client.call(request, tokenizer=ByteTokenizer()))
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, "STOP")
        assert client.is_sleeping() is False
        assert "ABORT" not in [one.type for one in engine.log]


def test_the_end_of_sequence_stops() -> None:
    """As the tokenizer names it, held off by ``min_tokens``, and no part of the text."""
    with served() as (client, _):
        results = client.generate(
            ["p", "p"],
            [
                says("ab", EOS, 99, 99),
                says("ab", EOS, 99, skip_special_tokens=False, ignore_eos=True),
            ],
            tokenizer=ByteTokenizer(),
        )
    assert [result.text for result in results] == ["ab", "ab</s>c"]
    assert results[0].finish_reason is FinishReason.STOP
    assert results[0].token_ids == [97, 98, EOS]


def test_generate_takes_strings_and_token_lists() -> None:
    """Mixed, each with parameters of its own; stop strings abort what still runs."""
    with served() as (client, _):
        results = client.generate(
            ["p", [1, 2]],
            [says("one STOP two" + "." * 500, stop="STOP"), says("\u20ac")],
            tokenizer=ByteTokenizer(),
        )
        assert client.active_requests == 0
        assert [(one.text, one.stop_reason) for one in results] == [
            ("one ", "STOP"),
            ("\u20ac", None),
        ]
        assert results[0].token_ids == list(b"one STOP")
        pieces = PieceTokenizer([b"a", b"STOP\xe2", b"b"])
        params = SamplingParams(stop="STOP", trace_decode_token_ids=[0, 1, 2], max_tokens=3)
        assert client.generate([[0]], params, tokenizer=pieces)[0].text == "a"
        assert client.generate([[1]], says("a"))[0].text is None


def test_generate_aborts_behind_a_stop_string_while_others_run() -> None:
    """The engine need not go on with a prompt that is finished here."""
    live: list[list[str]] = []

    class Looking(ByteTokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            if ord("Z") in token_ids and not live:
                live.append([one.name for one in client.pending()])
            return super().decode(token_ids, skip_special_tokens)

    with served(step_seconds=0.002) as (client, _):
        params = [says("a STOP" + "." * 500, stop="STOP"), says("." * 20 + "Z")]
        results = client.generate([[1], [1]], params, tokenizer=Looking())
    assert [one.finish_reason for one in results] == [FinishReason.STOP, FinishReason.LENGTH]
    assert results[0].request_id not in live[0]


def test_n_samples_are_n_requests_with_seeds_of_their_own() -> None:
    """Grouped by prompt; the seeds count up; a single sample is no group."""
    with served() as (client, engine):
        params = SamplingParams(n=3, seed=5, max_tokens=4)
        results = client.generate([[1], [2]], params)
        alone = [
            client.generate([[1]], SamplingParams(seed=seed, max_tokens=4))[0] for seed in (5, 6, 7)
        ]
        assert len(results) == 2
        assert [one.token_ids for one in results[0].samples] == [one.token_ids for one in alone]
        assert results[0].token_ids == alone[0].token_ids
        assert len({one.request_id for one in results[0].samples}) == 3
        assert alone[0].samples == ()
        assert [one.type for one in engine.log].count("ADD") == 9
        texts = client.generate(["p"], says("ab", n=2), tokenizer=ByteTokenizer())[0]
        assert (texts.text, [one.text for one in texts.samples]) == ("ab", ["ab", "ab"])


def refusals() -> list[tuple[str, EngineRequest]]:
    return [
        ("prompt .*tokenizer=", EngineRequest("r", prompt="a")),
        ("stop .*tokenizer=.*stop_token_ids", EngineRequest("r", [1], SamplingParams(stop="a"))),
        (
            "bad_words .*tokenizer=.*bad_words_token_ids",
            EngineRequest("r", [1], SamplingParams(bad_words=["a"])),
        ),
        (r"n is 2.*generate\(\) expands it", EngineRequest("r", [1], SamplingParams(n=2))),
    ]


def test_what_needs_a_tokenizer_is_refused_without() -> None:
    """Before anything is sent, with what to do; ``n`` is for ``generate`` only."""
    with served() as (client, engine):
        for match, request in refusals():
            with pytest.raises(RequestRefusedError, match=match):
                client.call(request)
        with pytest.raises(RequestRefusedError, match="tokenizer="):
            client.generate([[1], "a"])
        with pytest.raises(RequestRefusedError, match="tokenizer="):
            client.generate([[1]], SamplingParams(stop="a"))
        with pytest.raises(RequestRefusedError, match=r"generate\(\) expands it"):
            client.call(refusals()[-1][1], tokenizer=ByteTokenizer())
        with pytest.raises(TypeError, match="goes in a list"):
            client.generate("a", tokenizer=ByteTokenizer())
        assert client.active_requests == 0
        assert "ADD" not in [one.type for one in engine.log]


class FailingTokenizer(ByteTokenizer):
    """It does not know one token."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if 99 in token_ids:
            raise KeyError(99)
        return super().decode(token_ids, skip_special_tokens)


def test_a_tokenizer_that_fails_ends_its_request_only() -> None:
    """With an error that names the request and the reason; the engine is told to stop."""
    with served() as (client, _):
        tokenizer = FailingTokenizer()
        stream = client.call(EngineRequest("a", [1], says("abc" + "." * 500)), tokenizer=tokenizer)
        assert [next(stream).text, next(stream).text] == ["a", "b"]
        with pytest.raises(StreamError, match=r"tokenizer failed .*'a'.*KeyError\(99\)") as caught:
            next(stream)
        assert isinstance(caught.value.__cause__, KeyError)
        assert list(stream) == []
        assert client.active_requests == 0
        trace = [ord("x"), 0xE2, 99]
        bad, good = client.generate(
            [[1], [1]],
            [SamplingParams(trace_decode_token_ids=trace), says("xy")],
            tokenizer=tokenizer,
        )
        assert isinstance(bad.error, StreamError)
        assert (bad.text, good.text) == ("x\ufffd", "xy")


def test_an_interrupt_while_text_is_made_loses_nothing() -> None:
    """The output whose tokens were being decoded comes again, with the same text."""
    interrupts = iter([False, False, True, False, True, *[False] * 100])

    class Interrupted(ByteTokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            text = super().decode(token_ids, skip_special_tokens)
            if next(interrupts):
                raise KeyboardInterrupt
            return text

    with served() as (client, _):
        stream = client.call(EngineRequest("a", [1], says("a\u20acb")), tokenizer=Interrupted())
        texts, caught = [], 0
        while stream.finish_reason is None:
            try:
                texts.append(stream.recv().text)
            except KeyboardInterrupt:
                caught += 1
        assert caught == 2
        assert texts == ["a", "", "", "\u20ac", "b"]


@pytest.mark.parametrize("make", [ByteTokenizer, EncodingTokenizer])
def test_every_kind_of_tokenizer_serves_a_request(make: Callable[[], Any]) -> None:
    """With keyword arguments or without."""
    with served() as (client, _):
        result = client.generate(["\u20ac"], says("\u00e9\u20ac"), tokenizer=make())[0]
        assert result.text == "\u00e9\u20ac"
