"""Start, watch and end real vLLM engines, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from tests.helpers import scaled
from tests.interop.environment import Environment, environment
from tests.interop.tiny_model import make_adapter, make_model

HERE = Path(__file__).resolve().parent
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 4}
ARGUMENTS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "seed": 0,
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    # The CPU build's own setting counts in whole GiB.
    "kv_cache_memory_bytes": 64 << 20,
    # The model in the engine's own process, as on a single GPU.
    "distributed_executor_backend": "uni",
    "disable_log_stats": True,
} | LORA
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # On the CPU vLLM moves the model to a child process unless told so.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Two engines with a thread pool each on two cores: several times slower.
    "OMP_NUM_THREADS": "1",
    # The first request with logprobs would compile for 11 s.
    "TORCHDYNAMO_DISABLE": "1",
}


class VllmEngine:
    """One real engine; a context manager. It runs from the constructor on, and dies with us."""

    def __init__(
        self,
        vllm: Environment,
        address: str,
        index: int,
        folder: Path,
        *,
        settings: Mapping[str, str] = MappingProxyType({}),
        **arguments: Any,
    ) -> None:
        self.index = index
        self._log_path = folder / f"engine-{index}.log"
        self._gone: float | None = None
        self._lifeline, theirs = socket.socketpair()
        job = {
            "address": address,
            "index": index,
            "arguments": ARGUMENTS | {"model": str(folder / "model")} | arguments,
            "lifeline": theirs.fileno(),
        }
        with theirs, self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [vllm.python, HERE / "engine_process.py", json.dumps(job)],
                env=os.environ | engine_environment(vllm, folder) | dict(settings),
                cwd=folder,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal is for the tests
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process still lives."""
        return self.process.poll() is None

    @property
    def log(self) -> str:
        """All that it printed."""
        return self._log_path.read_text(errors="replace")

    def signal(self, number: int) -> float:
        """Send it a signal; return the (monotonic) moment just before."""
        moment = time.monotonic()
        self.process.send_signal(number)
        return moment

    def closed_at(self, timeout: float = 30.0) -> float:
        """Wait until the kernel closes what the process had open; return that moment."""
        if self._gone is None:
            self._lifeline.settimeout(scaled(timeout))
            with contextlib.suppress(ConnectionResetError):
                self._lifeline.recv(1)
            self._gone = time.monotonic()
        return self._gone

    def close(self) -> None:
        """End it at once, if it still runs, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self._lifeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if error is not None:
            print(f"engine {self.index} (pid {self.pid}) printed:\n{self.log[-4000:]}")


class EngineGroup:
    """Engines that one client drives, and the folder that holds their model and adapters."""

    def __init__(self, vllm: Environment, folder: Path, address: str) -> None:
        self.vllm = vllm
        self.folder = folder
        self.address = address
        self.engines: dict[int, VllmEngine] = {}
        make_model(folder / "model")

    def start(self, index: int, *, vllm: Environment | None = None, **arguments: Any) -> VllmEngine:
        """Start an engine, also in the place of one that has ended."""
        if index in self.engines:
            self.engines[index].close()
        self.engines[index] = VllmEngine(
            vllm or self.vllm, self.address, index, self.folder, **arguments
        )
        return self.engines[index]

    def adapter(self, name: str, *, rank: int = 8, seed: int = 1) -> str:
        """Make an adapter and return its path, relative to where the engines run."""
        path = make_adapter(self.folder / "adapters" / name, rank=rank, seed=seed)
        return str(path.relative_to(self.folder))

    def close(self) -> None:
        """End all of them."""
        for engine in self.engines.values():
            engine.process.kill()
        for engine in self.engines.values():
            engine.close()

    @property
    def logs(self) -> str:
        """The end of what each engine printed."""
        return "\n".join(
            f"----- engine {index} (pid {engine.pid}) printed:\n{engine.log[-4000:]}"
            for index, engine in self.engines.items()
        )


@contextlib.contextmanager
def vllm_engines(
    folder: Path,
    count: int = 2,
    *,
    transport: str = "tcp",
    only: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    **arguments: Any,
) -> Iterator[EngineGroup]:
    """Run engines 0 to `count` - 1 and end them, whatever happens.

    Args:
        folder: For model, adapters, logs, sockets.
        count: How many.
        transport: `tcp` or `ipc`.
        only: More arguments for some of them, by index; `vllm` is another environment, `settings`
            are environment variables.
        **arguments: For vLLM's AsyncEngineArgs, over those that all engines get.

    Yields:
        The group; its `address` is the one to connect to.
    """
    group = EngineGroup(environment(), folder, _free_address(folder, transport))
    try:
        for index in range(count):
            group.start(index, **arguments, **only.get(index, {}))
        yield group
    except BaseException:
        print(group.logs)
        raise
    finally:
        group.close()


def _free_address(folder: Path, transport: str) -> str:
    if transport == "ipc":
        return f"ipc://{folder}/handshake"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def engine_environment(vllm: Environment, folder: Path) -> dict[str, str]:
    """Variables for an engine, which also keep it from writing anywhere else."""
    kept = {"VLLM_CACHE_ROOT": "vllm", "VLLM_CONFIG_ROOT": "config", "HF_HOME": "hf"}
    places = {name: vllm.cache / part for name, part in kept.items()}
    places |= {"TORCHINDUCTOR_CACHE_DIR": vllm.cache / "inductor", "TMPDIR": folder / "tmp"}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    return (
        SETTINGS
        | {name: str(place) for name, place in places.items()}
        | {"PYTHONPATH": str(HERE / "repairs")}
    )
