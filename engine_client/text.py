"""Text for requests and of their outputs: what a tokenizer adds, since engines know tokens only.

Prompts and bad words become token ids here, and tokens become text again, piece by piece: a piece
never ends within a character, and never gives away the beginning of what may become a stop
string.  Everything here works on values; what is found (a stop string) others act on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import index
from typing import Any, NamedTuple, Protocol

from engine_client.errors import RequestRefusedError
from engine_client.request import EngineRequest
from engine_client.sampling import SamplingParams

__all__ = [
    "Detokenizer",
    "PlainTokenizer",
    "StopMatcher",
    "TextStep",
    "Tokenizer",
    "Transcript",
    "prepare",
]

REPLACEMENT = "\ufffd"
"""What decoders put where bytes are no character, or not yet one."""
MOST_HELD = 3
"""How many of them the beginning of one character can be: it lacks at least one of four bytes."""
CONTEXT = 6
"""Tokens that are decoded again before new ones: some decoders strip a leading space."""
WINDOW = 16
"""Tokens in the window at which it is shortened."""
LIMIT = 64
"""Tokens in the window at which it is shortened in any case."""
PROMPT_CONTEXT = 24
"""How far back in the prompt a beginning is sought that splits no character."""


class Tokenizer(Protocol):
    """What turns text into token ids and back: a ``transformers`` or ``tokenizers`` one, or yours.

    ``encode(text)`` gives the ids, or an object with ``.ids``; ``decode(ids)`` gives the text.
    ``add_special_tokens=`` and ``skip_special_tokens=`` are passed where they are taken.
    ``eos_token_id``, where there is one, ends a request.
    """

    @property
    def encode(self) -> Callable[..., Any]: ...

    @property
    def decode(self) -> Callable[..., Any]: ...


class PlainTokenizer:
    """Any tokenizer, with one way to use it.

    Raises:
        TypeError: it cannot encode or decode.
    """

    __slots__ = ("_decode", "_decode_takes", "_encode", "_encode_takes", "eos_token_id")

    def __init__(self, tokenizer: Tokenizer) -> None:
        for name in ("encode", "decode"):
            if not callable(getattr(tokenizer, name, None)):
                raise TypeError(
                    f"tokenizer must have the methods encode and decode, as those of transformers "
                    f"and tokenizers do; a {type(tokenizer).__name__} has no {name}"
                )
        self._encode = tokenizer.encode
        self._decode = tokenizer.decode
        self._encode_takes = _keywords(tokenizer, "encode")
        self._decode_takes = _keywords(tokenizer, "decode")
        eos = getattr(tokenizer, "eos_token_id", None)
        self.eos_token_id: int | None = eos if type(eos) is int and eos >= 0 else None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Turn text into token ids.

        Args:
            text: what to encode.
            special: add the tokens that begin or end a prompt, where the tokenizer gives a choice.
        """
        if "add_special_tokens" in self._encode_takes:
            found = self._encode(text, add_special_tokens=special)
        else:
            found = self._encode(text)
        try:
            return [index(token) for token in getattr(found, "ids", found)]
        except TypeError:
            raise TypeError(
                f"tokenizer.encode must return token ids or an object with .ids, not a "
                f"{type(found).__name__}"
            ) from None

    def decoder(self, params: SamplingParams) -> Callable[[list[int]], str]:
        """The function that turns token ids into text as these parameters want it."""
        options: dict[str, bool] = {}
        takes = self._decode_takes
        if "skip_special_tokens" in takes:
            options["skip_special_tokens"] = params.skip_special_tokens
        if "clean_up_tokenization_spaces" in takes:
            # It would change text that has been given out already.
            options["clean_up_tokenization_spaces"] = False
        if not params.spaces_between_special_tokens and "spaces_between_special_tokens" in takes:
            options["spaces_between_special_tokens"] = False
        return partial(self._decode, **options) if options else self._decode

    def bad_words_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """The token sequences of words, with and without a space before, as vLLM makes them.

        The sequence with a space counts only where it begins with another token and is as long:
        otherwise it is the other one behind a token that stands for the space.

        Raises:
            RequestRefusedError: a word has no tokens.
        """
        found = []
        for word in words:
            bare = self.encode(word.lstrip(), special=False)
            if not bare:
                raise RequestRefusedError(
                    f"sampling_params.bad_words: {word!r} has no tokens in this tokenizer"
                )
            spaced = self.encode(" " + word.lstrip(), special=False)
            found.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
        return found


