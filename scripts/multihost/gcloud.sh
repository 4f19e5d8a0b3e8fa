#!/usr/bin/env bash
# Runs a command on every host of a TPU slice, through gcloud.
# Usage: TPU=... ZONE=... scripts/multihost/gcloud.sh install
#        TPU=... ZONE=... scripts/multihost/gcloud.sh run CONFIG.yml [key=value ...]
#        TPU=... ZONE=... scripts/multihost/gcloud.sh bench CONFIG.yml [key=value ...] [--batches 1,2 ...]
# PROGRAM=maxdiffusion.train_wan trains. `install` copies what is committed here to every host.
set -euo pipefail
cd "$(dirname "$0")/../.."
usage() {
  sed -n '2,6s/^# //p' "$0" >&2
  exit 2
}
on_every_host() {
  gcloud compute tpus tpu-vm ssh "${TPU:?name of the TPU}" --zone="${ZONE:?its zone}" --worker=all --command="$1"
}
case "${1:-}" in
  install)
    archive=$(mktemp -d)/maxdiffusion.tar.gz
    git archive --format=tar.gz --prefix=maxdiffusion/ --output="$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "${TPU:?name of the TPU}:" --zone="${ZONE:?its zone}" --worker=all
    on_every_host 'tar -xzf maxdiffusion.tar.gz && cd maxdiffusion && . scripts/environment.sh "[tpu]"'
    ;;
  run | bench)
    program=(-m "${PROGRAM:-maxdiffusion.generate_wan}")
    [ "$1" = run ] || program=(scripts/bench_attention.py)
    shift
    [ $# -gt 0 ] || usage
    printf -v command '%q ' .venv/bin/python "${program[@]}" "$@"
    on_every_host "cd maxdiffusion && ${command% }"
    ;;
  *) usage ;;
esac
