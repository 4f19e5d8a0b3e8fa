"""Compiles for TPUs only where libtpu is installed, and says so where it is not."""

import importlib.util

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
NEED_LIBTPU = ["test_real_compile.py", "test_real_flags.py"]
collect_ignore = [] if HAS_LIBTPU else NEED_LIBTPU


def pytest_terminal_summary(terminalreporter):
    if not HAS_LIBTPU:
        terminalreporter.section("preflight: NOT TESTED WITH A COMPILER", red=True)
        terminalreporter.write_line(
            f"libtpu is not installed, so {' and '.join(NEED_LIBTPU)} were left out. "
            'Install it with: pip install "libtpu==0.0.42.*"'
        )
