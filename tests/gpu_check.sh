#!/usr/bin/env bash
# The real thing on a GPU, within ten minutes, as a table: tests/gpu_check.sh [MODEL]
# (a folder, a GGUF file or a hub name; without one, the shipped atlas-lm alone). Without CUDA it says so and exits 0;
# --device cpu --seconds 20 tries the same on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec python tests/gpu_check.py "$@"
