"""Sets up eight virtual CPU devices before jax starts; marks whole folders and sets timeouts."""

import importlib.util
import logging
import os
from pathlib import Path

import jaxtyping
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
# Some virtual CPUs advertise AMX and trap on it; torch in bf16 dies there without a Python error.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Every promotion of types or ranks in src is written out; subprocesses inherit the rule.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

TESTS = Path(__file__).parent
# Config groups have no `__init__` that could be wrapped; `Config` inherits their fields and checks
# every one of them.
UNCHECKED = {"maxdiffusion.config.schema", "maxdiffusion.config.input_fields"}


def checked_modules() -> list[str]:
    """Returns the modules whose annotations are checked; `__init__` files only re-export."""
    src = TESTS.parent / "src"
    files = (path.relative_to(src) for path in src.rglob("*.py") if path.name != "__init__.py")
    return sorted({".".join(path.with_suffix("").parts) for path in files} - UNCHECKED)


# Arguments, results and dataclass fields of src are checked against their annotations, shapes
# included. As for mypy, an int is a float.
jaxtyping.install_import_hook(
    checked_modules(), "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)

MARKED_FOLDERS = ("multihost", "parity")
# Seconds. These tests wait for processes that they started; a signal lets them end those first.
LONG_TIMEOUT = pytest.mark.timeout(900, method="signal")
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by folder, gives long ones more time and skips what libtpu is missing for."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        if item.get_closest_marker("libtpu") or item.get_closest_marker("multihost"):
            item.add_marker(LONG_TIMEOUT)
        if item.get_closest_marker("libtpu") and not HAS_LIBTPU:
            item.add_marker(pytest.mark.skip(reason="libtpu is not installed"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says loudly when nothing was compiled for TPUs."""
    if not HAS_LIBTPU:
        terminalreporter.section("NOT TESTED WITH THE TPU COMPILER", sep="!", red=True, bold=True)
        terminalreporter.write_line(
            "Tests marked libtpu were skipped: libtpu is not installed. "
            "scripts/test.sh installs it; or pip install -e '.[dev]'."
        )


@pytest.fixture(scope="session", autouse=True)
def messages_on_stdout():
    """Shows messages as the commands do, for tests that call what a command calls."""
    from maxdiffusion.runtime.progress import configure_logging

    configure_logging()


@pytest.fixture(autouse=True)
def messages_reach_caplog(messages_on_stdout):
    """Lets messages through to the root logger, where pytest's caplog listens."""
    logging.getLogger("maxdiffusion").propagate = True


@pytest.fixture
def unchecked_types(monkeypatch):
    """Turns the type checks off, for tests that hand values of a wrong type to validation."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
