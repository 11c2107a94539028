# make study: install, run the laptop study, build its report.   make test: the test suite.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python tools/install.py --quiet
# Tests, reports and the site write the bytecode that the installation has not compiled, and pytest its own.
COMPILING := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python

.PHONY: install lock study test test-fast test-report test-experiments test-long test-gpu quality types rules collected golden readme claims releases prediction reports bench site clean

install: .venv/installed

# Every version is in constraints.txt, also those of isolated builds. Two steps, so that DeepSpeed's operators compile
# beside the download of what they do not import. In an isolated build without torch DeepSpeed compiles nothing.
# A driver for CUDA 12 wants another build of torch than PyPI's, and it goes first:
# make install -B TORCH_INDEX=https://download.pytorch.org/whl/cu129
# For V100, P100 and older GPUs it is cu126: no other build of torch 2.11 to 2.14 has code for them.
# That index lacks most of what is pinned, so it goes beside PyPI; of one release pip takes the build with a local version.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make install PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@# One that a Python too old or without ensurepip has begun is made anew; any other keeps what was added to it.
	.venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(if $(TORCH_INDEX),$(INSTALL) -c constraints.txt --upgrade --extra-index-url $(TORCH_INDEX) torch)
	@# DeepSpeed's build fails where there is a GPU and no CUDA toolkit, unless it is kept from looking.
	DS_IGNORE_CUDA_DETECTION=1 $(INSTALL) -c constraints.txt -e ".[train]"
	@# Two processes, one of which begins with the last operator: most have one source that takes one core for long.
	@$(BIN)/python -m study.host.operators & operators=$$!; \
	$(BIN)/python -m study.host.operators --last_first zero3_nvme & last=$$!; \
	trap 'kill $$operators $$last 2>/dev/null' EXIT INT TERM; \
	$(INSTALL) -c constraints.txt -e ".[train,report,dev]" && wait $$operators && wait $$last
	@# uv installs no bytecode. With PYTHONDONTWRITEBYTECODE every rank would compile torch and transformers again: half of
	@# its start-up. What runs and reports import takes a quarter of the time of all.
	@compile() { env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c "import $$1" >/dev/null; }; \
	compile "study.sweep.fork_server as runs; runs.preload()" & runs=$$!; \
	compile "ipykernel.kernelapp, papermill, study.report.site.build" && wait $$runs
	touch $@

# constraints.txt from pyproject.toml, for every Python of the workflow; versions stay unless FLAGS=--upgrade. It has no
# hashes, since builds of torch differ and pip takes a hash of every package or of none. torch names its CUDA packages.
lock: install
	$(BIN)/uv pip compile --quiet pyproject.toml --all-extras --universal --python-version 3.10 --no-annotate --no-header \
	  $(FLAGS) -o constraints.txt
	sed -i -E "/^(nvidia-(cu|nc|nv[a-z])|cuda-|triton==)/d; s/ (;|and) python_full_version < '3.14' and sys_platform == 'linux'$$//; \
	  s/ and sys_platform == 'linux'$$//; 1i # The exact versions this was tested with: make lock" constraints.txt

# The first page comes when every strategy has trained the GPT once, then one after both tasks and each further seed, and
# one of what there is after Ctrl-C. A run that failed is a row of the report; the exit status is that of the runs. The
# report goes beside the runs: reports/ holds what is in git.
study: install
	@set -f; trap stopped=130 INT; for only in "--only task=gpt-wikitext --only seed=42 --only *-r1" \
	  "--only seed=42 --only *-r1" "--only seed=43" ""; do \
	  $(BIN)/study run laptop $$only; status=$$?; [ $$status -lt 2 ] || exit $$status; \
	  $(BIN)/study report laptop --output runs/laptop/report || exit $$?; [ -z "$$stopped" ] || exit $$stopped; done; exit $$status

# Three files at a time, since tests of ranks leave a quarter of two cores idle. Then what measures time
# or damages what others use, alone. They train on cores (tests/conftest.py), for which DeepSpeed's operators are others.
test: install
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m study.host.operators
	$(COMPILING) tools/run_tests.py $(FLAGS)

# The inner loop: what computes and refuses, without ranks, browsers and reports.
test-fast: install
	$(COMPILING) -m pytest tests/unit $(FLAGS) -n 2 --dist loadfile

# What people read.
test-report: install
	$(COMPILING) -m pytest tests/report $(FLAGS) -n 2 --dist loadfile

# What no other code needs: study/experiments.
test-experiments: install
	$(COMPILING) -m pytest tests/experiments -m "not long" $(FLAGS) -n 2 --dist loadfile

test-long: install
	$(COMPILING) -m pytest -m long

test-gpu: install
	$(COMPILING) -m pytest -m gpu

# Two at a time: make quality -j2
quality: types rules

types: install
	$(BIN)/mypy

rules: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py --check
	$(BIN)/python tools/words.py --check
	$(BIN)/python tools/tree.py

# Every test is imported, so that a wrong import ends `.ci/run` in its first minute; the tests then find pytest's bytecode.
collected: install
	$(COMPILING) -m pytest --collect-only -qq

# The guard of a refactoring: what the project computes, kept in runs/golden, and what differs from the last time.
golden: install
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m study.host.operators
	$(BIN)/python tools/golden.py guard

# The marked blocks of the README and of docs/ from the records in reports/; then docs/claims.md.
readme: install
	$(BIN)/python -m study.report.pages.readme
	$(BIN)/python -m study.claims.page

# docs/claims.md from the ledger and the records in reports/.
claims: install
	$(BIN)/python -m study.claims.page

# docs/releases.md, docs/compositions.md, docs/restored_faults.md, study/releases/grid.json and reports/releases/causes.md from the records there, the bare control and study/releases/causes.yaml.
# The report is made first where runs are named: make releases RUNS=runs
releases: install
	$(if $(RUNS),$(BIN)/study report releases --runs_dir $(RUNS))
	$(BIN)/python -m study.report.pages.releases
	$(BIN)/python -m study.report.pages.compositions

# Constants of time, then every prediction held against its measurement: reports/prediction, and the intervals shown.
prediction: install
	$(BIN)/python -m study.report.pages.prediction fit
	$(BIN)/python -m study.report.pages.prediction report

# Pages, notebooks and images of reports/ from the records there; only what changed. git ignores them. It needs no torch.
reports:
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import papermill, ipykernel, matplotlib, study' 2>/dev/null \
	  || $(INSTALL) -c constraints.txt -e ".[report]"
	$(COMPILING) tools/reports.py $(FLAGS)

# runs/site: README, docs/ and reports/ with a search and a reference of commands. It needs no torch.
site: reports
	@$(BIN)/python -c 'import mkdocs, material' 2>/dev/null || $(INSTALL) -c constraints.txt -e ".[report,site]"
	NO_MKDOCS_2_WARNING=1 $(COMPILING) -m mkdocs build --strict

bench: install
	$(BIN)/python tools/bench.py

clean:
	rm -rf runs nvme_offload
