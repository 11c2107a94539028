#!/usr/bin/env bash
# Set up a fresh GPU machine without a network, run a suite and pack its records, within a time limit.
#
#   bash tools/offline_gpu.sh [SUITE] [LIMIT_S] [flags of `study run`, such as --only or --rehearse]
#   bash tools/offline_gpu.sh first    check requirements and gradients, and run each kind of cell with tiny models
#
# Start it at the root of the repository. It uses these files there:
#   wheels/*.whl   packages that this machine's Python lacks: docs/gpus.md describes how to make them
#   records.tgz    the records of earlier calls, here or in OUT: they do not run again, and are in the new archive too
#   libaio*.deb    for NVMe strategies, if libaio cannot be installed
# OUT names the folder for the new records.tgz and for log.txt, which has all output; by default it is this folder.
set -u
suite=${1:-one_gpu} limit_s=${2:-600} out=${OUT:-.}
shift $(($# < 2 ? $# : 2))
mkdir -p "$out" || exit 1
exec > >(tee -a "$out/log.txt") 2>&1

# On a machine of an earlier call the files here are newer. `runs` may be a link to a larger disk.
unpack() { [ ! -f "$1" ] || { mkdir -p runs && tar xzf "$1" --skip-old-files -C runs --strip-components=1 runs; }; }
pack() {
  [ ! -d runs ] || { tar czf "$out/records.new" -C runs --transform 's,^\.,runs,' . &&
    mv "$out/records.new" "$out/records.tgz"; } || { rm -f "$out/records.new"; return 1; }
}
unpack records.tgz || exit 1
unpack "$out/records.tgz" || exit 1

# Ranks connect over the loopback, which may be down on a machine without a network, and resolve this machine's name,
# which only /etc/hosts can provide there.
ip link set lo up 2>/dev/null
[ ! -w /etc/hosts ] || grep -qw "$(hostname)" /etc/hosts || echo "127.0.0.1 $(hostname)" >> /etc/hosts

install() { python3 -m pip install --quiet --no-index --no-deps --no-build-isolation "$@"; }
wheels=()
! compgen -G 'wheels/*.whl' >/dev/null || wheels=(wheels/*.whl)
if ! install ${wheels[@]+"${wheels[@]}"} -e .; then
  # pip cannot install into this Python, such as an externally managed one, so packages go to a separate folder.
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

# Only the host optimizer: the NVMe operator takes another minute, and the first cell that swaps builds it.
operators() { timeout $((limit_s / 2)) python3 -m study.host.operators zero2_cpu; }

if [ "$suite" = first ]; then
  # The most important checks come first, and records are packed in between.
  work() {
    operators
    python3 -m study.cli doctor
    # First without an engine: whether torch and its launcher work here at all.
    python3 -m study.cli run one_gpu_bert --rehearse --only '*-single-*' --only precision=bf16
    python3 -m study.cli run one_gpu_bert --rehearse --only '*-zero3*' --only precision=bf16
    python3 -m study.cli verify --runs_dir runs/verify --only zero1 zero3 zero2_cpu --precision bf16
    pack
    # Compilation and the profiler, which no earlier command uses.
    python3 -m study.cli run speed_gpt2_xl --rehearse --only strategy=zero1 --only profile_steps=3
    python3 -m study.cli run fits_bert --only '*-zero3-*' --only device_memory_cap_gib=16
    python3 -m study.cli run virtual_gemma --rehearse --only '*-zero3-*'
    pack
    python3 -m study.cli run speed_gpt2_xl --rehearse --only strategy=zero1
  }
else
  # Operators are compiled while the weights are drawn. Failures here appear again in the run, with their reasons.
  for_weights=()
  for flag in "$@"; do [ "$flag" = --retry ] || for_weights+=("$flag"); done
  budget_s=$((limit_s * 2 / 3))
  timeout $budget_s python3 -m study.cli weights "$suite" --time_budget ${budget_s}s ${for_weights[@]+"${for_weights[@]}"} &
  operators
  wait $!
  budget_s=$((limit_s - 100 - SECONDS > 0 ? limit_s - 100 - SECONDS : 0))
  work() { python3 -m study.cli run "$suite" --time_budget "${budget_s}s" "$@"; }
fi

# The last 50 s are for packing. A stopped cell is `interrupted`, and the next call runs it again.
export suite budget_s limit_s out
export -f work pack operators
timeout -s INT $((limit_s - 50 - SECONDS)) bash -c 'trap "exit 130" INT; work "$@"' work "$@"
status=$?
pack || exit 1
exit "$status"
