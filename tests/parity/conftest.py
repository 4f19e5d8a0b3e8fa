"""Live comparison with diffusers; says loudly when the `parity` extra that it needs is missing."""

import importlib.util
import os

import pytest

MISSING = [
    name for name in ("torch", "accelerate", "peft") if importlib.util.find_spec(name) is None
]
collect_ignore_glob = ["test_*.py"] if MISSING else []

if MISSING and os.environ.get("MAXDIFFUSION_REQUIRE_PARITY") == "1":
    raise pytest.UsageError(
        f"MAXDIFFUSION_REQUIRE_PARITY=1, but {' and '.join(MISSING)} cannot be imported: "
        "pip install -e '.[parity]', or unset the variable to leave parity out"
    )

if not MISSING:
    import torch

    # Two runtimes share the machine's cores; more threads than that only makes both slower.
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _without_gradients():
    """diffusers' models would otherwise keep what backward needs."""
    with torch.no_grad():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names what was not compared: a suite that leaves parity out is not the whole suite."""
    if MISSING:
        terminalreporter.section("PARITY WITH DIFFUSERS NOT RUN", sep="!", red=True, bold=True)
        terminalreporter.line(
            f"tests/parity was not collected: {', '.join(MISSING)} is not installed. "
            "scripts/test.sh installs it; or pip install -e '.[parity]'."
        )
