"""Compiles for TPUs only where libtpu is installed, and says so where it is not."""

import importlib.util

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
collect_ignore = [] if HAS_LIBTPU else ["test_real_compile.py"]


def pytest_terminal_summary(terminalreporter):
    if not HAS_LIBTPU:
        terminalreporter.section("preflight: NOT TESTED WITH A COMPILER", red=True)
        terminalreporter.write_line(
            "libtpu is not installed, so tests/preflight/test_real_compile.py was left out. "
            'Install it with: pip install "libtpu==0.0.42.*"'
        )
