#!/usr/bin/env bash
# Measures the jobs of docs/predictions.md on the TPUs of this host, and compares them with their
# predictions. Meant for one rented tpu7x:2x2x1 (v7x-8) or v6e:2x4 (v6e-8); under 30 minutes.
# Usage: scripts/validate_on_tpu.sh [FOLDER] [key=value ...]
#   FOLDER    for results, default validation; existing ones are not measured again
#   MODEL     folder of Wan2.2-T2V-A14B-Diffusers: times a whole video too. Without it no weights
#             are needed, and steps are timed with random ones
#   CONFIG    default configs/base_wan_27b.yml; VALIDATE_PYTHON another Python than that of .venv
# FOLDER/run.json is the result: compare it anywhere, or send it.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VALIDATE_PYTHON:-}" ]; then
  . scripts/environment.sh "[tpu,plots]"
  VALIDATE_PYTHON=.venv/bin/python
fi
folder=${1:-validation}
shift || true
config=${CONFIG:-configs/base_wan_27b.yml}
mkdir -p "$folder"
mesh=(ici_data_parallelism=2 ici_context_parallelism=4 ulysses_shards=2
  attention=ulysses_ring_custom)
cache=(jax_cache_dir="$folder/compiled")

chip=$("$VALIDATE_PYTHON" -c 'from maxdiffusion.runtime.tpu_flags import find_chip; print(find_chip())')
echo "chip: $chip" >&2
clocks=(false)
# Only on tpu7x is the clock known to be pinned by a flag.
[ "$chip" = tpu7x ] && clocks=(false true)

for pinned in "${clocks[@]}"; do
  echo "steps with random weights, tpu_pin_clock=$pinned" >&2
  "$VALIDATE_PYTHON" scripts/bench_attention.py "$config" "${mesh[@]}" "${cache[@]}" \
    tpu_pin_clock="$pinned" "$@" --attentions ulysses_ring_custom:2x2 --batches 1 --steps 5 \
    --profile 1 --results "$folder/steps_pinned_$pinned.jsonl" >&2
done
if [ -n "${MODEL:-}" ] && [ ! -s "$folder/video.json" ]; then
  echo "a whole video" >&2
  "$VALIDATE_PYTHON" -m maxdiffusion.generate_wan "$config" "${mesh[@]}" "${cache[@]}" \
    pretrained_model_name_or_path="$MODEL" output_dir="$folder/video" \
    timing_file="$folder/video.json" "$@" >&2
fi
"$VALIDATE_PYTHON" scripts/collect_run.py "$folder" >&2
"$VALIDATE_PYTHON" scripts/compare_prediction.py "$folder/run.json"
