"""A batch of prompts over all engines: one fails, one engine dies, the rest is there, in order.

Run it with ``python examples/07_batch_generate.py``.
"""

from __future__ import annotations

import time
from collections import Counter

from engine_client import SamplingParams, launch

PROMPTS = [[number, number + 1, number + 2] for number in range(200)]


def main() -> None:
    with launch(3, timeout=60) as client:
        began = time.monotonic()
        done = client.generate(PROMPTS, SamplingParams(max_tokens=32))
        took = (time.monotonic() - began) * 1000
        tokens = sum(len(completion.token_ids) for completion in done)
        print(
            f"{len(done)} prompts, {tokens} tokens in {took:.1f} ms, in the order of the prompts:"
        )
        for completion in done[:3]:
            print(f"  {completion.token_ids[:6]} ... {completion.finish_reason}")
        served = Counter(completion.engine for completion in done)
        print(f"  served by engines {', '.join(map(str, sorted(served, key=str)))}")

        print("\nParameters for each, and a prompt that is longer than the model can take:")
        prompts = [[1], [1] * 5000, [2]]
        params = [SamplingParams(max_tokens=count) for count in (2, 2, 4)]
        for completion in client.generate(prompts, params):
            print(f"  {completion.error or completion.token_ids}")

        print("\nAn engine is killed in the middle of a batch:")
        # The reference engine's remote control: its 20th message of outputs is its last.
        fault = {"method": "OUTPUTS", "do": "die", "occurrence": 20}
        client.call_utility("mock_fault", fault, engines=[1])
        done = client.generate(PROMPTS, SamplingParams(max_tokens=32), max_in_flight=48)
        failed = [completion for completion in done if completion.error is not None]
        kinds = {type(completion.error).__name__ for completion in failed}
        print(f"  failed with {', '.join(sorted(kinds))}, on engine {failed[0].engine} only")
        again = client.generate(
            [PROMPTS[index] for index, one in enumerate(done) if one.error is not None],
            SamplingParams(max_tokens=32),
        )
        print(f"  tried again on the others: all finished: {all(not one.error for one in again)}")


if __name__ == "__main__":
    main()
