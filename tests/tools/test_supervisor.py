"""Engines end with their owner, in whatever way it goes, and their ends are reported."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_client.tools import supervisor as supervisor_module
from engine_client.tools.launcher import EngineExited, EngineJob, EngineStarted, Supervisor
from tests.helpers import scaled, wait_until
from tests.helpers.processes import ROOT
from tests.tools.peer import Peer

LIMIT = 5.0
"""Seconds after the end of an owner at which no engine may be left."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux kills orphans, macOS does not")


def python(code: str, index: int = 0) -> EngineJob:
    return EngineJob(index, [sys.executable, "-c", textwrap.dedent(code)])


STUBBORN = """
    import signal, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", file=sys.stderr, flush=True)
    signal.pause()
"""


def engine(peer: Peer, index: int = 0) -> EngineJob:
    command = [sys.executable, "-m", "engine_client.tools.mock_engine"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return EngineJob(index, [*command, "--connect", peer.address, "--index", str(index)], env)


def gone(pid: int) -> bool:
    """Whether a process has ended; whoever has to may not have reaped it yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    if sys.platform != "linux":
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it went between the open and the read
        return True


def reports(supervisor: Supervisor, enough: Callable[[list[Any]], bool]) -> list[Any]:
    """Read reports until there are enough, or none can come any more."""
    got: list[Any] = []
    while not enough(got) and not supervisor.closed:
        assert select.select([supervisor], [], [], scaled(10))[0], f"only {got}"
        got += supervisor.read_reports()
    return got


def started(supervisor: Supervisor, count: int = 1) -> list[int]:
    """Return the process ids of the engines."""
    got = reports(supervisor, lambda got: len(got) >= count)
    assert [type(report) for report in got] == [EngineStarted] * count
    return [report.pid for report in got]


def one_exit(supervisor: Supervisor) -> EngineExited:
    got = reports(supervisor, lambda got: bool(got) and isinstance(got[-1], EngineExited))
    exited = got[-1]
    assert isinstance(exited, EngineExited)
    return exited


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    one = Supervisor()
    yield one
    one.stop()


# -- reports ---------------------------------------------------------------------------------------


def test_exit_is_reported(supervisor: Supervisor) -> None:
    """The report of an exit has the code and the last lines of both output streams."""
    supervisor.start([python("import sys; print('out', flush=True); sys.exit('no memory')", 3)])
    begin, end = reports(supervisor, lambda got: len(got) == 2)
    assert begin == EngineStarted(3, begin.pid)
    assert end == EngineExited(3, 1, ("out", "no memory"))
    assert supervisor.running == ()
    assert supervisor.read_reports() == []


def test_tail_is_bounded(supervisor: Supervisor) -> None:
    """Of much output the last 20 lines are kept, cut to a sane length, whatever their bytes."""
    supervisor.start(
        [
            python("""
                import os
                for number in range(5000):
                    os.write(2, b"line %d\\n" % number)
                os.write(2, b"x" * 200_000 + b"\\n" + b"\\xff\\r\\n" + b"no newline")
            """)
        ]
    )
    exited = one_exit(supervisor)
    assert exited.code == 0
    assert len(exited.stderr) == 20
    assert exited.stderr[:17] == tuple(f"line {number}" for number in range(4983, 5000))
    assert exited.stderr[17:] == ("x" * 1000, "\ufffd", "no newline")


def test_death_by_signal_is_reported(supervisor: Supervisor) -> None:
    """A signal shows as a negative code."""
    supervisor.start([python("import signal; signal.pause()")])
    [pid] = started(supervisor)
    os.kill(pid, signal.SIGKILL)
    exited = one_exit(supervisor)
    assert exited == EngineExited(0, -signal.SIGKILL)
    assert exited.manner == "was ended by signal 9"


def test_command_that_cannot_start(supervisor: Supervisor) -> None:
    """A command that is not there is reported as an exit, and the others are started."""
    supervisor.start([EngineJob(0, ["/no/such/engine"]), EngineJob(1, []), python("", 2)])
    got = reports(
        supervisor, lambda got: sum(isinstance(report, EngineExited) for report in got) == 3
    )
    by_index = {report.index: report for report in got if isinstance(report, EngineExited)}
    assert [by_index[index].code for index in range(3)] == [127, 127, 0]
    assert "No such file" in by_index[0].manner
    assert by_index[1].stderr == ("an empty command",)


def test_environment_and_later_start(supervisor: Supervisor) -> None:
    """Engines get the environment of their job, and more of them can be started later."""
    code = "import os; print(os.environ.get('WHO'), os.environ.get('HOME'))"
    only = {"WHO": "me"}
    supervisor.start([EngineJob(0, [sys.executable, "-c", code], only)])
    assert one_exit(supervisor).stderr == ("me None",)
    supervisor.start([EngineJob(1, [sys.executable, "-c", code])])
    exited = one_exit(supervisor)
    assert exited.index == 1
    assert exited.stderr == (f"None {os.environ.get('HOME')}",)
    assert exited.manner == f"exited with code 0; its last words: {exited.stderr[0]}"


def test_engine_starts_undisturbed(supervisor: Supervisor) -> None:
    """An engine has default signal handling, no stray descriptors, and an empty stdin."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        supervisor.start(
            [
                python("""
                    import os, signal, sys
                    print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
                    print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
                    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
                    print(repr(sys.stdin.read()), os.getsid(0) == os.getpid())
                    print([fd for fd in range(3, 64) if os.path.exists(f"/dev/fd/{fd}")][1:])
                """)
            ]
        )
        assert one_exit(supervisor).stderr == ("True", "set()", "True", "'' True", "[]")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def test_what_an_engine_leaves_behind_is_killed(supervisor: Supervisor) -> None:
    """The workers of an engine that has crashed do not stay."""
    supervisor.start(
        [
            python("""
                import subprocess, sys
                worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
                print(worker.pid, flush=True)
                sys.exit(1)
            """)
        ]
    )
    exited = one_exit(supervisor)
    assert exited.code == 1
    wait_until(lambda: gone(int(exited.stderr[0])))


