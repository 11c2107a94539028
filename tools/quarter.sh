#!/usr/bin/env bash
# Measure on a GPU machine without a network, for a given time, the most evidence per second first.
#
#   bash tools/quarter.sh SECONDS [--suite SUITE] [--only STEP,...] [--skip STEP,...] [--rehearse]
#
# Start it at the root of the repository. It ends within SECONDS. Call it again to resume: from the records in runs/, on a
# fresh machine from .quarter/records.tgz. A step that fails or takes too long stops nothing else, except smoke:
#   smoke      driver, collectives of one rank, imports, rate of the host link; exit status 3 if nothing would run
#   gradients  every strategy against one process in fp32, bf16 and fp16 (`study verify`), and the largest micro-batch
#              in 16 GiB, all at once: nothing is timed. Operators are compiled and weights are drawn meanwhile
#   doctor     `study doctor`, with the rates of the host's optimizer and of NVMe
#   measure    the cells of SUITE (default: quarter) that end in time
# It reads these files, which tools/quarter/prepare.py makes, except the last two:
#   .quarter/wheels/*.whl, .quarter/*.dist-info   packages that this Python lacks, and this package's metadata
#   .quarter/commit.txt                           the commit that records name
#   .quarter/libaio*.deb                          for NVMe, if libaio cannot be installed
#   .quarter/records.tgz                          records of earlier calls
# OUT (default: .quarter/out) gets records.tgz, log.txt and table.txt (measured and predicted) while it runs.
# PYTHON names the interpreter. --rehearse runs every step with tiny models, on any machine.
# Exit status: 0 at the end, whatever the cells' outcomes; 2 for a wrong argument; 3 if smoke fails.
set -u

STEPS="smoke gradients doctor measure"
usage() {
  echo "error: $1. To fix it: bash tools/quarter.sh SECONDS [--suite SUITE] [--only STEP,...] [--skip STEP,...] [--rehearse]." >&2
  exit 2
}
limit_s='' suite=quarter only=${STEPS// /,} skip='' rehearse=''
while [ $# -gt 0 ]; do
  case $1 in
    --suite | --only | --skip)
      [ $# -ge 2 ] || usage "$1 has no value"
      declare "${1#--}=$2"
      shift
      ;;
    --rehearse) rehearse=--rehearse ;;
    *) limit_s=$1 ;;
  esac
  shift
