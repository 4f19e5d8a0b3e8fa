#!/usr/bin/env bash
# Makes a video on this machine's CPU with the embedded model and prints its path.
# Usage: scripts/demo.sh [image=PICTURE] [key=value ...]
#   scripts/demo.sh prompt="a blue square grows on a black background" seed=3
#   scripts/demo.sh image=picture.png prompt="a red circle moves up on a white background"
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh ""
config=configs/wan_tiny.yml
for argument in "$@"; do
  case $argument in image=* | image_url=*) config=configs/wan_tiny_image.yml ;; esac
done
JAX_PLATFORMS=cpu .venv/bin/python -m maxdiffusion.generate_wan "$config" "${@/#image=/image_url=}"
cat >&2 <<'TEXT'
Other prompts: scripts/demo.sh prompt="a COLOUR SHAPE MOTION on a BACKGROUND background" seed=1
  COLOUR      red, green, blue, yellow, purple, orange
  SHAPE       circle, square, triangle
  MOTION      moves left / right / up / down / up and left / ..., grows, shrinks, stays still
  BACKGROUND  black, white, gray, navy
A picture of such a shape comes to life with image=picture.png and a prompt that says what it shows.
Other words are not known to this small model: configs/base_wan_27b.yml runs the real one.
TEXT