def test_an_owner_that_does_not_read(supervisor: Supervisor) -> None:
    """Reports that nobody reads hold nothing up, and are all there later."""
    code = "import sys; sys.stderr.write(('x' * 999 + '\\n') * 20)"
    count = 40
    supervisor.start([python(code, index) for index in range(count)])
    supervisor.start([python("import signal; signal.pause()", count)])
    # 800 KB of reports do not fit into the socket.  The last engine's start is behind them, so
    # that reading to its report needs the rest to be sent while it is read.
    got = reports(
        supervisor, lambda got: sum(isinstance(report, EngineExited) for report in got) == count
    )
    assert sum(len(line) for report in got[1:] for line in getattr(report, "stderr", ())) > 700_000
    assert [type(report) for report in supervisor.stop()].count(EngineExited) == 1


# -- stop ------------------------------------------------------------------------------------------


def test_stop(supervisor: Supervisor) -> None:
    """stop() ends the engines with SIGTERM, reports them, and ends the supervisor."""
    with Peer() as peer:
        assert repr(supervisor) == "<Supervisor not started>"
        assert supervisor.stop() == []
        supervisor.start([engine(peer, 0), engine(peer, 1)])
        pids = started(supervisor, 2)
        peer.complete(0, 1)
        assert repr(supervisor) == "<Supervisor 2 engines>"
        assert supervisor.running == (0, 1)
        assert [peer.call("whoami", index=index)["pid"] for index in range(2)] == pids
        pid = supervisor.pid
        assert pid is not None
        start = time.monotonic()
        got = supervisor.stop(scaled(10))
        assert time.monotonic() - start < scaled(3)
        assert sorted(got, key=lambda report: report.index) == [
            EngineExited(0, 0),
            EngineExited(1, 0),
        ]
        assert all(map(gone, [*pids, pid]))
    assert repr(supervisor) == "<Supervisor ended>"
    assert supervisor.closed
    assert supervisor.fileno() == -1
    assert supervisor.stop() == []
    assert supervisor.read_reports() == []
    with pytest.raises(RuntimeError, match="has ended"):
        supervisor.start([])


