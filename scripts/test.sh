#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them all: lint, types, tests, parity with diffusers.
# Usage: scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh "[dev,parity]"
if [ $# -eq 0 ]; then
  .venv/bin/ruff check .
  .venv/bin/ruff format --check .
  .venv/bin/mypy
fi
# Two processes, a file of tests each: compiling uses one core, and files share what they compile.
MAXDIFFUSION_REQUIRE_PARITY=1 .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
