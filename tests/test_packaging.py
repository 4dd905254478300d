"""What the distribution holds and asks for."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import engine_client._version

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Build the wheel from a copy of the sources, with the setuptools that is installed."""
    copy = tmp_path_factory.mktemp("sources") / "copy"
    copy.mkdir()
    for name in ("setup.cfg", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "engine_client",
        copy / "engine_client",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    code = "from setuptools.build_meta import __legacy__ as b; b.build_wheel('dist')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    """The wheel's METADATA."""
    (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_wheel_holds_every_module_and_py_typed(wheel: zipfile.ZipFile) -> None:
    """Each source file of the package is in the wheel, with `py.typed`, and nothing else."""
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "engine_client").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected
    assert "engine_client/py.typed" in names


def test_only_pyzmq_and_cbor2_are_needed(metadata: Message) -> None:
    """Without an extra, pip installs pyzmq and cbor2 and nothing else."""
    needed = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert sorted(needed) == ["cbor2>=6.3", "pyzmq>=26"]


def test_extras(metadata: Message) -> None:
    """The documented extras exist."""
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == {"vllm", "notebook", "metrics", "test", "dev"}


def test_name_version_and_licence(metadata: Message, wheel: zipfile.ZipFile) -> None:
    """Name, version, licence and Python version are what the project says."""
    assert metadata["Name"] == "engine-client"
    assert metadata["Version"] == engine_client._version.__version__
    assert "Apache-2.0" in (metadata["License"], metadata["License-Expression"])
    assert metadata["Requires-Python"] == ">=3.11"
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())


def test_import_needs_no_optional_package() -> None:
    """Importing the package imports neither msgspec nor anything of a notebook or a framework."""
    code = (
        "import sys, engine_client; "
        "print({'msgspec', 'IPython', 'prometheus_client', 'numpy', 'torch', 'vllm'}"
        " & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    assert done.stdout.strip() == "set()"
