#!/usr/bin/env bash
# Verify strategies with the oldest release of every package that pyproject.toml allows for training.
#
#   bash tools/lower_ends.sh [FOLDER]
#
# FOLDER (default: runs/lower_ends) gets an environment of 5 GB: torch comes from the package registry with CUDA. Accelerate
# and DeepSpeed are those of constraints.txt, since a run refuses other pairs (study/host/stacks.py); the suite `releases`
# compares older ones. Exit status: that of `study verify`. It needs .venv/bin/uv, and PYTHON names another interpreter.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-runs/lower_ends}
uv=.venv/bin/uv
mkdir -p "$folder"
pair=$(grep -E '^(accelerate|deepspeed)==' constraints.txt)
$uv venv --quiet --clear --python "${PYTHON:-.venv/bin/python}" "$folder/venv"
# shellcheck disable=SC2086 # two requirements
DS_IGNORE_CUDA_DETECTION=1 $uv pip install --quiet --resolution lowest-direct --python "$folder/venv/bin/python" ".[train]" $pair
$uv pip freeze --python "$folder/venv/bin/python" > "$folder/versions.txt"
export PATH="$PWD/$folder/venv/bin:$PATH"
python -m study.cli verify --only fsdp2 zero1 zero2 zero3 --precision fp32
