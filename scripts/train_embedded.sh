#!/usr/bin/env bash
# Trains the small model of the package on CPUs, in stages; run it again to go on where it stopped.
# Usage: scripts/train_embedded.sh [WORK_FOLDER]      the model ends up in WORK_FOLDER/model
#
#   stage      what                                             steps  batch      seconds a step
#   blank      sizes, tokenizer, random weights
#   pictures   autoencoder on single frames, around a shape      1500  32 x 1     0.2
#   windows    autoencoder on 9 frames, around a shape           1200   8 x 9     0.6
#   clips      autoencoder on whole clips of 9 frames             300   4 x 9     1.7
#              (goes on only if it reaches 30 dB and keeps 97 % of the shapes apart)
#   shared     one transformer for all noise levels              3700  32         0.4
#   model      two experts, forked from it, in turn              8500  32         0.4
#
# The seconds are those of two CPU cores with other work running; all of it took 1 hour 59 minutes.
# The autoencoder keeps both busy only as two devices with half of a batch each; the transformer is
# too small to gain from that.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh "[plots]"
work=${1:-outputs/embedded}
config=configs/train_embedded.yml
. scripts/stages.sh

if [ ! -e "$work/blank/model_index.json" ]; then
  .venv/bin/python - "$work/blank" <<'PYTHON'
import sys
from pathlib import Path

from maxdiffusion.checkpoints.diffusers_folder import locate
from maxdiffusion.training.random_init import write_random_model

write_random_model(locate("embedded"), Path(sys.argv[1]), seed=0)
PYTHON
fi
stage 2 pictures train_wan_vae blank num_frames=1 synthetic_window=32 global_batch_size=32 \
  max_train_steps=1500 synthetic_clips=65536
stage 2 windows train_wan_vae pictures synthetic_window=32 global_batch_size=8 \
  max_train_steps=1200 learning_rate=8e-4 synthetic_clips=65536
stage 2 clips train_wan_vae windows global_batch_size=4 \
  max_train_steps=300 learning_rate=4e-4 synthetic_clips=65536
.venv/bin/python scripts/score_embedded.py "$work/clips" --autoencoder
encoded=(synthetic_clips=16384 latent_cache_dir="$work/latents")
run 2 preprocess_wan clips "${encoded[@]}"
# The rate of the next stage does not fall to zero: the last one goes on from it.
stage 1 shared train_wan clips train_experts=shared "${encoded[@]}" \
  max_train_steps=3700 learning_rate_schedule_steps=7000
stage 1 model train_wan shared train_experts=both "${encoded[@]}" weights_dtype=bfloat16 \
  max_train_steps=8500 learning_rate=1.2e-3 text_encoder_learning_rate=4e-4
.venv/bin/python scripts/score_embedded.py "$work/model"
.venv/bin/python scripts/score_embedded.py "$work/model" --pairs
