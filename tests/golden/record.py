"""Record messages from real vLLM engines into this folder.

    tests/interop/run record

It drives the engines with the wire layer and a few sockets, not with the client, so that every
frame is seen: four engines that differ in what they can do; two lockstep groups, with a coordinator
and without; vLLM's coordinator process. What none of them can be brought to send on a CPU is
written by vLLM's own encoder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from engine_client.request import EngineRequest
from engine_client.sampling import SamplingParams
from engine_client.wire.messages import Abort, Outputs, RequestType
from tests.golden.recorder import CODEC, SUBSCRIBE, Recorder, Vectors
from tests.golden.requests import ADAPTER, READ, READ_AS, RUN, wire_id
from tests.interop.engines import HERE, EngineGroup, engine_environment, vllm_engines
from tests.interop.environment import environment
from tests.interop.tiny_model import make_model

SMALL, STATISTICS, FEATURES, POOLS = range(4)
"""The engines."""
ONLY: dict[int, dict[str, Any]] = {
    STATISTICS: {"disable_log_stats": False},
    FEATURES: {
        "skip_tokenizer_init": False,
        "enable_prompt_embeds": True,
        "max_logprobs": -1,
        "shutdown_timeout": 60,
    },
    POOLS: {
        "runner": "pooling",
        "enable_lora": False,
        # The model in a process of its own, whose failures have another text.
        "distributed_executor_backend": "mp",
        # Replies say the types of their values.
        "settings": {
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        },
    },
}
Call = tuple[int, int, str, list[Any]]
CALLS: list[Call] = [
    (0, 0, "is_sleeping", []),
    (1, 2**53 - 1, "is_scheduler_paused", []),
    (0, 2**64 - 1, "get_weight_version", []),
    (1, 300, "set_weight_version", ["v2"]),
    (0, 301, "get_supported_tasks", []),
    (0, 302, "get_kv_cache_group_metadata", []),
    (0, 303, "collective_rpc", ["check_health", None, [], None]),
    (0, 304, "collective_rpc", ["no_such_method", 1.5, [], {}]),
    (0, 305, "add_lora", [ADAPTER.to_plain()]),
    (0, 306, "add_lora", [["none", 4, "/nonexistent", None, False, False]]),
    (0, 307, "add_lora", [["short", 4, "/nonexistent"]]),
    (0, 308, "list_loras", []),
    (0, 309, "pin_lora", [1]),
    (0, 310, "remove_lora", [9]),
    (0, 311, "reset_prefix_cache", [False, False]),
    (0, 312, "sleep", [1, "abort"]),
    (0, 313, "wake_up", [["weights"]]),
    (0, 314, "wake_up", [None]),
    (0, 315, "sleep", [0, "bogus"]),
    (0, 316, "no_such_method", []),
    (0, 317, "is_sleeping", [1, 2]),
    (0, 318, "profile", [True, "prefix", None, None]),
]


def _rpc(method: str, **arguments: Any) -> list[Any]:
    return [method, None, [], arguments or None]


MORE_CALLS: list[tuple[str, list[Any]]] = [
    ("add_lora", [["beta", 2, "adapters/beta", "base", True, False]]),
    ("remove_lora", [2]),
    ("pin_lora", [9]),
    ("reset_prefix_cache", [True, True]),
    ("reset_mm_cache", []),
    ("reset_encoder_cache", []),
    ("compute_weight_checksums", []),
    ("save_sharded_state", ["sharded", "part-{rank}-{part}.safetensors", 2**30]),
    ("execute_dummy_batch", []),
    ("profile", [True, "prefix", 1, 2]),
    ("profile", [False]),
    ("release_kv_cache_memory", []),
    ("pause_scheduler", ["keep", False]),
    ("resume_scheduler", []),
    ("sleep", [0, "keep"]),
    ("wake_up", [["scheduling"]]),
    ("collective_rpc", _rpc("init_weight_transfer_engine", init_info={"port": 1})),
    ("collective_rpc", _rpc("start_weight_update")),
    ("collective_rpc", _rpc("start_draft_weight_update")),
    ("collective_rpc", _rpc("update_weights", update_info={"names": ["w"]})),
    ("collective_rpc", _rpc("finish_weight_update")),
    ("collective_rpc", _rpc("shutdown_weight_transfer_engine")),
    ("collective_rpc", _rpc("checkpoint_prepare")),
    ("collective_rpc", _rpc("checkpoint_restore")),
    ("barrier", []),
    ("reinitialize_distributed", [[2, 0, 0, "127.0.0.1", 1, [2], 0]]),
    ("commit_prepared_elastic_ep", []),
    ("is_sleeping", [{"kind": "wrong"}]),
]
"""Of engine 2."""
TYPED_CALLS: list[tuple[str, list[Any]]] = [
    ("is_sleeping", []),
    ("get_supported_tasks", []),
    ("get_kv_cache_group_metadata", []),
    ("reset_mm_cache", []),
    ("collective_rpc", _rpc("no_such_method")),
    ("add_lora", [["none", 4, "/nonexistent", None, False, False]]),
]
"""Of engine 3."""


# -- four engines ----------------------------------------------------------------------------------


def record_engines(vectors: Vectors, folder: Path) -> None:
    """Calls, requests, failures and the end."""
    with vllm_engines(folder, 4, only=ONLY) as group, recording(group, vectors) as recorder:
        group.adapter("alpha")
        group.adapter("beta")
        (folder / "sharded").mkdir()
        recorder.greet(4)
        for engine, call_id, method, args in CALLS:
            recorder.call(engine, call_id, method, args)
        for engine, calls in ((FEATURES, MORE_CALLS), (POOLS, TYPED_CALLS)):
            for number, (method, args) in enumerate(calls, 1000 * engine):
                recorder.call(engine, number, method, args)
        for engine, requests in RUN.items():
            for request in requests:
                name = recorder.add(engine, request)
                recorder.outputs(engine, name, request.request_id)
        _with_statistics(recorder)
        _overtaken(recorder)
        _aborted(recorder)
        _aborted_at_once(recorder)
        _refused_by_the_engine(recorder)
        _shutting_down(recorder, group)
        recorder.send(STATISTICS, [b"\x04", CODEC.encode([])])
        _, frames = recorder.receive(lambda message: False)
        name = "after a type byte that does not exist"
        recorder.note("death", name, "engine", STATISTICS, "output", frames)


@contextlib.contextmanager
def recording(
    group: EngineGroup, vectors: Vectors, family: str = "", *, coordinator: bool = False
) -> Iterator[Recorder]:
    """A recorder of these engines."""
    recorder = Recorder(group.address, vectors, family, coordinator=coordinator)
    try:
        yield recorder
    finally:
        recorder.close()


def _long(name: str, tokens: int = 300) -> EngineRequest:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return EngineRequest(name, [7, 8], params, arrival_time=1.5)


def _with_statistics(recorder: Recorder) -> None:
    params = SamplingParams(max_tokens=1)
    request = EngineRequest("statistics", [1, 2, 3], params, arrival_time=1.5)
    recorder.outputs(STATISTICS, recorder.add(STATISTICS, request), request.request_id)
    _, frames = recorder.receive(lambda m: m[0] == STATISTICS and m[2] is not None and not m[1])
    recorder.note("requests", "statistics: alone", "engine", STATISTICS, "output", frames)


def _overtaken(recorder: Recorder) -> None:
    """A pause that waits for a running request is answered after the question behind it."""
    name = recorder.add(0, _long("running"))
    # A request that no step has seen yet would not be waited for.
    recorder.receive(lambda message: any(output[0] == name for output in message[1]))
    recorder.ask(0, 9001, "pause_scheduler", ["wait", True], "pause_scheduler, call 9001")
    recorder.ask(0, 9002, "is_scheduler_paused", [], "is_scheduler_paused, call 9002")
    names = {9001: "pause_scheduler, call 9001", 9002: "is_scheduler_paused, call 9002"}
    for _ in range(2):
        call_id, frames = recorder.reply(list(names))
        name = f"{names[call_id]}: reply"
        recorder.note("utility", name, "engine", 0, "output", frames)
    recorder.call(0, 9003, "resume_scheduler", [])


def _abort(recorder: Recorder, engine: int, name: str, label: str) -> None:
    frames = [RequestType.ABORT, CODEC.encode(Abort((name,)).to_plain())]
    recorder.note("requests", f"{label}: ABORT", "client", engine, "input", frames)
    recorder.send(engine, frames)


def _aborted(recorder: Recorder) -> None:
    """By the client, without an answer; then by a pause, with one."""
    name = recorder.add(0, _long("aborted by the client"))
    _abort(recorder, 0, name, "aborted by the client")
    recorder.call(0, 9004, "is_sleeping", [])
    name = recorder.add(0, _long("aborted by a pause"))
    recorder.receive(lambda message: any(output[0] == name for output in message[1]))
    recorder.ask(0, 9005, "pause_scheduler", ["abort", True], "pause_scheduler, call 9005")
    _, frames = recorder.receive(lambda message: any(o[5] is not None for o in message[1]))
    recorder.note("requests", "aborted by a pause: output", "engine", 0, "output", frames)
    _, frames = recorder.reply([9005])
    recorder.note("utility", "pause_scheduler, call 9005: reply", "engine", 0, "output", frames)
    recorder.call(0, 9006, "resume_scheduler", [])


def _aborted_at_once(recorder: Recorder) -> None:
    """By its own flag; whatever an engine says of it comes before the next answer."""
    request = EngineRequest("aborted at once", [1, 2], arrival_time=1.5, abort_immediately=True)
    recorder.add(FEATURES, request)
    recorder.call(FEATURES, 9007, "is_sleeping", [])


def _refused_by_the_engine(recorder: Recorder) -> None:
    """Without parameters, which the client never sends: the engine ends it with an error."""
    name = wire_id("failed")
    plain = EngineRequest("failed", [1, 2, 3], arrival_time=1.5).to_plain(name, 0, [])
    frames = [RequestType.ADD, CODEC.encode([*plain[:3], None, *plain[4:]])]
    recorder.note("requests", "failed", "client", 0, "input", frames)
    recorder.send(0, frames)
    recorder.outputs(0, name, "failed")


def _shutting_down(recorder: Recorder, group: EngineGroup) -> None:
    """Told to end, an engine finishes what runs and refuses the rest, or aborts at once."""
    name = recorder.add(FEATURES, _long("running at the end", 1500))
    recorder.receive(lambda message: any(output[0] == name for output in message[1]))
    group.engines[FEATURES].signal(signal.SIGTERM)
    number = 9100
    while True:  # until the signal has been handled
        recorder.ask(FEATURES, number, "is_scheduler_paused", [], f"at the end, call {number}")
        _, frames = recorder.reply([number])
        where = f"at the end, call {number}: reply"
        message = recorder.note("utility", where, "engine", FEATURES, "output", frames)
        if message[4][1] is not None:
            break
        del recorder.vectors.kept["utility"][-2:]
        number += 1
    late = recorder.add(FEATURES, _long("too late"))
    recorder.outputs(FEATURES, late, "too late")
    name = recorder.add(SMALL, _long("aborted by SIGTERM"))
    recorder.receive(lambda message: any(output[0] == name for output in message[1]))
    group.engines[SMALL].signal(signal.SIGTERM)
    _, frames = recorder.receive(lambda m: any(o[0] == name and o[5] is not None for o in m[1]))
    recorder.note("requests", "aborted by SIGTERM: output", "engine", SMALL, "output", frames)


# -- lockstep groups -------------------------------------------------------------------------------


def record_lockstep(vectors: Vectors, folder: Path, *, coordinator: bool) -> None:
    """Two waves of two ranks, the second begun by a request that is told the old one."""
    model = make_model(folder / "experts", num_local_experts=4)
    first, rpc, *others = _free_ports(7)
    meeting = {
        "data_parallel_master_ip": "127.0.0.1",
        "data_parallel_master_port": first,
        "_data_parallel_master_port_list": others,
        "_coord_store_port": 0,
        "data_parallel_size": 2,
    }
    arguments: dict[str, Any] = {
        "model": str(model),
        "enable_lora": False,
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_address": "127.0.0.1",
        "data_parallel_rpc_port": rpc,
    }
    family = "lockstep" if coordinator else "alone"
    with (
        vllm_engines(folder, only={1: {"data_parallel_start_rank": 1}}, **arguments) as group,
        recording(group, vectors, family, coordinator=coordinator) as recorder,
    ):
        recorder.greet(2, meeting)
        name = recorder.add(1, _long("first", 3))
        recorder.wake("wake-up of wave 0", 0, 1)
        recorder.outputs(1, name, "first")
        if coordinator:
            _coordinated(recorder)
        else:
            for _ in range(2):
                message, frames = recorder.receive(lambda m: m[6] is not None)
                where = f"wave 0 complete, by {message[0]}"
                recorder.note("", where, "engine", message[0], "output", frames)
            name = recorder.add(0, _long("second", 2), wave=1)
            recorder.wake("wake-up of wave 1", 1, None)
            recorder.outputs(0, name, "second")
        for engine in (0, 1):
            recorder.ask(engine, 10 + engine, "barrier", [], f"barrier, {engine}")
        for _ in range(2):
            call_id, frames = recorder.reply([10, 11])
            where = f"barrier, {call_id - 10}: reply"
            recorder.note("", where, "engine", call_id - 10, "output", frames)


def _coordinated(recorder: Recorder) -> None:
    recorder.told("start of wave 0", lambda m: m[7] == 0)
    recorder.told("load", lambda m: m[2] is not None)
    recorder.told("wave 0 complete", lambda m: m[6] == 0)
    name = recorder.add(1, _long("told an old wave", 400), wave=0)
    recorder.told("start of wave 1", lambda m: m[7] == 1)
    recorder.wake("wake-up of wave 1", 1, 1)
    recorder.receive(lambda message: any(output[0] == name for output in message[1]))
    _abort(recorder, 1, name, "told an old wave")
    _, frames = recorder.receive(lambda m: m[5] is not None and not m[1])
    recorder.note("", "told an old wave: finished", "engine", 1, "output", frames)
    recorder.told("wave 1 complete", lambda m: m[6] == 1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


# -- vLLM's coordinator ----------------------------------------------------------------------------


def record_coordinator(vectors: Vectors, folder: Path) -> None:
    """What vLLM's coordinator says to clients and engines, both of which are played here."""
    vllm = environment()
    with (
        (folder / "coordinator.log").open("wb") as log,
        subprocess.Popen(
            [vllm.python, HERE / "coordinator_process.py", "2"],
            env=os.environ | engine_environment(vllm, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
        zmq.Context() as context,
        contextlib.ExitStack() as stack,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        lines = iter(process.stdout.readline, b"")
        addresses = next(json.loads(line) for line in lines if line.startswith(b"["))
        sockets = []
        for kind, address in zip((zmq.XSUB, zmq.XSUB, zmq.PUSH), addresses, strict=True):
            sock = stack.enter_context(context.socket(kind))
            sock.linger, sock.rcvtimeo = 1000, 30_000
            sock.connect(address)
            sockets.append(sock)
        _play(vectors, *sockets)
        process.stdin.close()
        process.wait(30)


def _play(
    vectors: Vectors,
    client: zmq.Socket[bytes],
    engine: zmq.Socket[bytes],
    ears: zmq.Socket[bytes],
) -> None:
    def published(name: str, running: bool | None = None, *, counted: bool = False) -> None:
        while True:  # it also repeats itself
            frames = client.recv_multipart()
            counts, _, runs = CODEC.decode(frames[0])
            loaded = counts is not None and any(any(one) for one in counts)
            if loaded if counted else runs is running:
                vectors.note("coordinator", name, "coordinator", -1, "stats", frames)
                return

    def woken(name: str) -> None:
        frames = engine.recv_multipart()
        vectors.note("coordinator", name, "coordinator", -1, "coordinator_input", frames)

    def say(name: str, payload: bytes) -> None:
        how = "written by this project's wire layer, and taken by vLLM's coordinator process"
        vectors.note("coordinator", name, "client", -1, "stats", [payload], how)
        client.send(payload)

    for _ in range(2):
        engine.send(SUBSCRIBE)
    woken("gate")
    say("subscription", SUBSCRIBE)
    published("asleep in wave 0", False)
    say("request for rank 1, asleep", CODEC.encode([1, 0]))
    woken("wake-up of wave 0")
    ears.send(CODEC.encode(Outputs(0, start_wave=0).to_plain()))
    woken("wake-up of wave 0, confirmed")
    published("awake in wave 0", True)
    load = {"num_running_reqs": 2, "num_waiting_reqs": 1, "kv_cache_usage": 0.5}
    load |= {"step_counter": 1, "current_wave": 0}
    ears.send(CODEC.encode(Outputs(0, scheduler_stats=load).to_plain()))
    load |= {"step_counter": 2}
    ears.send(CODEC.encode(Outputs(1, scheduler_stats=load).to_plain()))
    published("loads", counted=True)
    ears.send(CODEC.encode(Outputs(0, wave_complete=0).to_plain()))
    published("asleep in wave 1", False)
    say("request for rank 1, of an old wave", CODEC.encode([1, 0]))
    woken("wake-up of wave 1 for all")


# -- vLLM's encoder --------------------------------------------------------------------------------

READ_HOW = "written by this project's wire layer, and read by vLLM's decoder; no engine ran it"
REWRITTEN_HOW = "written by vLLM's encoder, of the record that vLLM's decoder read from ours"
WRITTEN_HOW = "written by vLLM's encoder, of vLLM's own records; no engine here sends it"


def record_encoded(vectors: Vectors, folder: Path) -> None:
    """What vLLM's own encoder writes."""
    asked: dict[str, list[bytes]] = {}
    for request in (*(one for requests in RUN.values() for one in requests), *READ):
        extra: list[bytes] = []
        client, wave = READ_AS if request in READ else (0, 0)
        plain = request.to_plain(wire_id(request.request_id), client, extra, wave=wave)
        asked[request.request_id] = [CODEC.encode(plain), *extra]
    question = folder / "requests.json"
    question.write_text(
        json.dumps({name: [one.hex() for one in frames] for name, frames in asked.items()})
    )
    vllm = environment()
    done = subprocess.run(
        [vllm.python, HERE / "vllm_records.py", question],
        env=os.environ | engine_environment(vllm, folder),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(">>> ")]
    answers = json.loads(line.removeprefix(">>> "))
    for request in READ:
        name = request.request_id
        frames = [RequestType.ADD, *asked[name]]
        vectors.note("encoded", name, "client", -1, "input", frames, READ_HOW)
    for name, hexes in answers["requests"].items():
        frames = [RequestType.ADD, *map(bytes.fromhex, hexes)]
        label = f"{name}, by vLLM"
        vectors.note("encoded", label, "client", -1, "input", frames, REWRITTEN_HOW)
    for name, hexes in answers["messages"].items():
        frames = [bytes.fromhex(one) for one in hexes]
        kind = name.split()[0]
        sender, channel = CHANNELS.get(kind, ("engine", "output"))
        if channel == "input":
            frames = [getattr(RequestType, kind), *frames]
        vectors.note("encoded", name, sender, 0, channel, frames, WRITTEN_HOW)


CHANNELS = {
    "INIT": ("client", "handshake"),
    "UTILITY": ("client", "input"),
    "ABORT": ("client", "input"),
    "START_DP_WAVE": ("client", "input"),
}
"""Of what vLLM's encoder wrote, by the first word of its name."""


def main() -> None:
    """Start engines, record, write the files."""
    vectors = Vectors()
    with tempfile.TemporaryDirectory(prefix="ec-golden-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        record_encoded(vectors, folder)
        record_coordinator(vectors, folder)
        for coordinator in (True, False):
            part = folder / str(coordinator)
            part.mkdir()
            record_lockstep(vectors, part, coordinator=coordinator)
        record_engines(vectors, folder)
    vectors.save()


if __name__ == "__main__":
    main()
