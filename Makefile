# Needs only Python 3.11+, pip, venv and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test together apart quick guards test-all check format lint types docs bench bench-methods bench-noise bench-trust bench-kernels bench-compile soak fuzz ends gate clean

demo: $(INSTALLED)  ## train FO-DP-SGD on the embedded data set at epsilon 4; writes a folder under runs/
	$(BIN)/fodp train --dataset digits --method fo-dp-sgd --target-epsilon 4 --epochs 40 --lr 0.5 --threads 1

test: apart together  ## create the environment and run the tests

together: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal

apart: $(INSTALLED)  ## the tests that have a process of their own
	$(BIN)/python -m pytest tests/devices tests/workers

quick: $(INSTALLED)  ## all but the slow tests (tests/slow.txt): before every commit
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"
	$(BIN)/python -m pytest -m "not slow" tests/devices tests/workers

test-all: $(INSTALLED)  ## the tests, with the optional extras installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,lab,tensorboard,bench,hf,postgres,sklearn,lightning,opacus,skorch,wandb,mlflow]"
	$(BIN)/python -m pytest -n auto --dist worksteal
	$(BIN)/python -m pytest tests/devices tests/workers

check: lint  ## format, lint, types and tests: before you stop; what takes one core runs beside the tests
	$(MAKE) --jobs 2 together types apart

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)  ## write the generated pages again
	$(BIN)/fodp methods --markdown > docs/methods.md
	$(BIN)/python -m fodp.options.conflicts > docs/conflicts.md
	$(BIN)/python tests/rules_page.py
	$(BIN)/python tests/reliability_page.py
	$(BIN)/python tests/mutants_for_tests.py
	$(BIN)/python tests/scaling_page.py
	$(BIN)/fodp bench --markdown docs/performance.json --out docs/images > docs/performance.md
	$(BIN)/fodp bench --zoo --markdown docs/zoo.json > docs/zoo.md
	$(BIN)/fodp report
	$(BIN)/fodp report --utility --figures docs/images > docs/utility.md

bench: $(INSTALLED)  ## private steps against plain ones and other libraries, the targets, results in runs/bench
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[lab,bench]"
	$(BIN)/python benchmarks/trust.py
	$(BIN)/fodp bench --all --out runs/bench

bench-methods: $(INSTALLED)  ## time per step of every method relative to dp-sgd
	$(BIN)/python benchmarks/methods.py

bench-noise: $(INSTALLED)  ## what the secure stream, exact noise and the ledger add to a step on the paper's MLP
	$(BIN)/python benchmarks/noise.py

bench-trust: $(INSTALLED)  ## pass or fail: the secure stream takes at most a fifth of a step, the ledger 2% of a run
	$(BIN)/python benchmarks/trust.py

bench-kernels: $(INSTALLED)  ## what each compiled loop saves of a step; written to docs/kernels.json
	$(BIN)/python benchmarks/kernels.py

bench-compile: $(INSTALLED)  ## what torch.compile does for plain training
	$(BIN)/python benchmarks/compile.py

soak: $(INSTALLED)  ## kill, race, damage and starve trainings at random and check that nothing is lost
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py
	FODP_ALL_WRITES=1 $(BIN)/python -m pytest tests/training/test_survival.py

fuzz: $(INSTALLED)  ## search for an hour for an example that moves a clipped sum beyond its bound; 1 if there is one
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py

ends: $(INSTALLED)  ## end 200 trainings of two and three processes on a busy machine; 1 if one of them is aborted
	$(BIN)/python tests/ends.py

guards: $(INSTALLED)  ## which rules, faults, statements and mutants have tests, compared with those of commit c72e700
	$(BIN)/python tests/guards.py --compare tests/guards.json

gate: $(INSTALLED)  ## how long .ci/run and `make quick` take in a fresh clone with a new environment
	$(BIN)/python tests/gate.py

# The constraints pin every version; a change there or in pyproject.toml installs again. Python compiles what it imports;
# compiling all that is installed would take longer than downloading it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev,lab]"
	touch $(INSTALLED)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
