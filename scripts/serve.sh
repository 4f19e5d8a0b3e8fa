#!/usr/bin/env bash
# Serves videos on this machine's CPU with the embedded model; prints the address of the page.
# Usage: scripts/serve.sh [key=value ...]        e.g. scripts/serve.sh serve_port=8080
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh "[serve]"
cat >&2 <<'TEXT'
The page and the API: http://127.0.0.1:8000 (ready in a few seconds; Ctrl+C stops, jobs are kept)
TEXT
JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}" exec .venv/bin/python -m maxdiffusion.serve_wan configs/wan_tiny.yml \
  aot_cache_dir=serve/programs "$@"
