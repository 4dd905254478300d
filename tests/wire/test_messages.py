"""The messages, against the exact bytes that real engines and their clients send."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine_client.errors import ProtocolError
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import (
    DEAD_SENTINEL,
    Abort,
    Hello,
    Init,
    Outputs,
    Ready,
    Registration,
    RequestType,
    UtilityReply,
    UtilityRequest,
    handshake_message,
)

HASH = "0123456789abcdef" * 4
INIT = Init(("tcp://127.0.0.1:5001",), ("tcp://127.0.0.1:5002",))
OUTPUT = ["r1", [42], *[None] * 11, 0, *[None] * 4]
FINISHED = ["r1", [42], None, None, None, 1, *[None] * 7, 0, *[None] * 4]
STOPPED = ["r1", [42], None, None, None, 0, 7, *[None] * 6, 0, *[None] * 4]


def reply(value: object = None, failure: str | None = None) -> Outputs:
    return Outputs(timestamp=1.5, utility=UtilityReply(7, failure, value))


# Each message with its msgpack bytes (as real engines write them) and its CBOR bytes.
EXAMPLES: dict[str, tuple[Any, str, str]] = {
    "HELLO headless": (
        Hello(),
        "83a6737461747573a548454c4c4fa56c6f63616cc2a8686561646c657373c3",
        "a366737461747573 6548454c4c4f 656c6f63616c f4 68686561646c657373 f5",
    ),
    "HELLO local": (
        Hello(local=True, headless=False),
        "83a6737461747573a548454c4c4fa56c6f63616cc3a8686561646c657373c2",
        "a366737461747573 6548454c4c4f 656c6f63616c f5 68686561646c657373 f4",
    ),
    "READY headless": (
        Ready(),
        "83a6737461747573a55245414459a56c6f63616cc2a8686561646c657373c3",
        "a366737461747573 655245414459 656c6f63616c f4 68686561646c657373 f5",
    ),
    "READY with hash": (
        Ready(parallel_config_hash=HASH),
        "84a6737461747573a55245414459a56c6f63616cc2a8686561646c657373c3"
        "b4706172616c6c656c5f636f6e6669675f68617368d940" + HASH.encode().hex(),
        "a466737461747573 655245414459 656c6f63616c f4 68686561646c657373 f5"
        "74706172616c6c656c5f636f6e6669675f68617368 7840" + HASH.encode().hex(),
    ),
    "INIT": (
        INIT,
        "82a961646472657373657385a6696e7075747391b47463703a2f2f3132372e302e302e313a35303031"
        "a76f75747075747391b47463703a2f2f3132372e302e302e313a35303032"
        "b1636f6f7264696e61746f725f696e707574c0b2636f6f7264696e61746f725f6f7574707574c0"
        "be66726f6e74656e645f73746174735f7075626c6973685f61646472657373c0"
        "af706172616c6c656c5f636f6e66696780",
        "a269616464726573736573a566696e7075747381747463703a2f2f3132372e302e302e313a35303031"
        "676f75747075747381747463703a2f2f3132372e302e302e313a35303032"
        "71636f6f7264696e61746f725f696e707574f672636f6f7264696e61746f725f6f7574707574f6"
        "781e66726f6e74656e645f73746174735f7075626c6973685f61646472657373f6"
        "6f706172616c6c656c5f636f6e666967a0",
    ),
    "ABORT": (Abort(("r1", "r2")), "92a27231a27232", "82627231627232"),
    "UTILITY is_sleeping": (
        UtilityRequest(0, 7, "is_sleeping", []),
        "940007ab69735f736c656570696e6790",
        "8400076b69735f736c656570696e6780",
    ),
    "UTILITY sleep, an id of 64 bits": (
        UtilityRequest(0, 0xF123456789ABCDEF, "sleep", [1, "abort"]),
        "9400cff123456789abcdefa5736c6565709201a561626f7274",
        "84001bf123456789abcdef65736c65657082016561626f7274",
    ),
    "UTILITY add_lora": (
        UtilityRequest(0, 1, "add_lora", [["ad", 1, "/p/ad", None, False, False]]),
        "940001a86164645f6c6f72619196a2616401a52f702f6164c0c2c2",
        "840001686164645f6c6f7261818662616401652f702f6164f6f4f4",
    ),
    "utility ok True": (
        reply(True),
        "990090c0cb3ff80000000000009307c092c0c3c0c0c0c0",
        "890080f6fb3ff80000000000008307f682f6f5f6f6f6f6",
    ),
    "utility ok None": (
        reply(None),
        "990090c0cb3ff80000000000009307c092c0c0c0c0c0c0",
        "890080f6fb3ff80000000000008307f682f6f6f6f6f6f6",
    ),
    "utility ok {1, 2}": (
        reply([1, 2]),
        "990090c0cb3ff80000000000009307c092c0920102c0c0c0c0",
        "890080f6fb3ff80000000000008307f682f6820102f6f6f6f6",
    ),
    "utility failed": (
        reply(failure="Call to x method failed: boom"),
        "990090c0cb3ff80000000000009307bd43616c6c20746f2078206d6574686f64206661696c65643a20626f6f6d"
        "c0c0c0c0c0",
        "890080f6fb3ff80000000000008307"
        "781d43616c6c20746f2078206d6574686f64206661696c65643a20626f6f6df6f6f6f6f6",
    ),
    "wave complete": (
        Outputs(timestamp=1.5, wave_complete=3),
        "990090c0cb3ff8000000000000c0c003c0c0",
        "890080f6fb3ff8000000000000f6f603f6f6",
    ),
    "wave started": (
        Outputs(1, timestamp=1.5, start_wave=3),
        "990190c0cb3ff8000000000000c0c0c003c0",
        "890180f6fb3ff8000000000000f6f6f603f6",
    ),
    "one token": (
        Outputs(outputs=[OUTPUT], timestamp=1.5),
        "990091dc0012a27231912ac0c0c0c0c0c0c0c0c0c0c000c0c0c0c0c0cb3ff8000000000000c0c0c0c0c0",
        "89008192627231 81182a f6f6f6f6f6f6f6f6f6f6f6 00 f6f6f6f6 f6 fb3ff8000000000000 f6f6f6f6f6",
    ),
    "one token, weight version": (
        Outputs(outputs=[OUTPUT], timestamp=1.5, weight_version="default"),
        "990091dc0012a27231912ac0c0c0c0c0c0c0c0c0c0c000c0c0c0c0c0cb3ff8000000000000c0c0c0c0"
        "a764656661756c74",
        "89008192627231 81182a f6f6f6f6f6f6f6f6f6f6f6 00 f6f6f6f6 f6 fb3ff8000000000000 f6f6f6f6"
        "6764656661756c74",
    ),
    "finished": (
        Outputs(outputs=[FINISHED], timestamp=1.5, finished_requests=("r1",)),
        "990091dc0012a27231912ac0c0c001c0c0c0c0c0c0c000c0c0c0c0c0cb3ff8000000000000c091a27231c0c0c0",
        "89008192627231 81182a f6f6f601f6f6f6f6f6f6f6 00 f6f6f6f6 f6 fb3ff8000000000000"
        "f681627231f6f6f6",
    ),
    "stopped": (
        Outputs(outputs=[STOPPED], timestamp=1.5),
        "990091dc0012a27231912ac0c0c00007c0c0c0c0c0c000c0c0c0c0c0cb3ff8000000000000c0c0c0c0c0",
        "89008192627231 81182a f6f6f60007f6f6f6f6f6f6 00 f6f6f6f6 f6 fb3ff8000000000000 f6f6f6f6f6",
    ),
}


@pytest.mark.parametrize("dialect", ["msgpack", "cbor"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_exact(name: str, dialect: str) -> None:
    """Every example encodes to exactly these bytes and decodes to the message again."""
    message, msgpack, cbor = EXAMPLES[name]
    frame = bytes.fromhex(msgpack if dialect == "msgpack" else cbor)
    codec = codec_named(dialect)

    assert codec.encode(message.to_plain()).hex() == frame.hex()
    assert type(message).from_plain(codec.decode(frame)) == message
    assert type(message).from_plain(codec.decode(memoryview(frame))) == message


def test_constants() -> None:
    """The sentinel and the type bytes are those of the protocol."""
    assert DEAD_SENTINEL.hex() == "454e47494e455f434f52455f44454144"
    types = RequestType
    assert [types.ADD, types.ABORT, types.START_DP_WAVE, types.UTILITY] == [
        b"\0",
        b"\1",
        b"\2",
        b"\3",
    ]


@pytest.mark.parametrize("dialect", ["msgpack", "cbor"])
def test_the_sentinel_is_no_message(dialect: str) -> None:
    """The frame of a dying engine is no valid payload in either dialect."""
    with pytest.raises(ProtocolError):
        Outputs.from_plain(codec_named(dialect).decode(DEAD_SENTINEL))


# Records shorter and longer than known --------------------------------------------------------


@pytest.mark.parametrize("length", range(10))
def test_outputs_of_any_length(length: int) -> None:
    """Missing positions take their defaults, additional ones are ignored."""
    full = [2, [OUTPUT], {"a": 1}, 1.5, [7, None, None], ["r1"], 3, 4, "v"]
    defaults = [0, [], None, 0.0, None, None, None, None, None]
    assert Outputs.from_plain(full[:length]) == Outputs.from_plain(
        full[:length] + defaults[length:]
    )
    assert Outputs.from_plain([*full, "more", 1]) == Outputs.from_plain(full)


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ([7], UtilityReply(7)),
        ([7, None], UtilityReply(7)),
        ([7, "failed"], UtilityReply(7, "failed")),
        ([7, "", None], UtilityReply(7, "")),
        ([7, "failed", [None, 1]], UtilityReply(7, "failed")),
        ([7, None, [None, 1, "more"], "more"], UtilityReply(7, None, 1)),
        ([7, None, [["builtins", "bool"], True]], UtilityReply(7, None, True)),
        ([-1, None, [None, ["FINISHED", 0]]], UtilityReply(-1, None, ["FINISHED", 0])),
        ([2**64 - 1, None, None], UtilityReply(2**64 - 1)),
    ],
)  # fmt: skip
def test_utility_replies(plain: list[Any], expected: UtilityReply) -> None:
    """A reply may be shortened or lengthened, and the type description in it is ignored."""
    assert UtilityReply.from_plain(plain) == expected


def test_requests_of_other_shapes() -> None:
    """A utility request may be longer than known, and a bare id is an abort of one request."""
    assert UtilityRequest.from_plain([0, 7, "m", [1], "more"]) == UtilityRequest(0, 7, "m", [1])
    assert UtilityRequest(0, 7, "m", (1, 2)).to_plain() == [0, 7, "m", [1, 2]]
    assert Abort.from_plain("r1") == Abort(("r1",))
    assert Abort.from_plain([]) == Abort(())


def test_handshake_messages() -> None:
    """The status decides which message it is; fields may be missing, others are ignored."""
    assert handshake_message({"status": "HELLO"}) == Hello()
    assert handshake_message({"status": "READY", "local": True, "more": 1}) == Ready(local=True)
    with pytest.raises(ProtocolError, match="the status is READY"):
        Hello.from_plain({"status": "READY"})
    with pytest.raises(ProtocolError, match="the status is HELLO"):
        Ready.from_plain({"status": "HELLO"})


def test_init_with_everything() -> None:
    """An INIT carries coordinator addresses and the group's configuration."""
    init = Init(("i0", "i1"), ("o0", "o1"), "ci", "co", "st", {"data_parallel_size": 2, "p": [1]})
    assert Init.from_plain(init.to_plain()) == init
    minimal = {"addresses": {"inputs": ["i"], "outputs": ["o"]}, "parallel_config": {}, "more": 1}
    assert Init.from_plain(minimal) == Init(("i",), ("o",))


