#!/usr/bin/env bash
# From a fresh GPU box without a network to packed records, within a time limit.
#
#   bash tools/offline_gpu.sh [SUITE] [LIMIT_S] [flags of `study run`, such as --only or --rehearse]
#   bash tools/offline_gpu.sh first    what is missing here, a run of each kind with tiny models, and does it train right
#
# Start it at the root of the repository. It uses what it finds there:
#   wheels/*.whl   what this box's Python lacks: docs/offline-gpu.md says how to make them
#   records.tgz    the records of earlier calls, so that nothing is run twice
#   libaio*.deb    for NVMe strategies, where libaio cannot be installed
# OUT names the folder for the new records.tgz; by default it is this one.
set -u
suite=${1:-one_gpu} limit_s=${2:-600} out=${OUT:-.}
shift $(($# < 2 ? $# : 2))

if [ -f records.tgz ]; then tar xzf records.tgz || exit 1; fi

if compgen -G 'wheels/*.whl' >/dev/null; then
  python3 -m pip install --quiet --no-index --no-deps wheels/*.whl || exit 1
fi
python3 -m pip install --quiet --no-index --no-deps --no-build-isolation -e . || exit 1
[ "$suite" = first ] || python3 -m study.cli status "$suite" >/dev/null || exit

if compgen -G 'libaio*.deb' >/dev/null; then
  for package in libaio*.deb; do dpkg -x "$package" aio; done
  export CPATH=$PWD/aio/usr/include:${CPATH:-}
  export LD_LIBRARY_PATH=$PWD/aio/usr/lib/x86_64-linux-gnu:${LD_LIBRARY_PATH:-}
  export LIBRARY_PATH=$PWD/aio/usr/lib/x86_64-linux-gnu:${LIBRARY_PATH:-}
fi

if [ "$suite" = first ]; then
  work() {
    python3 -m study.cli doctor
    python3 -m study.host.operators
    python3 -m study.cli run one_gpu_bert --rehearse --only '*-zero3*' --only precision=bf16
    python3 -m study.cli run speed_bert --rehearse
    python3 -m study.cli run virtual_gemma --rehearse --only '*-zero3-*'
    python3 -m study.cli run fits_bert --only '*-zero3-*' --only device_memory_cap_gib=16
    python3 -m study.cli verify --runs-dir runs/verify --only zero1 zero3 zero2_cpu --precision bf16
  }
else
  # Operators are compiled while the weights are drawn. What fails here shows again in the run, with its reason.
  timeout $((limit_s * 2 / 3)) python3 -m study.cli weights "$suite" --time-budget $((limit_s * 2 / 3))s "$@" &
  python3 -m study.host.operators
  wait
  budget_s=$((limit_s - 100 - SECONDS))
  work() { python3 -m study.cli run "$suite" --time-budget "${budget_s}s" "$@"; }
fi

# The last 50 s are for packing. A cell that is stopped is `interrupted`, and the next call runs it again.
export suite budget_s
export -f work
timeout -s INT $((limit_s - 50 - SECONDS)) bash -c 'trap "exit 130" INT; work "$@"' work "$@"
status=$?
tar czf "$out/records.tgz" runs || exit 1
exit "$status"
