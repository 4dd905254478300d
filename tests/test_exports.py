"""What is public: the package's names, each module's names, and the signatures people rely on."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import engine_client
from engine_client import EngineClient, connect, errors


def modules() -> list[str]:
    """Return the names of all modules of the package."""
    found = pkgutil.walk_packages(engine_client.__path__, "engine_client.")
    return ["engine_client", *(module.name for module in found)]


def defined_in(module: ModuleType) -> set[str]:
    """Return the public functions and classes that a module defines itself."""
    return {
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(thing) or inspect.isclass(thing))
        and thing.__module__ == module.__name__
    }


def test_every_module_lists_its_public_names() -> None:
    """Each module's `__all__` is free of repetitions, and names what exists there."""
    for name in modules():
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", [])
        assert len(set(listed)) == len(listed), name
        for public in listed:
            assert hasattr(module, public), f"{name}.{public}"
            assert not public.startswith("_") or public == "__version__", f"{name}.{public}"


def test_the_package_exports_what_its_modules_do() -> None:
    """Every public name comes from a module that lists it, and an error is public once used."""
    listed: set[str] = set()
    for name in modules()[1:]:
        module = importlib.import_module(name)
        listed.update(getattr(module, "__all__", []))
    listed.add("__version__")
    assert set(engine_client.__all__) <= listed
    assert {name for name in vars(engine_client) if name in errors.__all__} == (
        set(errors.__all__) & set(engine_client.__all__)
    )


def test_the_errors_module_lists_every_error() -> None:
    """No error class is missing from the list that the other tests go through."""
    assert defined_in(errors) == set(errors.__all__)


DOCUMENTED = """
USE_DEFAULT ClientStats EngineClient EngineInfo Failed Ok Outcomes UtilityCall connect
connect_bootstrapped launch AbandonedError CallTimeout ClientBrokenError ClientClosedError
ConsensusError EncodeError EngineClientError EngineDeadError EngineError HandshakeError
HandshakeTimeout NotSentError ProtocolError RemoteError ReplyError RequestRefusedError
UtilityCallError UtilityTimeoutError
"""


def test_documented_names_are_exported() -> None:
    """What the documentation names can be imported from the package itself."""
    for name in DOCUMENTED.split():
        assert name in engine_client.__all__
        assert getattr(engine_client, name) is not None


@pytest.mark.parametrize(
    ("method", "signature"),
    [
        ("call_utility", "method *args timeout=USE_DEFAULT engines=None compensate=None"),
        ("settle_utility", "method *args timeout=USE_DEFAULT engines=None"),
        ("call_utility_consensus", "method *args timeout=USE_DEFAULT engines=None"),
        (
            "collective_rpc",
            "method args=() kwargs=None timeout=USE_DEFAULT worker_timeout=None engines=None",
        ),
        ("compensate", "outcomes call timeout=USE_DEFAULT"),
        ("is_sleeping", "timeout=USE_DEFAULT engines=None"),
        ("close", "timeout=USE_DEFAULT"),
    ],
)
def test_documented_signatures(method: str, signature: str) -> None:
    """Parameters have the documented names, order and defaults; options are keyword-only."""
    found = list(inspect.signature(getattr(EngineClient, method)).parameters.values())[1:]
    shown = []
    for parameter in found:
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(f"{star}{parameter.name}{default}")
        if parameter.name in ("engines", "compensate", "worker_timeout"):
            assert parameter.kind is parameter.KEYWORD_ONLY
    assert " ".join(shown) == signature


def test_connect_takes_only_its_address_by_position() -> None:
    """Every setting of a client is given by keyword, with the documented default."""
    address, *settings = inspect.signature(connect).parameters.values()
    assert address.kind is address.POSITIONAL_OR_KEYWORD
    assert {setting.kind for setting in settings} == {inspect.Parameter.KEYWORD_ONLY}
    expected = {
        "engine_count": 1,
        "engine_start_index": 0,
        "advertised_host": None,
        "input_address": None,
        "output_address": None,
        "codec": "auto",
        "parallel_config": None,
        "timeout": None,
        "connect_timeout": 600.0,
        "close_timeout": 5.0,
        "max_message_size": 2**30,
        "max_unanswered_bytes": 2**30,
        "heartbeat_interval": "auto",
        "slow_call_warning": 30.0,
        "context": None,
    }
    defaults = {setting.name: setting.default for setting in settings}
    assert expected.items() <= defaults.items()


STATE = "engines closed closing_cause pending_utility_calls stats input_address output_address"


def test_state_is_read_only() -> None:
    """The attributes of a client cannot be set."""
    for name in STATE.split():
        attribute = getattr(EngineClient, name)
        assert isinstance(attribute, property)
        assert attribute.fset is None
        assert attribute.__doc__


def test_importing_the_package_imports_no_extra() -> None:
    """The package alone imports neither an optional package nor an event loop."""
    code = (
        "import sys, engine_client; "
        "print({'msgspec', 'asyncio', 'multiprocessing', 'numpy', 'IPython'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "set()\n"
