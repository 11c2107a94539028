set -u
mount -t tmpfs -o size=24m tmpfs "$1" || exit 77
"$PYTHON" -m study.cli run "$2" --runs_dir "$1" --only '*-single-*'; echo "first $?"
head -c 30m /dev/zero > "$1/filler" 2>/dev/null
"$PYTHON" -m study.cli run "$2" --runs_dir "$1"; echo "full $?"
"$PYTHON" -m study.cli status "$2" --runs_dir "$1"
rm "$1/filler"
"$PYTHON" -m study.cli run "$2" --runs_dir "$1"; echo "freed $?"
cp -r "$1/tiny" "$3"
