"""The handshake's tables, and both sides against each other."""

from __future__ import annotations

import random

import pytest

from engine_client.errors import ProtocolError
from engine_client.wire.codec import codec_named
from engine_client.wire.handshake import (
    ENGINE_TRANSITIONS,
    TRANSITIONS,
    ClientHandshake,
    EngineEvent,
    EngineHandshake,
    EnginePhase,
    Event,
    Phase,
)
from engine_client.wire.messages import Hello, Init, Ready, Registration, handshake_message

INIT = Init(("tcp://127.0.0.1:5001",), ("tcp://127.0.0.1:5002",))

H, R, G = Event.HELLO, Event.READY, Event.REGISTRATION
TABLE: dict[Phase, dict[Event, Phase | None]] = {
    Phase.NEW: {H: Phase.GREETED, R: None, G: None},
    Phase.GREETED: {H: Phase.GREETED, R: Phase.READY, G: Phase.REGISTERED},
    Phase.READY: {H: Phase.GREETED, R: Phase.READY, G: Phase.COMPLETE},
    Phase.REGISTERED: {H: Phase.GREETED, R: Phase.COMPLETE, G: Phase.REGISTERED},
    Phase.COMPLETE: {H: Phase.GREETED, R: Phase.COMPLETE, G: Phase.COMPLETE},
}


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", Event)
def test_every_transition(phase: Phase, event: Event) -> None:
    """Each event in each phase leads where the protocol says, or is refused without effect."""
    handshake = ClientHandshake()
    handshake.phase = phase
    expected = TABLE[phase][event]
    if expected is None:
        assert (phase, event) not in TRANSITIONS
        with pytest.raises(ProtocolError, match="restart the engine"):
            handshake.receive(event)
        assert handshake.phase is phase
    else:
        assert handshake.receive(event) is expected
        assert handshake.phase is expected


@pytest.mark.parametrize("event", [Event.READY, Event.REGISTRATION])
def test_an_engine_of_an_earlier_client(event: Event) -> None:
    """What an engine sends without a HELLO is explained by the client that it had before."""
    with pytest.raises(ProtocolError, match=f"{event.value} from an engine that has not said"):
        ClientHandshake().receive(event)


def test_bootstrapped() -> None:
    """Where a launcher did the handshake, only the registration is awaited."""
    handshake = ClientHandshake(bootstrapped=True)
    assert handshake.waiting_for == "registration"
    assert handshake.receive(Event.REGISTRATION) is Phase.COMPLETE


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        (Phase.NEW, "HELLO"),
        (Phase.GREETED, "READY and registration"),
        (Phase.READY, "registration"),
        (Phase.REGISTERED, "READY"),
        (Phase.COMPLETE, "nothing"),
    ],
)
def test_waiting_for(phase: Phase, text: str) -> None:
    """A handshake says what it waits for, also in its repr."""
    handshake = ClientHandshake()
    handshake.phase = phase
    assert handshake.waiting_for == text
    assert repr(handshake) == f"<ClientHandshake {phase.value}: waiting for {text}>"


def test_the_engine_side_goes_one_way() -> None:
    """An engine takes its steps in order, each once."""
    engine = EngineHandshake(local=True, headless=False)
    assert repr(engine) == "<EngineHandshake start>"
    with pytest.raises(ProtocolError, match="cannot send READY in phase 'start'; next: send HELLO"):
        engine.ready()
    assert engine.hello() == Hello(local=True, headless=False)
    with pytest.raises(ProtocolError, match="next: receive INIT"):
        engine.hello()
    engine.receive(INIT)
    assert engine.init == INIT
    with pytest.raises(ProtocolError, match="cannot receive INIT"):
        engine.receive(INIT)
    assert engine.registration({"max_model_len": 64}) == Registration({"max_model_len": 64})
    assert engine.ready("hash") == Ready(True, False, "hash")
    assert engine.phase is EnginePhase.READY_SENT
    with pytest.raises(ProtocolError, match="next: nothing"):
        engine.hello()


def test_the_engine_side_has_no_other_steps() -> None:
    """Each step of an engine is possible in exactly one phase."""
    assert sorted(e.name for _, e in ENGINE_TRANSITIONS) == sorted(e.name for e in EngineEvent)


@pytest.mark.parametrize("dialect", ["cbor", "msgpack"])
@pytest.mark.parametrize("seed", range(20))
def test_both_sides(dialect: str, seed: int) -> None:
    """However two connections interleave, client and engine complete; so does a new incarnation."""
    codec = codec_named(dialect)
    chance = random.Random(seed)
    client = ClientHandshake()
    for _incarnation in range(2):
        engine = EngineHandshake()
        message = handshake_message(codec.decode(codec.encode(engine.hello().to_plain())))
        assert isinstance(message, Hello)
        assert client.receive(Event.HELLO) is Phase.GREETED
        engine.receive(Init.from_plain(codec.decode(codec.encode(INIT.to_plain()))))
        registration = codec.encode(engine.registration({"data_parallel_size": 2}).to_plain())
        ready = codec.encode(engine.ready().to_plain())

        arrivals = [(Event.REGISTRATION, registration), (Event.READY, ready)]
        arrivals += chance.sample(arrivals, k=chance.randint(0, 2))  # repeats
        chance.shuffle(arrivals)
        for event, frame in arrivals:
            if event is Event.READY:
                assert isinstance(handshake_message(codec.decode(frame)), Ready)
            else:
                assert Registration.from_plain(codec.decode(frame)).data_parallel_size == 2
            client.receive(event)
        assert client.phase is Phase.COMPLETE
