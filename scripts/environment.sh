# Sourced by the other scripts: makes .venv beside the sources and installs the package into it.
# Usage: . scripts/environment.sh EXTRAS      (EXTRAS is empty or like "[dev,parity]")

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    echo "$candidate"
    return 0
  done
  echo "maxdiffusion needs Python 3.11 or newer; none was found. Install one, or name it: PYTHON=/path/to/python3.11 $0" >&2
  return 1
}

prepare_environment() {
  local extras=$1 wanted
  # The stamp names what was installed, so that a second run skips the installer.
  wanted="$extras $(cat pyproject.toml constraints.txt | cksum)"
  if [ ! -x .venv/bin/python ]; then
    echo "Making .venv ..." >&2
    "$(find_python)" -m venv .venv
  fi
  if ! grep -qxF "$wanted" .venv/installed 2>/dev/null; then
    echo "Installing maxdiffusion$extras into .venv (a few minutes the first time) ..." >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      --constraint constraints.txt --editable ".$extras"
    echo "$wanted" >>.venv/installed
  fi
}

prepare_environment "$1"
