#!/usr/bin/env bash
# From a fresh GPU box without a network to packed records, within a time limit.
#
#   bash tools/offline_gpu.sh [SUITE] [LIMIT_S] [flags of `study run`, such as --only or --rehearse]
#   bash tools/offline_gpu.sh first    what is missing here, does it train right, a run of each kind with tiny models
#
# Start it at the root of the repository. It uses what it finds there:
#   wheels/*.whl   what this box's Python lacks: docs/gpus.md says how to make them
#   records.tgz    the records of earlier calls, here or in OUT, so that nothing is run twice or left out of the new one
#   libaio*.deb    for NVMe strategies, where libaio cannot be installed
# OUT names the folder for the new records.tgz and for log.txt, all that was said here; by default it is this one.
set -u
suite=${1:-one_gpu} limit_s=${2:-600} out=${OUT:-.}
shift $(($# < 2 ? $# : 2))
mkdir -p "$out" || exit 1
exec > >(tee -a "$out/log.txt") 2>&1

# On a box that is still warm the files here are newer. `runs` may be a link to a larger drive.
unpack() { [ ! -f "$1" ] || { mkdir -p runs && tar xzf "$1" --skip-old-files -C runs --strip-components=1 runs; }; }
pack() {
  [ ! -d runs ] || { tar czf "$out/records.new" -C runs --transform 's,^\.,runs,' . &&
    mv "$out/records.new" "$out/records.tgz"; } || { rm -f "$out/records.new"; return 1; }
}
unpack records.tgz || exit 1
unpack "$out/records.tgz" || exit 1

# Ranks meet over the loopback, which a box without a network may have left down, and ask for this box's own name, which
# nothing but this file may know there.
ip link set lo up 2>/dev/null
[ ! -w /etc/hosts ] || grep -qw "$(hostname)" /etc/hosts || echo "127.0.0.1 $(hostname)" >> /etc/hosts

install() { python3 -m pip install --quiet --no-index --no-deps --no-build-isolation "$@"; }
wheels=()
! compgen -G 'wheels/*.whl' >/dev/null || wheels=(wheels/*.whl)
if ! install ${wheels[@]+"${wheels[@]}"} -e .; then
  # Its owner keeps this Python as it is, so they go beside it.
  install --target packages ${wheels[@]+"${wheels[@]}"} . || exit 1
  export PYTHONPATH=$PWD:$PWD/packages${PYTHONPATH:+:$PYTHONPATH} PATH=$PATH:$PWD/packages/bin
fi
[ "$suite" = first ] || python3 -m study.cli status "$suite" >/dev/null || exit

if compgen -G 'libaio*.deb' >/dev/null; then
  for package in libaio*.deb; do dpkg -x "$package" aio; done
  export CPATH=$PWD/aio/usr/include:${CPATH:-}
  export LD_LIBRARY_PATH=$PWD/aio/usr/lib/x86_64-linux-gnu:${LD_LIBRARY_PATH:-}
  export LIBRARY_PATH=$PWD/aio/usr/lib/x86_64-linux-gnu:${LIBRARY_PATH:-}
fi

# The optimizer on the host alone: what NVMe needs takes a minute more, and is built by the first cell that swaps.
operators() { timeout $((limit_s / 2)) python3 -m study.host.operators zero2_cpu; }

if [ "$suite" = first ]; then
  # What is worth most comes first, and each answer is packed as it is there.
  work() {
    operators
    python3 -m study.cli doctor
    # Without an engine first: whether torch and its launcher work here at all.
    python3 -m study.cli run one_gpu_bert --rehearse --only '*-single-*' --only precision=bf16
    python3 -m study.cli run one_gpu_bert --rehearse --only '*-zero3*' --only precision=bf16
    python3 -m study.cli verify --runs_dir runs/verify --only zero1 zero3 zero2_cpu --precision bf16
    pack
    # Compiled and profiled: what nothing before this has used.
    python3 -m study.cli run speed_gpt2_xl --rehearse --only strategy=zero1 --only profile_steps=3
    python3 -m study.cli run fits_bert --only '*-zero3-*' --only device_memory_cap_gib=16
    python3 -m study.cli run virtual_gemma --rehearse --only '*-zero3-*'
    pack
    python3 -m study.cli run speed_gpt2_xl --rehearse --only strategy=zero1
  }
else
  # Operators are compiled while the weights are drawn. What fails here shows again in the run, with its reason.
  for_weights=()
  for flag in "$@"; do [ "$flag" = --retry ] || for_weights+=("$flag"); done
  budget_s=$((limit_s * 2 / 3))
  timeout $budget_s python3 -m study.cli weights "$suite" --time_budget ${budget_s}s ${for_weights[@]+"${for_weights[@]}"} &
  operators
  wait $!
  budget_s=$((limit_s - 100 - SECONDS > 0 ? limit_s - 100 - SECONDS : 0))
  work() { python3 -m study.cli run "$suite" --time_budget "${budget_s}s" "$@"; }
fi

# The last 50 s are for packing. A cell that is stopped is `interrupted`, and the next call runs it again.
export suite budget_s limit_s out
export -f work pack operators
timeout -s INT $((limit_s - 50 - SECONDS)) bash -c 'trap "exit 130" INT; work "$@"' work "$@"
status=$?
pack || exit 1
exit "$status"
