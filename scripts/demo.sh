#!/usr/bin/env bash
# Makes a video on this machine's CPU with the embedded model and prints its path.
# Usage: scripts/demo.sh [key=value ...]        e.g. scripts/demo.sh prompt="a blue square grows on a black background" seed=3
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh ""
JAX_PLATFORMS=cpu .venv/bin/python -m maxdiffusion.generate_wan configs/wan_tiny.yml "$@"
cat >&2 <<'TEXT'
Other prompts: scripts/demo.sh prompt="a COLOUR SHAPE MOTION on a BACKGROUND background" seed=1
  COLOUR      red, green, blue, yellow, purple, orange
  SHAPE       circle, square, triangle
  MOTION      moves left / right / up / down / up and left / ..., grows, shrinks, stays still
  BACKGROUND  black, white, gray, navy
Other words are not known to this small model: configs/base_wan_27b.yml runs the real one.
TEXT
