#!/usr/bin/env bash
# Runs a command on every host of a TPU slice in a GKE cluster, through xpk.
# Usage: CLUSTER=... PROJECT=... ZONE=... TPU_TYPE=tpu7x-16 IMAGE=... scripts/multihost/xpk.sh CONFIG.yml [key=value ...]
# SLICES=2 takes two slices; NAME names the workload; PROGRAM=maxdiffusion.train_wan trains.
set -euo pipefail
if [ $# -lt 1 ]; then
  sed -n '2,4s/^# //p' "$0" >&2
  exit 2
fi
printf -v command '%q ' python -m "${PROGRAM:-maxdiffusion.generate_wan}" "$@"
exec xpk workload create \
  --cluster="${CLUSTER:?name of the GKE cluster}" \
  --project="${PROJECT:?Google Cloud project}" \
  --zone="${ZONE:?zone of the cluster}" \
  --workload="${NAME:-wan-$(date +%m%d-%H%M%S)}" \
  --tpu-type="${TPU_TYPE:?kind and size of a slice, such as tpu7x-16 or v6e-16}" \
  --num-slices="${SLICES:-1}" \
  --docker-image="${IMAGE:?image that was built from Dockerfile with EXTRAS=[tpu]}" \
  --command="${command% }"
