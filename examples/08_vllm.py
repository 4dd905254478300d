"""Real vLLM engines: start two, load weights once, generate on both, stop them.

Run it where vLLM is installed (it may be another environment than this package's):

    python examples/08_vllm.py MODEL [--engines N] [--vllm /path/to/bin/vllm] [-- FOR VLLM SERVE]
"""

from __future__ import annotations

import argparse
import logging
import sys

from engine_client import EngineClientError, SamplingParams, launch
from engine_client.tools.vllm import VllmHeadless


def main() -> None:
    """Launch, ask, generate, close."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--vllm", default="vllm", help="the vllm program")
    parser.epilog = "what follows -- goes to vllm serve"
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    # Says every 30 s for whom it waits: loading a model takes minutes.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # One launcher for each engine: the others serve on when one dies.
    command = VllmHeadless(
        given.model,
        args=words[end + 1 :],
        per_engine_env={i: {"CUDA_VISIBLE_DEVICES": str(i)} for i in range(given.engines)},
        executable=[given.vllm],
    )
    try:
        with launch(given.engines, command=command) as client:
            for engine in client.engines:
                print(f"engine {engine.index}: vLLM {engine.ready['vllm_version']}, {engine.codec}")
            print("asleep:", client.is_sleeping(timeout=10))
            prompts = [[1, 2, 3 + i] for i in range(8)]
            for result in client.generate(prompts, SamplingParams(temperature=0, max_tokens=8)):
                print(f"engine {result.engine}: {result.token_ids} ({result.finish_reason})")
    except EngineClientError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


if __name__ == "__main__":
    main()