_OPTIONS = {
    "encode": ("add_special_tokens",),
    "decode": (
        "skip_special_tokens",
        "clean_up_tokenization_spaces",
        "spaces_between_special_tokens",
    ),
}


def _keywords(tokenizer: Tokenizer, name: str) -> frozenset[str]:
    """The options that a tokenizer's method takes; looked up once for each class."""
    kind = type(tokenizer)
    if name not in getattr(tokenizer, "__dict__", ()) and hasattr(kind, name):
        return _keywords_of_class(kind, name)
    return _named(getattr(tokenizer, name), name)


@lru_cache(maxsize=64)
def _keywords_of_class(kind: type, name: str) -> frozenset[str]:
    return _named(getattr(kind, name), name)


def _named(method: Callable[..., Any], name: str) -> frozenset[str]:
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return frozenset()  # written in C, without a signature: nothing is known of it
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return frozenset(_OPTIONS[name])
    return frozenset(parameters) & frozenset(_OPTIONS[name])


class Detokenizer:
    """Turns tokens into text, one by one, at a cost per token that does not grow.

    What it gives out never ends within a character: while the text ends in U+FFFD, that end is
    held back.  The tokens before are decoded along, since some decoders strip a leading space or
    join a word to what precedes it; only the last few are, in a window that moves on.

    Args:
        decode: token ids to text.
        prompt_token_ids: what comes before; none of its text is given out.
    """

    __slots__ = ("_decode", "_given", "_held", "_mark", "_mark_given", "_shorten_at", "_window")

    def __init__(
        self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = ""
        """The text of the window, as far as it has been given out."""
        self._held = ""
        """The text of the window behind that."""
        self._prime(prompt_token_ids)
        self._mark = len(self._window)
        """The end of the last token behind which nothing was held back."""
        self._mark_given = len(self._given)
        """How much of ``_given`` lies before the mark."""
        self._shorten_at = WINDOW

    def copy(self) -> Detokenizer:
        """Another one in the same state."""
        twin = Detokenizer.__new__(Detokenizer)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._window = self._window.copy()
        return twin

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is certain now, which may be empty."""
        window = self._window
        window.append(token_id)
        text = self._text(window)
        if not text.startswith(self._given):
            text = self._catch_up(text)
        start = len(self._given)
        end = max(start, len(text) - min(MOST_HELD, _replacements(text)))
        new = text[start:end]
        self._given = text[:end]
        self._held = text[end:]
        if not self._held:
            self._mark, self._mark_given = len(self._window), end
        if len(self._window) >= self._shorten_at:
            self._shorten(text)
        return new

    def flush(self) -> str:
        """Return what is held back: no more tokens will come."""
        held, self._held = self._held, ""
        self._given += held
        return held

    def _text(self, token_ids: list[int]) -> str:
        text = self._decode(token_ids)
        if not isinstance(text, str):
            raise TypeError(f"tokenizer.decode must return a string, not {text!r}")
        return text

    def _prime(self, prompt_token_ids: Sequence[int]) -> None:
        known = min(len(prompt_token_ids), PROMPT_CONTEXT)
        for count in range(min(known, CONTEXT), known + 1):
            self._window = list(prompt_token_ids[len(prompt_token_ids) - count :])
            self._given = self._text(self._window) if count else ""
            if self._given and REPLACEMENT not in self._given:
                return

    def _catch_up(self, text: str) -> str:
        """Go on although a token changed text that was given out; return the window's text."""
        whole = self._given.rstrip(REPLACEMENT)
        then = text[len(whole) : len(whole) + 1]
        if whole != self._given and text.startswith(whole) and then not in ("", REPLACEMENT):
            # The prompt ended within a character, which is complete now.
            self._given = whole
            self._mark_given = min(self._mark_given, len(whole))
            return text
        # Decoders that replace a whole run of bytes when its end is incomplete: without the
        # tokens before the mark, the run is the incomplete character alone.
        self._window = self._window[self._mark :]
        text = self._text(self._window)
        self._given = _common_beginning(text, self._given[self._mark_given :])
        self._mark = self._mark_given = 0
        return text

    def _shorten(self, text: str) -> None:
        """Forget tokens at the front of the window, if its end means the same without them."""
        window, held = self._window, len(self._held)
        for start in range(len(window) - CONTEXT, 0, -1):
            tail = self._text(window[start:])
            if len(tail) > held and text.endswith(tail):
                self._cut(start, tail)
                return
        if len(window) < LIMIT:
            self._shorten_at = min(2 * self._shorten_at, LIMIT)
            return
        half = len(window) // 2
        if self._text(window[:half]) == text:
            # The others have no text (special tokens, say): what precedes the next one is here.
            del window[half:]
            self._mark = min(self._mark, half)
        else:
            start = len(window) - CONTEXT
            self._cut(start, self._text(window[start:]))

    def _cut(self, start: int, tail: str) -> None:
        ahead = len(self._given) - self._mark_given
        self._given = tail[: max(0, len(tail) - len(self._held))]
        self._window = self._window[start:]
        self._shorten_at = WINDOW
        self._mark = max(0, self._mark - start)
        self._mark_given = max(0, len(self._given) - ahead) if self._mark else 0


def _common_beginning(one: str, other: str) -> str:
    for place, (char, wanted) in enumerate(zip(one, other, strict=False)):
        if char != wanted:
            return one[:place]
    return one[: len(other)]


def _replacements(text: str) -> int:
    """How many U+FFFD a text ends in."""
    return len(text) - len(text.rstrip(REPLACEMENT)) if text.endswith(REPLACEMENT) else 0


class StopMatcher:
    """Finds the first stop string to be completed in a text that comes in pieces.

    The pieces may be cut anywhere.  What could be the beginning of a stop string is held back
    until it is known, unless stop strings are part of the output anyway.  Of several that end at
    one place, the first of the list is it, as in vLLM.

    Args:
        stop: the strings, none empty.
        include: whether the output includes the one that was found.
    """

    __slots__ = ("_held", "_include", "_lengths", "_stop")

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = [(string, _borders(string)) for string in stop]
        self._include = include
        self._lengths = [0] * len(stop)
        """For each stop string, how much of its beginning the text ends with."""
        self._held = ""

    def copy(self) -> StopMatcher:
        """Another one in the same state."""
        twin = StopMatcher.__new__(StopMatcher)
        twin._stop, twin._include, twin._held = self._stop, self._include, self._held
        twin._lengths = self._lengths.copy()
        return twin

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """Take the next piece; behind a match, nothing more may be pushed.

        Args:
            text: the piece.
            counts: whether a stop string may end in it.

        Returns:
            The text that is certain now, and the stop string that ended it, if one did.
        """
        lengths = self._lengths
        known = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            found = None
            for number, (string, borders) in enumerate(self._stop):
                # Knuth, Morris and Pratt: each character is looked at once.
                length = lengths[number]
                while length and string[length] != char:
                    length = borders[length - 1]
                if string[length] == char:
                    length += 1
                if length == len(string):
                    if counts and found is None:
                        found = string
                    length = borders[length - 1]
                lengths[number] = length
            if found is not None:
                self._held = ""
                return known[: end if self._include else end - len(found)], found
        keep = 0 if self._include else max(lengths, default=0)
        self._held = known[len(known) - keep :]
        return known[: len(known) - keep], None

    def flush(self) -> str:
        """Return what is held back: no more text will come."""
        held, self._held = self._held, ""
        return held


def _borders(string: str) -> list[int]:
    """For each beginning of a string, its longest true beginning that is also its end."""
    borders = [0] * len(string)
    length = 0
    for position in range(1, len(string)):
        while length and string[length] != string[position]:
            length = borders[length - 1]
        if string[length] == string[position]:
            length += 1
        borders[position] = length
    return borders


class TextStep(NamedTuple):
    """What one output adds to the text of its request."""

    text: str
    stop: str | None
    """The stop string that ends the request."""
    kept: int
    """How many of the output's tokens belong to it: those behind a stop string do not."""


class Transcript:
    """The text of one request as it grows: detokenised, and searched for stop strings.

    Args:
        decode: token ids to text.
        params: of the request.
        prompt_token_ids: what comes before.
    """

    __slots__ = ("_detokenizer", "_include", "_matcher", "_min_tokens", "_tokens")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._detokenizer = Detokenizer(decode, prompt_token_ids)
        self._matcher = StopMatcher(stop, include=self._include) if stop else None

    def copy(self) -> Transcript:
        """Another one in the same state."""
        twin = Transcript.__new__(Transcript)
        twin._include, twin._min_tokens, twin._tokens = (
            self._include,
            self._min_tokens,
            self._tokens,
        )
        twin._detokenizer = self._detokenizer.copy()
        twin._matcher = None if self._matcher is None else self._matcher.copy()
        return twin

    def read(self, token_ids: Sequence[int], *, ended: bool, stopped: bool) -> TextStep:
        """Take an output's tokens; behind a stop string or the end, nothing more may be read.

        Args:
            token_ids: the new tokens.
            ended: whether these are the last.
            stopped: whether the last of them is the token that stopped the request; it is no part
                of the text then, unless ``include_stop_str_in_output`` is set.
        """
        hidden = 1 if stopped and token_ids and not self._include else 0
        shown = len(token_ids) - hidden
        text = ""
        # One by one: the result must not depend on how tokens are spread over outputs.
        for kept, token_id in enumerate(token_ids[:shown], 1):
            self._tokens += 1
            piece, stop = self._match(self._detokenizer.push(token_id))
            text += piece
            if stop is not None:
                return TextStep(text, stop, kept)
        self._tokens += hidden
        if not ended:
            return TextStep(text, None, len(token_ids))
        piece, stop = self._match(self._detokenizer.flush())
        text += piece
        if stop is None and self._matcher is not None:
            text += self._matcher.flush()
        return TextStep(text, stop, len(token_ids))

    def flush(self) -> str:
        """Return what is held back of a request that ended without a last output."""
        held = self._detokenizer.flush()
        return held if self._matcher is None else self._matcher.flush() + held

    def _match(self, text: str) -> tuple[str, str | None]:
        if self._matcher is None or not text:
            return text, None
        return self._matcher.push(text, counts=self._tokens > self._min_tokens)


def prepare(
    request: EngineRequest, tokenizer: PlainTokenizer | None
) -> tuple[EngineRequest, Callable[[], Transcript] | None]:
    """Turn the text in a request into tokens.

    Args:
        request: what to send; as it is without a tokenizer.
        tokenizer: of the engines' model.

    Returns:
        The request, without text, and what makes the transcript of its outputs: None without a
        tokenizer, and where no text is wanted.

    Raises:
        RequestRefusedError: the prompt or a bad word has no tokens.
    """
    if tokenizer is None:
        return request, None
    if request.prompt is not None:
        token_ids = tokenizer.encode(request.prompt, special=True)
        if not token_ids:
            raise RequestRefusedError("prompt has no tokens in this tokenizer")
        request = replace(request, prompt=None, prompt_token_ids=token_ids)
    if request.pooling_params is not None:
        return request, None
    params = request.sampling_params or SamplingParams()
    bad = [*(params.bad_words_token_ids or ())]
    if params.bad_words:
        words = [params.bad_words] if isinstance(params.bad_words, str) else params.bad_words
        bad += tokenizer.bad_words_token_ids(words)
    sent = replace(
        params,
        stop=None,
        bad_words=None,
        bad_words_token_ids=bad or None,
        eos_token_id=tokenizer.eos_token_id if params.eos_token_id is None else params.eos_token_id,
    )
    request = replace(request, sampling_params=sent)
    if not params.detokenize:
        return request, None
    return request, partial(
        Transcript, tokenizer.decoder(params), params, request.prompt_token_ids or ()
    )
