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

# The tests of the server use a second version of its client, a browser and a database.
prepare_serving_tests() {
  if [ ! -d .venv/openai-2.54 ]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      --target .venv/openai-2.54 openai==2.54.0
  fi
  local missing=()
  command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null ||
    missing+=(chromium-headless-shell)
  compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null || command -v initdb >/dev/null ||
    missing+=(postgresql)
  if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      { apt-get update && apt-get install --yes "${missing[@]}"; } >/dev/null ||
        echo "NOT TESTED: ${missing[*]} could not be installed" >&2
    else
      echo "NOT TESTED without: apt-get install ${missing[*]}" >&2
    fi
  fi
}

if [ "${1:-}" = quick ]; then
  shift
  . scripts/environment.sh "[dev,serve]"
  lint
  run_tests --ignore tests/parity --ignore tests/multihost \
    -m "not (libtpu or multihost or parity or slow)" "$@"
else
  . scripts/environment.sh "[dev,parity,serve]"
  prepare_serving_tests
  if [ $# -eq 0 ]; then
    lint
    .venv/bin/mypy
  fi
  MAXDIFFUSION_REQUIRE_PARITY=1 run_tests "$@"
fi
