#!/usr/bin/env bash
# Trains a small model that continues a picture or a prompt, on CPUs; run it again to go on where it stopped.
# Usage: scripts/train_embedded_i2v.sh [WORK_FOLDER [key=value ...]]      the model ends up in WORK_FOLDER/model_i2v
#
#   stage      what                                                       steps  batch
#   blank_i2v  the model of the package with its low-noise expert alone
#   model_i2v  one transformer for all noise levels, first frame known     8000  32
#
# It is as TI2V-5B: one transformer, a time for every token, the first latent frame known. Autoencoder
# and tokenizer are those of the package. More keys are for a short trial, such as max_train_steps=20.
# It took 34 minutes on two CPU cores with other work running: 0.22 s a step.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh "[plots]"
work=${1:-outputs/embedded_i2v}
config=configs/train_embedded_i2v.yml
. scripts/stages.sh

if [ ! -e "$work/blank_i2v/model_index.json" ]; then
  .venv/bin/python - "$work/blank_i2v" <<'PYTHON'
import sys
from pathlib import Path

from maxdiffusion.checkpoints.diffusers_folder import locate
from maxdiffusion.training.random_init import write_one_transformer

write_one_transformer(locate("embedded"), Path(sys.argv[1]))
PYTHON
fi
encoded=(synthetic_clips=16384 latent_cache_dir="$work/latents_i2v")
run 2 preprocess_wan blank_i2v "${encoded[@]}" "${@:2}"
stage 1 model_i2v train_wan blank_i2v "${encoded[@]}" weights_dtype=bfloat16 max_train_steps=8000 "${@:2}"
.venv/bin/python scripts/score_embedded.py "$work/model_i2v" --image
.venv/bin/python scripts/score_embedded.py "$work/model_i2v" --image --silent
.venv/bin/python scripts/score_embedded.py "$work/model_i2v"
