"""Starting vLLM engines with :func:`engine_client.launch`.

::

    from engine_client import launch
    from engine_client.tools.vllm import VllmHeadless

    with launch(2, command=VllmHeadless("meta-llama/Llama-3.1-8B")) as client:
        ...

vLLM is run, never imported: it may live in another environment than this package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_client.tools.launcher import EngineJob

__all__ = ["VllmHeadless"]


@dataclass(frozen=True, slots=True)
class VllmHeadless:
    """The command ``vllm serve MODEL --headless``, for each engine or once for all.

    ``vllm serve --headless`` ends all engines that it started when one of them dies.  So by default
    each engine gets a launcher of its own; they are independent then, and the others serve on.
    """

    model: str
    args: Sequence[str] = ()
    """More arguments of ``vllm serve``, such as ``["--max-model-len", "4096"]``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to the environment, such as ``CUDA_VISIBLE_DEVICES``."""
    per_engine_env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Variables of single engines, by index: which device each one uses, say."""
    one_launcher: bool = False
    """Start all engines with one command; a lockstep group must be."""
    executable: Sequence[str] = ("vllm",)
    """The program and its first arguments, such as ``["/opt/vllm/bin/vllm"]``."""
    address: str = "tcp://127.0.0.1:*"
    """The handshake address; headless engines use tcp only.  The port is bound first and told to
    the engines then, so that it cannot be anybody else's."""

    def __post_init__(self) -> None:
        for name in ("args", "executable"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a list of words; see shlex.split()")
        if self.one_launcher and self.per_engine_env:
            raise ValueError("per_engine_env needs a launcher for each engine (one_launcher=False)")

    def jobs(self, address: str, indices: Sequence[int]) -> list[EngineJob]:
        """The processes to start.

        Args:
            address: the handshake address as it was bound.
            indices: the engines, which must follow one another.
        """
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        groups = [list(indices)] if self.one_launcher else [[index] for index in indices]
        return [self._job(host.strip("[]"), port, group, indices) for group in groups]

    def _job(self, host: str, port: str, group: list[int], indices: Sequence[int]) -> EngineJob:
        options = {
            "--data-parallel-address": host,
            "--data-parallel-rpc-port": port,
            "--data-parallel-size": indices[-1] + 1,
            "--data-parallel-size-local": len(group),
            "--data-parallel-start-rank": group[0],
        }
        words = [word for option, value in options.items() for word in (option, str(value))]
        argv = [*self.executable, "serve", self.model, "--headless", *words, *self.args]
        env = {**os.environ, **self.env, **self.per_engine_env.get(group[0], {})}
        return EngineJob(group[0], argv, env, also=tuple(group[1:]))
