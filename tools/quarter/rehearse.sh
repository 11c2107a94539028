#!/usr/bin/env bash
# Rehearse tools/quarter.sh whole, without a network, with the releases of a GPU image: Python 3.12, torch 2.11,
# transformers 5.17 and Accelerate 1.15.
#
#   bash tools/quarter/rehearse.sh [FOLDER]
#
# FOLDER (default: runs/quarter_image) gets an environment of 5 GB: torch comes from the package registry with CUDA, or from
# TORCH_INDEX. It needs .venv/bin/uv, and PYTHON names another interpreter. A network namespace has no network; where a
# machine allows none, proxies that refuse each request are all that is left. RELEASES replaces the three releases.
# Exit status: that of the long test of tests/engine/test_quarter.py, in which every step and every cell has to end well.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-runs/quarter_image}
uv=.venv/bin/uv
python=$folder/venv/bin/python
releases=${RELEASES:-torch==2.11.0 transformers==5.17.0 accelerate==1.15.0}
mkdir -p "$folder"
# The image's own packages; the others have the versions of constraints.txt.
grep -vE '^(torch|transformers|accelerate|huggingface-hub|tokenizers|setuptools)==' constraints.txt > "$folder/constraints.txt"
[ -x "$python" ] || $uv venv --quiet --python "${PYTHON:-3.12}" "$folder/venv"
# shellcheck disable=SC2086 # a list of requirements
DS_IGNORE_CUDA_DETECTION=1 $uv pip install --quiet --python "$python" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
  -c "$folder/constraints.txt" ".[train]" $releases pytest pytest-timeout
$uv pip freeze --python "$python" > "$folder/versions.txt"
isolated=()
for command in "unshare --net" "unshare --net --map-root-user"; do
  # shellcheck disable=SC2086 # a command and its flags
  if $command true 2> "$folder/unshare.txt"; then
    # shellcheck disable=SC2206
    isolated=($command)
    break
  fi
done
echo "without a network by: ${isolated[*]:-proxies that refuse, since $(cat "$folder/unshare.txt")}"
PYTHONPATH=$PWD ${isolated[@]+"${isolated[@]}"} "$python" -m pytest -m long -p no:cacheprovider tests/engine/test_quarter.py