def test_registration() -> None:
    """A registration keeps all keys and has defaults for those that the client reads."""
    ready = {"max_model_len": 64, "vllm_version": "0.32.0", "data_parallel_size": 2, "new": None}
    registration = Registration.from_plain(ready)
    assert registration.ready == registration.to_plain() == ready
    assert (registration.data_parallel_size, registration.vllm_version) == (2, "0.32.0")
    assert (Registration({}).data_parallel_size, Registration({}).vllm_version) == (1, "")


# What is refused --------------------------------------------------------------------------------

REFUSED: list[tuple[type[Any], Any, str]] = [
    (Hello, [], "handshake: the payload must be a map, not list"),
    (Hello, {}, "handshake: the status must be 'HELLO' or 'READY', not NoneType"),
    (Hello, {"status": "BYE"}, "not an unknown text"),
    (Hello, {"status": ["HELLO"]}, "not list"),
    (Hello, {"status": "HELLO", "local": 1}, "HELLO: 'local' must be a boolean, not int"),
    (Ready, {"status": "READY", "headless": None}, "READY: 'headless' must be a boolean"),
    (Ready, {"status": "READY", "parallel_config_hash": 1}, "'parallel_config_hash' must be"),
    (Init, [], "INIT: the payload must be a map"),
    (Init, {"parallel_config": {}}, "INIT: 'addresses' must be a map, not NoneType"),
    (Init, {"addresses": {"inputs": "i", "outputs": ["o"]}}, "'inputs' must be an array of"),
    (Init, {"addresses": {"inputs": ["i"], "outputs": [1]}}, "'outputs' must be an array of"),
    (Init, {"addresses": {"inputs": ["i"], "outputs": []}}, "1 input and 0 output addresses"),
    (Init, {"addresses": {"inputs": [], "outputs": []}}, "0 input and 0 output addresses"),
    (Init, {"addresses": {"inputs": ["i"], "outputs": ["o"]}}, "'parallel_config' must be a map"),
    (Init, INIT.to_plain() | {"parallel_config": {"a": True}}, "a value of 'parallel_config'"),
    (Init, INIT.to_plain() | {"parallel_config": {"a": None}}, "a value of 'parallel_config'"),
    (Init, INIT.to_plain() | {"parallel_config": {1: 1}}, "a key of 'parallel_config'"),
    (
        Init,
        {
            "addresses": {"inputs": ["i"], "outputs": ["o"], "coordinator_input": 1},
            "parallel_config": {},
        },
        "'coordinator_input' must be a string, not int",
    ),
    (Registration, [], "registration: the payload must be a map"),
    (Registration, {1: 1}, "registration: a key must be a string"),
    (Registration, {"data_parallel_size": "2"}, "'data_parallel_size' must be an integer"),
    (Registration, {"data_parallel_size": 0}, "'data_parallel_size' must be at least 1"),
    (Registration, {"data_parallel_size": True}, "'data_parallel_size' must be an integer"),
    (Registration, {"vllm_version": None}, "'vllm_version' must be a string"),
    (UtilityRequest, {}, "UTILITY: the payload must be an array, not dict"),
    (UtilityRequest, [0, 7, "m"], "UTILITY: 3 fields, at least 4 are required"),
    (UtilityRequest, ["0", 7, "m", []], "the client index must be an integer"),
    (UtilityRequest, [-1, 7, "m", []], "the client index is negative"),
    (UtilityRequest, [0, None, "m", []], "the call id must be an integer"),
    (UtilityRequest, [0, 7, b"m", []], "the method must be a string"),
    (UtilityRequest, [0, 7, "m", None], "the arguments must be an array"),
    (Abort, None, "ABORT: the payload must be an array of strings, not NoneType"),
    (Abort, ["r1", 2], "ABORT: the payload must be an array of strings"),
    (UtilityReply, [], "utility reply: 0 fields"),
    (UtilityReply, 1, "utility reply: the payload must be an array"),
    (UtilityReply, [True], "the call id must be an integer, not bool"),
    (UtilityReply, ["7", None, None], "the call id must be an integer, not str"),
    (UtilityReply, [7, 1, None], "the failure must be a string or nil"),
    (UtilityReply, [7, None, True], "the result must be an array of two or nil"),
    (UtilityReply, [7, None, [None]], "the result must be an array of two or nil"),
]


