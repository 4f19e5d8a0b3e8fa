#!/usr/bin/env bash
# Makes a video on this machine's CPU with the embedded model and prints its path.
# Usage: scripts/demo.sh [key=value ...]        e.g. scripts/demo.sh prompt="a red circle" seed=3
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh ""
JAX_PLATFORMS=cpu .venv/bin/python -m maxdiffusion.generate_wan configs/wan_tiny.yml "$@"
