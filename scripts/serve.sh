#!/usr/bin/env bash
# Serves videos on this machine's CPU with the embedded model; prints the address of the page.
# Usage: scripts/serve.sh [key=value ...]        e.g. scripts/serve.sh serve_port=8080
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh "[serve]"
echo "The next line with http:// is the address of the page and the API; ready in a few seconds." >&2
echo "Ctrl+C stops; jobs are kept." >&2
JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}" exec .venv/bin/python -m maxdiffusion.serve_wan configs/wan_tiny.yml \
  aot_cache_dir=serve/programs "$@"
