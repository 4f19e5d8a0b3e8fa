#!/usr/bin/env bash
# Runs a command as N processes on this machine, which share eight virtual CPU devices.
# Usage: scripts/multihost/local.sh N CONFIG.yml [key=value ...]
# PROGRAM=maxdiffusion.train_wan trains; DEVICES=4 shares four devices; PYTHON names the interpreter (.venv's, or python).
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,4s/^# //p' "$0" >&2
  exit 2
fi
processes=$1
shift
devices=${DEVICES:-8}
if ! [[ $processes =~ ^[1-9][0-9]*$ ]] || [ $((devices % processes)) -ne 0 ]; then
  echo "N=$processes: must be a number that divides the $devices devices" >&2
  exit 2
fi
own=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin/python
[ -x "$own" ] || own=python
python=${PYTHON:-$own}
export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$((devices / processes))"
if [ "$processes" -gt 1 ]; then
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
  export JAX_COORDINATOR_ADDRESS=localhost:$port JAX_NUM_PROCESSES=$processes
fi
started=()
stop_all() { kill -TERM "${started[@]}" 2>/dev/null || true; }
trap stop_all INT TERM
for ((id = 0; id < processes; id++)); do
  JAX_PROCESS_ID=$id "$python" -m "${PROGRAM:-maxdiffusion.generate_wan}" "$@" &
  started+=($!)
done
code=0
for child in "${started[@]}"; do
  # A signal ends `wait` early; the children then end by themselves.
  while true; do
    result=0
    wait "$child" || result=$?
    kill -0 "$child" 2>/dev/null || break
  done
  if [ $result -gt $code ]; then code=$result; fi
done
exit $code
