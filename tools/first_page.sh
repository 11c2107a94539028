#!/usr/bin/env bash
# Time `make study` of a commit in a fresh clone with empty caches, until its last page: tools/first_page.sh COMMIT
# pip's configuration is kept, so a mirror or an index named there is used.
set -euo pipefail
commit=${1:?give a commit}; repository=$(git rev-parse --show-toplevel); base=$(mktemp -d)
mkdir "$base/home"; git clone -q "$repository" "$base/clone"; cd "$base/clone"; git checkout -q "$commit"
[ ! -d ~/.config/pip ] || { mkdir "$base/home/.config"; cp -r ~/.config/pip "$base/home/.config/"; }
mapfile -t index < <(env | grep -E '^(PIP|UV)_' || true)
env -i PATH="$PATH" LANG=C.UTF-8 HOME="$base/home" XDG_CACHE_HOME="$base/cache" "${index[@]}" make study > "$base/output" 2>&1 &
started=$SECONDS; installed=; page=
while kill -0 $! 2> /dev/null; do
  if [ -z "$installed" ] && [ -e .venv/installed ]; then installed=yes; echo "installed after $((SECONDS - started)) s"; fi
  if [ -z "$page" ] && [ -e runs/laptop/report/index.html ]; then
    page=yes; echo "first page after $((SECONDS - started)) s, $(find runs/laptop -maxdepth 2 -name summary.json | wc -l) runs"
  fi
  sleep 1
done
runs=$(find runs/laptop -maxdepth 2 -name summary.json | wc -l)
echo "all after $((SECONDS - started)) s, $runs runs; output and pages in $base"
