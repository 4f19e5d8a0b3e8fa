#!/usr/bin/env bash
# Prints the figures of docs/performance.md for the current tree, from programs that libtpu compiles
# for tpu7x without a TPU; the last line is the same as one JSON object.
# Usage: scripts/bench_static.sh [FOLDER]      (FOLDER keeps the reports; existing ones are reused)
# Takes about five minutes on two idle cores. BENCH_PYTHON selects another Python than that of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${BENCH_PYTHON:-}" ]; then
  . scripts/environment.sh "[tpu,plots]"
  BENCH_PYTHON=.venv/bin/python
fi
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"

guided=(ici_data_parallelism=2 ici_context_parallelism=4)
unguided=(ici_context_parallelism=8 guidance_scale_high=1.0 guidance_scale_low=1.0)

report() { # NAME ARGUMENTS...: writes FOLDER/NAME.json unless it exists
  local name=$1
  shift
  [ -s "$folder/$name.json" ] && return
  echo "$name: $*" >&2
  "$BENCH_PYTHON" -m maxdiffusion.preflight_wan configs/base_wan_27b.yml topology=tpu7x:2x2x1 \
    tpu_pin_clock=true report="$folder/$name.json" "$@" >"$folder/$name.txt"
}

# With `compare` only the denoise step is compiled.
report online compare='["ulysses_ring_custom:2x2"]' "${guided[@]}"
report ring compare='["ulysses_ring_custom:1x4"]' "${guided[@]}"
report fixed_m compare='["ulysses_ring_custom_fixed_m:2x2"]' "${guided[@]}"
report fp8 compare='["ulysses_ring_custom_fp8:2x2"]' "${guided[@]}"
report cp8 compare='["ulysses_ring_custom:8x1"]' "${unguided[@]}"
report cp8_fixed_m compare='["ulysses_ring_custom_fixed_m:8x1"]' "${unguided[@]}"
report scan scan_cp=4,8,16 attention=ulysses_ring_custom ici_data_parallelism=2
"$BENCH_PYTHON" scripts/bench_static.py "$folder"