@pytest.mark.parametrize(("message", "plain", "text"), REFUSED)
def test_refused(message: type[Any], plain: object, text: str) -> None:
    """What is not valid is refused with a text that names the message, the field and the type."""
    with pytest.raises(ProtocolError, match=re.escape(text)):
        message.from_plain(plain)


REFUSED_OUTPUTS: list[tuple[Any, str, int | None, int | None]] = [
    (None, "outputs: the payload must be an array, not NoneType", None, None),
    ({0: 1}, "outputs: the payload must be an array, not dict", None, None),
    ([None], "the engine index must be an integer below 65536", None, None),
    ([-1], "the engine index must be", None, None),
    ([65_536], "the engine index must be", None, None),
    ([True], "the engine index must be", None, None),
    (["0", [], None, 1.5, [7, None, None]], "the engine index must be", None, 7),
    ([3, None], "the outputs must be an array", 3, None),
    ([3, [], [], 1.5, [7, None, None]], "the scheduler statistics must be a map or nil", 3, 7),
    ([3, [], None, "now", [7, None, None]], "the timestamp must be a number", 3, 7),
    ([3, [], None, 1.5, [7, 1, None]], "the failure must be", 3, 7),
    ([3, [], None, 1.5, [7, None, True]], "the result must be", 3, 7),
    ([3, [], None, 1.5, ["7"]], "the call id must be", 3, None),
    ([3, [], None, 1.5, []], "utility reply: 0 fields", 3, None),
    ([3, [], None, 1.5, "reply"], "utility reply: the payload must be an array", 3, None),
    ([3, [], None, 1.5, None, [1]], "the finished requests must be an array of strings", 3, None),
    ([3, [], None, 1.5, [7, None, None], None, "1"], "a wave must be an integer", 3, 7),
    ([3, [], None, 1.5, [7, None, None], None, None, 1.0], "a wave must be an integer", 3, 7),
    ([3, [], None, 1.5, [7], None, None, None, 1], "the weight version must be a string", 3, 7),
]


@pytest.mark.parametrize(("plain", "text", "engine", "call"), REFUSED_OUTPUTS)
def test_refused_outputs(plain: object, text: str, engine: int | None, call: int | None) -> None:
    """The error of a bad message still says whose it was, as far as that could be read."""
    with pytest.raises(ProtocolError, match=re.escape(text)) as caught:
        Outputs.from_plain(plain)
    assert (caught.value.engine_index, caught.value.call_id) == (engine, call)