done
[[ $limit_s =~ ^[0-9]+$ ]] || usage "'$limit_s' is not a time in seconds"
for name in ${only//,/ } ${skip//,/ }; do
  [[ " $STEPS " == *" $name "* ]] || usage "'$name' is not one of the steps $STEPS"
done
repo=$PWD
[ -f "$repo/study/cli.py" ] || usage "$repo is not the root of the repository"

given=$repo/.quarter
tools=$repo/tools/quarter
python=${PYTHON:-python3}
out=${OUT:-$given/out}
# A rehearsal has its own folders, and leaves nothing that a measurement would take for done.
small=${rehearse:+-rehearsal}
# Kept between calls on one machine.
work=${TMPDIR:-/tmp}/zero-study-quarter$small
notes=$repo/runs/quarter$small
site=$work/site
# Most seconds of a step, so that one that hangs does not cost the rest; a rehearsal may be on a slow machine.
smoke_s=150 gradients_s=125 doctor_s=60 cell_s=120
if [ -n "$rehearse" ]; then
  smoke_s=900 gradients_s=900 doctor_s=900 cell_s=900
fi
# For the last archive.
RESERVE_S=14
mkdir -p "$out" "$work" "$notes" || exit 1
exec > >(tee -a "$out/log.txt") 2>&1

say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
left() { echo $((limit_s - RESERVE_S - SECONDS)); }
at_most() { echo $(($(left) < $1 ? $(left) : $1)); }
is_wanted() { [[ ,$only, == *,$1,* && ,$skip, != *,$1,* ]]; }

# --- records

# Some services return no larger file: then logs and the tiny runs of `study verify` stay here.
ARCHIVE_LIMIT_BYTES=$((15 * 1024 * 1024))
make_archive() {
  tar czf "$out/.records.new" --exclude=sweep.lock "$@" -C "$repo" runs 2>/dev/null
  # Status 1: a file grew while it was read.
  [ $? -le 1 ] && [ -s "$out/.records.new" ]
}
pack() {
  (
    flock -w 15 9 || exit 1
    make_archive || { rm -f "$out/.records.new"; exit 1; }
    if [ "$(stat -c %s "$out/.records.new")" -gt $ARCHIVE_LIMIT_BYTES ]; then
      make_archive --exclude='log*.txt' --exclude=runs/verify || exit 1
    fi
    mv "$out/.records.new" "$out/records.tgz"
  ) 9> "$work/pack.lock"
}
background=()
finish() {
  trap - EXIT INT TERM
  local pid
  for pid in ${background[@]+"${background[@]}"}; do
    kill -TERM "$pid" 2>/dev/null
  done
  cp "$out/log.txt" "$notes/log.$(date +%s).txt"
  pack
  say "end: $(du -h "$out/records.tgz" 2>/dev/null | cut -f1) of records"
  sleep 0.5  # for tee
}
trap finish EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
if [ -f "$given/records.tgz" ] && [ ! -f "$work/unpacked" ]; then
  # A record that is already here is newer.
  tar xzf "$given/records.tgz" --skip-old-files -C "$repo" || exit 1
  touch "$work/unpacked"
fi

# step NAME SECONDS COMMAND...: run a command for at most these seconds and note its seconds and its status.
step() {
  local name=$1 most began=$SECONDS status
  most=$(at_most "$2")
  shift 2
  if [ "$most" -lt 8 ]; then
    say "$name: no time left"
    return 1
  fi
  say "$name: at most $most s"
  timeout -s TERM -k 10 "$most" "$@" < /dev/null
  status=$?
  say "$name: status $status after $((SECONDS - began)) s"
  echo "$name $((SECONDS - began)) s status $status" >> "$notes/steps.txt"
  return $status
}

# --- set-up

say "limit $limit_s s $rehearse"
{ nvidia-smi; df -h / /tmp /dev/shm; free -g; ulimit -l; lscpu; "$python" --version; command -v nvcc g++ dpkg; } \
  > "$notes/machine.txt" 2>&1
# Ranks connect over the loopback, which may be down on a machine without a network, and a launch resolves the machine's
# name, which only /etc/hosts can provide there.
ip link set lo up 2>/dev/null
if [ -w /etc/hosts ] && ! grep -qw "$(hostname)" /etc/hosts; then
  echo "127.0.0.1 $(hostname)" >> /etc/hosts
fi
# NVMe offload locks its buffers.
ulimit -l unlimited 2>/dev/null
ulimit -n 65536 2>/dev/null
# Wheels are archives: unpacked beside the machine's packages, which stay, and before them on the path. So neither pip nor a
# Python that allows installations is needed.
if [ ! -f "$site/.complete" ]; then
  mkdir -p "$site"
  for wheel in "$given"/wheels/*.whl; do
    [ ! -f "$wheel" ] || "$python" -m zipfile -e "$wheel" "$site" || exit 1
  done
  for metadata in "$given"/*.dist-info; do
    [ ! -d "$metadata" ] || cp -r "$metadata" "$site/"
  done
  touch "$site/.complete"
fi
export PYTHONPATH=$repo:$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# Every rank would compile torch again.
unset PYTHONDONTWRITEBYTECODE
scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
export PATH=$scripts:$PATH
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1}
if [ -f "$given/commit.txt" ]; then
  export ZERO_STUDY_COMMIT=$given/commit.txt
fi
# An nvcc on the path may be a link or a script outside of its toolkit, whose folder torch would take for one.
nvcc=$(readlink -f "$(command -v nvcc)" 2>/dev/null)
for toolkit in "${CUDA_HOME:-}" "${nvcc%/bin/nvcc}" /usr/local/cuda /usr/local/cuda-*; do
  if [ -x "$toolkit/bin/nvcc" ] && [ -f "$toolkit/include/cuda_runtime.h" ]; then
    export CUDA_HOME=$toolkit
    break
  fi
done
if compgen -G "$given/libaio*.deb" >/dev/null && [ ! -e /usr/include/libaio.h ]; then
  for package in "$given"/libaio*.deb; do
    dpkg -x "$package" "$work/aio"
  done
  libraries=$work/aio/usr/lib/$(uname -m)-linux-gnu
  export CPATH=$work/aio/usr/include${CPATH:+:$CPATH}
  export LIBRARY_PATH=$libraries${LIBRARY_PATH:+:$LIBRARY_PATH}
  export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
say "set up: packages $(du -sh "$site" | cut -f1), CUDA_HOME ${CUDA_HOME:-none}"

(
  while sleep 20; do
    pack
  done
) > /dev/null 2>&1 &  # a `sleep` that outlives the script must not hold its output open
background+=($!)

# --- what needs no GPU: it runs beside smoke and gradients

prepare() {
  local name=$1 most=$2
  shift 2
  timeout -s TERM -k 5 "$most" "$@" > "$notes/$name.txt" 2>&1 &
  prepared_pids+=($!)
  background+=($!)
}
prepared_pids=()
if [ ! -f "$work/prepared" ] && { is_wanted measure || [ ! -f "$notes/gradients.done" ]; }; then
  # The operator of NVMe takes a minute, and only the doctor's rate needs it here.
  strategies=(zero2_cpu)
  if is_wanted doctor && [ ! -f "$notes/doctor.done" ]; then strategies+=(zero3_nvme); fi
  prepare operators $((limit_s * 2 / 3)) "$python" -m study.host.operators "${strategies[@]}"
  if is_wanted measure; then
    # Those of the cells that this call can still measure after its first steps.
    measured_s=$((limit_s > 240 ? limit_s - 150 : 90))
    prepare weights $((limit_s / 2)) "$python" -m study.cli weights "$suite" $rehearse --time_budget ${measured_s}s
  fi
  if [ -n "${ZERO_STUDY_HOST_MEMORY_GIB:-}" ]; then
    # The machine shows less memory than it has, so its memory grows, slowly, as it is touched.
    prepare memory 75 "$python" "$tools/touch_memory.py" $((${ZERO_STUDY_HOST_MEMORY_GIB%.*} / 3))
  fi
fi

# --- smoke

if is_wanted smoke && [ ! -f "$work/smoked" ]; then
  if step smoke $smoke_s "$python" -W ignore "$tools/smoke.py" ${rehearse:+--no_gpu}; then
    touch "$work/smoked"
  else
    say "stopped: nothing would run, for the reason above"
    exit 3
  fi
fi

# --- gradients

declare -A lanes
# lane NAME COMMAND...: start a command beside others, unless an earlier call has finished it.
lane() {
  local name=$1
  shift
  [ ! -f "$notes/$name.done" ] || return 0
  timeout -s TERM -k 10 "$gradients_s" "$@" > "$notes/$name.txt" 2>&1 &
  lanes[$name]=$!
  background+=($!)
}
# verify NAME STRATEGIES PRECISIONS [FLAGS]
verify() {
  local name=verify_$1 strategies=$2 precisions=$3
  shift 3
  # shellcheck disable=SC2086 # lists of words
  lane "$name" bash -c 'document=$1; shift; "$@" > "$document"' verify "$notes/$name.json" "$python" -m study.cli verify \
    --json --runs_dir "runs/verify/$name" --only $strategies --precision $precisions "$@"
}
# One sweep at a time may have a folder, so each search has its own; its records are copied when it has ended.
fits() {
  local strategy=$1 folder=$work/fits/$1 cap=(--only device_memory_cap_gib=16)
  # The models of a rehearsal fit any cap, and have none.
  [ -z "$rehearse" ] || cap=()
  mkdir -p "$folder/fits_bert$small" "runs/fits_bert$small"
  cp -rn "runs/fits_bert$small"/*-"$strategy"-1x-* "$folder/fits_bert$small/" 2>/dev/null
  lane "fits_$strategy" "$python" -m study.cli run fits_bert --runs_dir "$folder" --time_limit ${cell_s}s $rehearse \
    ${cap[@]+"${cap[@]}"} --only "strategy=$strategy"
}
check_gradients() {
  local began=$SECONDS name status
  gradients_s=$(at_most $gradients_s)
  say "gradients: at most $gradients_s s"
  if [ -n "$rehearse" ]; then
    verify rehearsal zero3 bf16 --world_size 1
    lane fp16 "$python" -m study.cli run gpu_fp16 --rehearse --only strategy=zero2
    fits single
  else
    # Each repeats the runs of one process and of DDP that it compares with: two strategies a lane take the least time.
    verify fp32_1_2 "zero1 zero2" fp32
    verify fp32_3 "zero3 zero3_cpu_optimizer" fp32
    verify fp32_cpu "zero2_cpu zero3_cpu" fp32
    verify fp32_others "zero0 fsdp2" fp32
    verify bf16_1_2 "zero1 zero2" "bf16 bf16-engine"
    verify bf16_3 "zero3 zero3_cpu_optimizer" "bf16 bf16-engine"
    verify bf16_cpu "zero2_cpu zero3_cpu" "bf16 bf16-engine"
    verify fp16 "zero1 zero2 zero3 zero2_cpu" "fp16 fp16-engine"
    lane fp16 "$python" -m study.cli run gpu_fp16
    fits single
    fits zero3_cpu_optimizer
  fi
  touch "$notes/gradients.done"
  for name in "${!lanes[@]}"; do
    wait "${lanes[$name]}"
    status=$?
    say "$name: status $status"
    echo "$name status $status" >> "$notes/steps.txt"
    if [[ $status =~ ^(124|137|143)$ ]]; then
      # It was cut, and the next call resumes it.
      rm -f "$notes/gradients.done"
    else
      touch "$notes/$name.done"
    fi
    [ "$status" = 0 ] || tail -n 12 "$notes/$name.txt" | cut -c1-400
  done
  cp -r "$work"/fits/*/"fits_bert$small"/*/ "runs/fits_bert$small/" 2>/dev/null
  print_answers
  echo "gradients $((SECONDS - began)) s" >> "$notes/steps.txt"
  pack
}
print_answers() {
  local file
  for file in "$notes"/verify_*.json; do
    [ ! -s "$file" ] || "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["answer"][:600])' "$file"
  done
  grep -hE ': (at least |none|under )?[0-9]+ \(' "$notes"/fits_*.txt 2>/dev/null | cut -c1-250
}
if is_wanted gradients; then check_gradients; fi

# Nothing may run beside what is timed. What is not ready is made by the first cell that needs it.
if [ ! -f "$work/prepared" ]; then
  waited_until=$((SECONDS + 45))
  for pid in ${prepared_pids[@]+"${prepared_pids[@]}"}; do
    while kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt $waited_until ] && [ "$(left)" -gt 60 ]; do
      sleep 1
    done
    kill -TERM "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
  done
  tail -qn 2 "$notes/operators.txt" "$notes/weights.txt" "$notes/memory.txt" 2>/dev/null
  # Without `measure` the weights are still to be drawn.
  if is_wanted measure; then touch "$work/prepared"; fi
  say "operators and weights are ready, or left to the first cell that needs them"
fi

# --- doctor

if is_wanted doctor && [ ! -f "$notes/doctor.done" ]; then
  step doctor $doctor_s bash -c 'set -o pipefail; "$1" -m study.cli doctor --details 2>&1 | tee "$2"' doctor "$python" "$notes/doctor.txt"
  [ $? = 124 ] || touch "$notes/doctor.done"
  pack
fi

# --- measure

# A sweep ends by itself before the first cell that would not end in time; short cells then fill what is left.
sweep() {
  local name=$1
  shift
  step "$name" "$(left)" "$python" -m study.cli run "$@" $rehearse \
    --time_budget "$(($(left) - 5))s" --time_limit ${cell_s}s
}
if is_wanted measure; then
  sweep measure "$suite"
  if [ -z "$rehearse" ] && [ "$suite" = quarter ] && [ "$(left)" -ge 32 ]; then
    sweep fill one_gpu_bert --only precision=bf16 --only seed=42
  fi
  timeout 12 "$python" "$tools/table.py" "$suite" fits_bert $rehearse --csv "$notes/table.csv" > "$notes/table.txt" 2>&1
  cp "$notes/table.txt" "$out/"
  cut -c1-170 "$notes/table.txt" | tail -n 60
fi
print_answers
sort -u "$notes/steps.txt" | tail -n 40
# Failed cells are records, too.
exit 0