def test_stop_kills_what_does_not_listen(supervisor: Supervisor, tmp_path: Path) -> None:
    """An engine that ignores SIGTERM is killed before the limit, and its workers with it."""
    ready = tmp_path / "worker"
    supervisor.start(
        [
            python(f"""
                import os, signal
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                worker = os.fork()
                if worker:
                    with open({str(ready)!r} + ".part", "w") as file:
                        file.write(str(worker))
                    os.rename({str(ready)!r} + ".part", {str(ready)!r})
                signal.pause()
            """)
        ]
    )
    [pid] = started(supervisor)
    wait_until(ready.exists)
    start = time.monotonic()
    assert supervisor.stop(1.0) == [EngineExited(0, -signal.SIGKILL)]
    assert time.monotonic() - start < scaled(1.5)
    assert gone(pid)
    wait_until(lambda: gone(int(ready.read_text())))


def test_stop_of_a_stopped_engine(supervisor: Supervisor) -> None:
    """An engine that SIGSTOP holds is continued to see its SIGTERM."""
    supervisor.start([python("import signal; signal.pause()")])
    [pid] = started(supervisor)
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    assert supervisor.stop(scaled(10)) == [EngineExited(0, -signal.SIGTERM)]
    assert time.monotonic() - start < scaled(3)


def test_stop_with_a_supervisor_that_hangs(supervisor: Supervisor) -> None:
    """A supervisor that does not answer is killed at the limit."""
    supervisor.start([python("import signal; signal.pause()")])
    [pid] = started(supervisor)
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    assert supervisor.stop(0.2) == [EngineExited(0, None)]
    if sys.platform != "linux":
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gone(pid))


def test_supervisor_told_to_end(supervisor: Supervisor) -> None:
    """SIGTERM to the supervisor ends the engines in order, with their reports; SIGINT nothing."""
    supervisor.start([python("import signal; signal.pause()")])
    [pid] = started(supervisor)
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGINT)
    supervisor.start([python("", 1)])
    assert reports(supervisor, lambda got: len(got) == 2)[1] == EngineExited(1, 0)
    os.kill(supervisor.pid, signal.SIGTERM)
    assert reports(supervisor, lambda got: False) == [EngineExited(0, -signal.SIGTERM)]
    assert gone(pid)
    assert supervisor.closed


@linux
def test_killed_supervisor(supervisor: Supervisor) -> None:
    """When the supervisor is killed the engines go too, and are reported as ended."""
    supervisor.start([python("import signal; signal.pause()")])
    [pid] = started(supervisor)
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    [exited] = reports(supervisor, lambda got: False)
    assert exited == EngineExited(0, None)
    assert exited.manner == "ended together with its supervisor process"
    wait_until(lambda: gone(pid))
    with pytest.raises(RuntimeError, match="has ended"):
        supervisor.start([])
    assert supervisor.stop() == []


def test_forked_child_does_nothing(supervisor: Supervisor) -> None:
    """In a forked child of the owner nothing reaches the supervisor."""
    supervisor.start([python("import signal; signal.pause()")])
    [pid] = started(supervisor)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            idle = supervisor.stop() == [] and supervisor.read_reports() == []
            status = 0 if idle else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    supervisor.start([python("", 1)])
    assert reports(supervisor, lambda got: len(got) == 2)[1] == EngineExited(1, 0)
    assert not gone(pid)


# -- an owner that goes ----------------------------------------------------------------------------

