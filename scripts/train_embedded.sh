#!/usr/bin/env bash
# Trains the small model of the package on CPUs, in stages; run it again to go on where it stopped.
# Usage: scripts/train_embedded.sh [WORK_FOLDER]      the model ends up in WORK_FOLDER/model
#
#   stage      what                                      steps  batch      CPU seconds a step
#   blank      sizes, tokenizer, random weights
#   pictures   autoencoder on single frames                800  16 x 1     1.4
#   clips      autoencoder on clips of 9 frames           1500   4 x 9     3.0
#   shared     one transformer for all noise levels       5000  32 clips   0.8
#   model      two experts, forked from it, in turn       4000  32 clips   0.8
#
# Two cores do about 1.8 CPU seconds in a second: 2 hours 10 minutes in all, with 10 minutes to encode
# 16,384 clips and 5 to compile.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh ""
work=${1:-outputs/embedded}
config=configs/train_embedded.yml
mkdir -p "$work"

stage() {  # stage NAME MODULE FROM [key=value ...]: trains $work/FROM into $work/NAME, once
  local name=$1 module=$2 from=$3
  shift 3
  if [ -e "$work/$name/model_index.json" ]; then
    echo "stage $name: done before"
    return
  fi
  echo "stage $name: $(date +%T)"
  .venv/bin/python -m "maxdiffusion.$module" "$config" \
    pretrained_model_name_or_path="$work/$from" export_dir="$work/$name" \
    checkpoint_dir="$work/$name-checkpoints" metrics_file="$work/$name.jsonl" \
    latent_cache_dir="$work/latents" output_dir="$work/$name-samples" \
    jax_cache_dir="$work/compiled" "$@"
}

if [ ! -e "$work/blank/model_index.json" ]; then
  .venv/bin/python - "$work/blank" <<'PYTHON'
import sys
from pathlib import Path

from maxdiffusion.training.blank import write_blank_model
from maxdiffusion.weights.folder import locate

write_blank_model(locate("embedded")[0], Path(sys.argv[1]), seed=0)
PYTHON
fi
stage pictures train_wan_vae blank num_frames=1 synthetic_window=32 global_batch_size=32 \
  max_train_steps=1500
stage windows train_wan_vae pictures num_frames=9 synthetic_window=32 global_batch_size=8 \
  max_train_steps=1200
stage clips train_wan_vae windows num_frames=9 global_batch_size=4 max_train_steps=300 \
  learning_rate=5e-4
.venv/bin/python scripts/score_embedded.py "$work/clips" --autoencoder
stage shared train_wan clips train_experts=shared max_train_steps=5000 sample_every=1000
stage model train_wan shared train_experts=both max_train_steps=4000 sample_every=1000 \
  learning_rate=8e-4 text_encoder_learning_rate=2e-4
.venv/bin/python scripts/score_embedded.py "$work/model"
