#!/usr/bin/env bash
# What a GPU has to show, in at most four minutes: parity, the kernel over pages, replay at a prompt of 16k, the longest prefix that fits, adapters (noria/bench/gpu_check.py).
# Without a GPU: tiny sizes on the CPU.
#
# usage: scripts/gpu_check.sh [OUT.json]      default docs/results/gpu_check.json; a table goes beside it. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
[ -x "$(command -v "$python")" ] || { echo "no interpreter at $python: run 'make .venv', or set PYTHON" >&2; exit 2; }
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
status=0
timeout --kill-after=5 235 "$python" -m noria.bench.gpu_check "${1:-docs/results/gpu_check.json}" || status=$?
[ "$status" -ne 124 ] || echo "stopped after 235 s: the parts in the JSON file are whole, the rest is missing" >&2
exit "$status"
