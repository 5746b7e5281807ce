# `make demo` and `make test` are all that a newcomer needs; each makes .venv first if it is missing.

SHELL := /bin/bash
PYTEST := .venv/bin/python -m pytest
# A worker a core, each of which takes whole files, as tests of a file share what is made once for all of them. In the
# order of the folders, the slow ones come first. More than 8 would wait for the slowest file.
WORKERS := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
RANKS := 4

.PHONY: venv demo demo-plans demo-generate test test-all test-gpu test-sanitized lint format clean

venv: .venv/installed

# Made last, so that an install that failed is tried again. Sources under src/ need no install.
.venv/installed: pyproject.toml constraints.txt scripts/venv $(wildcard csrc/*.txt csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)
	@rm -f $@
	@scripts/venv
	@touch $@

demo: venv
	.venv/bin/motet demo-data demo-data
	OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc-per-node $(RANKS) -m motet train recipes/demo.toml --resume never

# The demonstration's model under Plans of every kind that trains: the same losses, and a picture of their steps.
demo-plans: venv
	OMP_NUM_THREADS=1 .venv/bin/python scripts/demo_plans.py

# "Draw the digit" from words and from speech, judged by a classifier that knows real digits. Exit code 1 if it misses.
demo-generate: venv
	OMP_NUM_THREADS=1 .venv/bin/python scripts/demo_generate.py

# Made to end in 20 minutes on two cores. What is marked slow shows more cases, or what takes long to be shown at all.
test: venv
	OMP_NUM_THREADS=1 $(PYTEST) tests -m "not gpu and not slow" $(WORKERS) --durations 15

test-all: venv
	OMP_NUM_THREADS=1 $(PYTEST) tests -m "not gpu" $(WORKERS) --durations 15

test-gpu: venv
	$(PYTEST) tests -m gpu

# The native core with AddressSanitizer and UndefinedBehaviorSanitizer, built into build/sanitized, under its unit tests.
test-sanitized: venv
	scripts/test_sanitized

lint: venv
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/mypy --config-file benchmarks/mypy.ini
	.venv/bin/lint-imports

format: venv
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis src/motet/*/*.so
	git clean -fdXq csrc
