#!/usr/bin/env bash
# Installs the test dependencies into .venv and runs the tests.
# Usage: scripts/test.sh                       lint, types and every test, parity with diffusers included
#        scripts/test.sh quick [arguments]     lint and the quick tests, in less than two minutes
#        scripts/test.sh [pytest arguments]    the chosen tests alone
set -euo pipefail
cd "$(dirname "$0")/.."

lint() {
  .venv/bin/ruff check .
  .venv/bin/ruff format --check .
}

run_tests() {
  # Two processes, each with whole files: compiling uses one core, and tests of a file share programs.
  .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
}

if [ "${1:-}" = quick ]; then
  shift
  . scripts/environment.sh "[dev]"
  lint
  run_tests --ignore tests/parity --ignore tests/multihost \
    -m "not (libtpu or multihost or parity or slow)" "$@"
else
  . scripts/environment.sh "[dev,parity]"
  if [ $# -eq 0 ]; then
    lint
    .venv/bin/mypy
  fi
  MAXDIFFUSION_REQUIRE_PARITY=1 run_tests "$@"
fi