OWNER = """
import json, os, select, signal, sys, time
from engine_client.tools.launcher import EngineJob, EngineStarted, Supervisor

jobs = [EngineJob(*job) for job in json.loads(sys.argv[1])]
supervisor = Supervisor()
supervisor.start(jobs)
pids = []
while len(pids) < len(jobs):
    select.select([supervisor], [], [])
    pids += [r.pid for r in supervisor.read_reports() if isinstance(r, EngineStarted)]
child = 0
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        signal.pause()  # holds a copy of everything
print(json.dumps([supervisor.pid, child, *pids]), flush=True)
if sys.argv[2] == "drop":
    del supervisor
elif sys.argv[2] == "return":
    sys.exit(0)
while True:
    try:
        signal.pause()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


class Owner:
    """A process that owns engines, in a process group of its own."""

    def __init__(self, jobs: list[EngineJob], how: str = "stay") -> None:
        plain = json.dumps([[job.index, list(job.argv), job.env] for job in jobs])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", OWNER, plain, how],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self.supervisor, self.child, *self.engines = json.loads(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], scaled(10))[0]
        return self.process.stdout.readline()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(scaled(10))
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.child:
            os.kill(self.child, signal.SIGKILL)

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.mark.parametrize("how", ["stay", "fork"])
def test_killed_owner(how: str) -> None:
    """A killed owner's engines are gone within the limit, also while a forked child of it lives."""
    with Peer() as peer, Owner([engine(peer, 0), engine(peer, 1)], how) as owner:
        peer.complete(0, 1)
        owner.process.kill()
        wait_until(lambda: all(map(gone, owner.engines)), timeout=2)
        wait_until(lambda: gone(owner.supervisor), timeout=2)
        if owner.child:
            assert not gone(owner.child)


def test_killed_owner_of_a_stubborn_engine() -> None:
    """An engine that ignores SIGTERM is gone within the limit too."""
    with Owner([python(STUBBORN)]) as owner:
        owner.process.kill()
        wait_until(lambda: gone(owner.engines[0]), timeout=LIMIT)
        wait_until(lambda: gone(owner.supervisor), timeout=1)


@pytest.mark.parametrize("how", ["return", "drop"])
def test_owner_that_forgets(how: str) -> None:
    """Engines end when the owner returns, or drops its supervisor, without a word."""
    with Owner([python("import signal; signal.pause()")], how) as owner:
        wait_until(lambda: gone(owner.engines[0]))
        wait_until(lambda: gone(owner.supervisor))


def test_ctrl_c_does_not_reach_the_engines() -> None:
    """A Ctrl-C in the owner's terminal interrupts the owner; the engines serve on."""
    with Peer() as peer, Owner([engine(peer, 0)]) as owner:
        peer.complete(0)
        os.killpg(owner.process.pid, signal.SIGINT)
        assert owner.line() == "interrupted\n"
        assert peer.call("whoami")["pid"] == owner.engines[0]
        assert not gone(owner.supervisor)
    wait_until(lambda: gone(owner.engines[0]))


def test_owner_gone_before_the_supervisor_is_there() -> None:
    """A supervisor that finds another parent than its owner starts nothing and ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b'{"op": "start", "engines": [{"index": 0, "argv": ["sleep", "60"]}]}\n')
        # The owner is the parent of this process: alive, but not the supervisor's parent.
        command = [sys.executable, "-m", "engine_client.tools.supervisor"]
        done = subprocess.run(
            [*command, str(theirs.fileno()), str(os.getppid())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            timeout=scaled(10),
            check=True,
        )
        assert done.returncode == 0
        ours.settimeout(scaled(10))
        assert b'"stopped"' in ours.makefile("rb").readline()


def test_supervisor_needs_the_standard_library_only() -> None:
    """The supervisor process imports nothing that is not part of Python."""
    code = f"""
import runpy, sys
runpy.run_path({supervisor_module.__file__!r})
names = {{name.partition(".")[0] for name in sys.modules}}
print(sorted(names - sys.stdlib_module_names - {{"__main__", "sitecustomize"}}))
"""
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=scaled(10),
        check=True,
    )
    assert found.stdout == "[]\n"
