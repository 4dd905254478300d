"""Messages written by vLLM's own encoder, of vLLM's own records. Runs under vLLM's interpreter.

    python vllm_records.py FILE

FILE is JSON: for each request that this project's wire layer wrote, its frames (hex), under its
name. Prints JSON behind `>>> `: `requests`, the frames of the same requests, read by vLLM's decoder
and written again by its encoder; and `messages`, what no engine can be brought to send on a CPU.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

# By name: the checks of this project run where there is no vLLM.
engine = import_module("vllm.v1.engine")
outputs = import_module("vllm.v1.outputs")
serial = import_module("vllm.v1.serial_utils")
stats = import_module("vllm.v1.metrics.stats")
utils = import_module("vllm.v1.engine.utils")
numpy = import_module("numpy")
torch = import_module("torch")

ENCODE = serial.MsgpackEncoder().encode
ADDRESS = "tcp://127.0.0.1:"


def frames_of(record: Any) -> list[str]:
    """The frames of a message."""
    return [bytes(frame).hex() for frame in ENCODE(record)]


def rewritten(frames: list[bytes]) -> list[str]:
    """A request, read and written by vLLM."""
    return frames_of(serial.MsgpackDecoder(engine.EngineCoreRequest).decode(frames))


def output(tokens: list[int], **fields: Any) -> Any:
    """A step of one request."""
    return engine.EngineCoreOutput("encoded-0000000a", tokens, **fields)


def step(*records: Any, **fields: Any) -> Any:
    """A message with steps."""
    return engine.EngineCoreOutputs(0, list(records), timestamp=1.5, **fields)


def reply(call_id: int, value: Any, **fields: Any) -> Any:
    """A message with an answer."""
    answer = engine.UtilityOutput(call_id, result=serial.UtilityResult(value), **fields)
    return engine.EngineCoreOutputs(0, timestamp=1.5, utility_output=answer)


def floats(*shape: int) -> Any:
    """Numbers that count up."""
    size = torch.Size(shape).numel()
    return torch.arange(size, dtype=torch.float32).reshape(shape)


def logprobs(columns: int) -> Any:
    """Of two tokens in one step, as speculative decoding gives them."""
    ids = numpy.arange(2 * columns, dtype=numpy.int32).reshape(2, columns)
    ranks = numpy.array([1, 2], dtype=numpy.int64)
    return outputs.LogprobsLists(ids, -ids.astype(numpy.float32), ranks, [0, 2])


def messages() -> dict[str, Any]:
    """What engines with other hardware, models or connectors send; and what vLLM's clients do."""
    speculation = stats.RequestSpecDecodeMetrics.new(2)
    speculation.observe(2, 1, detailed=True)
    events = [engine.EngineCoreEvent(engine.EngineCoreEventType(kind), 0.5) for kind in (1, 2, 3)]
    drafts = import_module("vllm.v1.spec_decode.metrics").SpecDecodingStats.new(2)
    reasons = {
        f"output: {reason.name}": step(output([], finish_reason=reason))
        for reason in engine.FinishReason
    }
    return reasons | {
        "output: transfers": step(
            output(
                [5],
                kv_transfer_params={"remote_block_ids": [1, 2], "remote_host": "h"},
                ec_transfer_params={"hash": {"size": 3}},
            )
        ),
        "output: preempted": step(output([5], events=events, num_nans_in_logits=2)),
        "output: experts inline": step(output([5], routed_experts=numpy.ones((3, 2, 2), "u1"))),
        "output: experts in a frame": step(
            output([5], routed_experts=numpy.arange(300, dtype=numpy.int16).reshape(50, 3, 2))
        ),
        "output: cache miss": step(
            output([], finish_reason=engine.FinishReason.ERROR, mm_cache_miss_hashes=["aa", "bb"]),
            finished_requests={"encoded-0000000a"},
        ),
        "output: mask": step(
            output(
                [5],
                new_sampling_mask=outputs.SamplingMaskLists(
                    numpy.array([5, 6, 9], dtype=numpy.int32), numpy.array([0, 3])
                ),
            )
        ),
        "output: speculation": step(
            output([5, 6], new_logprobs=logprobs(3), spec_decode_metrics=speculation)
        ),
        "output: speculation in frames": step(output([5, 6], new_logprobs=logprobs(40))),
        "output: chosen tokens": step(output([5], prompt_token_id_logprobs=floats(2, 3))),
        "output: pooled inline": step(output([], pooling_output=floats(63))),
        "output: pooled in a frame": step(output([], pooling_output=floats(64))),
        "output: pooled half": step(output([], pooling_output=floats(4).to(torch.bfloat16))),
        "output: stopped by a text": step(output([5], finish_reason=0, stop_reason="stop")),
        "output: all statistics": step(
            scheduler_stats=stats.SchedulerStats(
                num_running_reqs=2,
                num_waiting_reqs=1,
                num_skipped_waiting_reqs=1,
                num_kv_fetch_reqs_by_stage={"in_progress": 1},
                step_counter=9,
                current_wave=3,
                kv_cache_usage=0.25,
                kv_cache_eviction_events=[stats.KVCacheEvictionEvent(1.5, 0.5, (0.25,))],
                spec_decoding_stats=drafts,
                kv_connector_stats={"transfers": 3},
                waiting_lora_adapters={"alpha": 1},
                running_lora_adapters={"beta": 1},
            )
        ),
        "reply: array inline": reply(1, floats(2)),
        "reply: array in a frame": reply(2, [numpy.arange(64, dtype=numpy.int32), "and"]),
        "reply: nested": reply(3, {"a": [1, None, {"b": (2.5, b"raw")}], "c": {7}}),
        "reply: reconfigured": reply(-1, ("RECONFIGURE_FINISHED", 1)),
        "reply: status": reply(-2, {"id": 0, "status": "unhealthy", "fault_info": "X"}),
        "reply: shutting down": engine.EngineCoreOutputs(
            timestamp=1.5,
            utility_output=engine.UtilityOutput(4, failure_message="Server shutting down"),
        ),
        "reply: failure without a text": engine.EngineCoreOutputs(
            timestamp=1.5,
            utility_output=engine.UtilityOutput(5, failure_message="Call to x method failed: "),
        ),
        "INIT for three frontends": utils.EngineHandshakeMetadata(
            utils.EngineZmqAddresses(
                [f"{ADDRESS}500{number}" for number in range(3)],
                [f"{ADDRESS}600{number}" for number in range(3)],
                f"{ADDRESS}7000",
                f"{ADDRESS}7001",
                f"{ADDRESS}7002",
            ),
            {
                "data_parallel_master_ip": "127.0.0.1",
                "data_parallel_master_port": 7003,
                "_data_parallel_master_port_list": [7004, 7005],
                "_coord_store_port": 0,
                "data_parallel_size": 2,
            },
        ),
        "UTILITY of vLLM's client": (
            2,
            2**64 - 1,
            "add_lora",
            (import_module("vllm.lora.request").LoRARequest("alpha", 1, "adapters/alpha"),),
        ),
        "ABORT of vLLM's client": ["a-0000000a", "b-0000000b"],
        "START_DP_WAVE of vLLM's client": (3, 1),
    }


def main(path: Path) -> None:
    """Print both."""
    requests = {
        name: rewritten([bytes.fromhex(frame) for frame in frames])
        for name, frames in json.loads(path.read_text()).items()
    }
    written = {name: frames_of(record) for name, record in messages().items()}
    print(f"\n>>> {json.dumps({'requests': requests, 'messages': written})}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
