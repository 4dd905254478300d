"""Streams: read outputs as they come, leave early, wait with a limit, abort from elsewhere.

Run it with ``python examples/06_streaming.py``.  Two reference engines make up their tokens from
the prompt; a step of theirs takes 20 ms here.
"""

from __future__ import annotations

import sys

from engine_client import EngineRequest, SamplingParams, StreamTimeout, launch

ENGINE = [sys.executable, "-m", "engine_client.tools.mock_engine"]
ENGINE += ["--connect", "{address}", "--index", "{index}", "--options", '{"step_seconds": 0.02}']


def main() -> None:
    with launch(2, command=ENGINE, timeout=30) as client:
        print("Tokens as they come:")
        stream = client.call(EngineRequest("first", [1, 2, 3], SamplingParams(max_tokens=8)))
        for output in stream:
            print(f"  {output.new_token_ids[0]}", end="", flush=True)
        print(f"   <- engine {stream.engine}, {stream.finish_reason}")

        print("\nEnough after three; leaving the block aborts it on the engine:")
        endless = SamplingParams(max_tokens=2000)
        with client.call(EngineRequest("second", [4, 5, 6], endless)) as stream:
            print("  " + "  ".join(str(next(stream).new_token_ids[0]) for _ in range(3)))
        print(f"  live requests: {client.active_requests}")

        print("\nFour at once, on the engine with the least to do; then all are aborted:")
        streams = [client.call(EngineRequest(f"r{n}", [n], endless)) for n in range(4)]
        for stream in streams:
            next(stream)
        client.abort_all()
        for stream in streams:
            count = sum(len(output.new_token_ids) for output in stream)
            print(
                f"  {stream.request_id} on engine {stream.engine}: {stream.finish_reason}", end=""
            )
            print(" behind what had come" if count else "")

        print("\nAn engine that is paused says nothing; a time limit does not end the stream:")
        client.pause_scheduler("keep")
        stream = client.call(EngineRequest("last", [7, 8, 9], SamplingParams(max_tokens=4)))
        try:
            stream.recv(timeout=0.2)
        except StreamTimeout as error:
            print(f"  {type(error).__name__}: {error}")
        client.resume_scheduler()
        print(f"  resumed: {[output.new_token_ids[0] for output in stream]}")


if __name__ == "__main__":
    main()
