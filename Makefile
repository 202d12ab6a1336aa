PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo
REAL_DEMO := runs/real-demo

# Where it is set, every process of the tests would compile torch and transformers anew, which takes 20 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo real-demo real test quick ci lint docs torture interop wheel bench train clean

setup:
	@$(PYTHON) scripts/bootstrap.py

# The main job on the bundled model: the best plan at 5% of the entries, look at it, answer from it.
demo: setup
	$(BIN)/kvsearch run bundled --recipe bundled -o $(DEMO)
	$(BIN)/kvsearch show $(DEMO)/plan.json
	$(BIN)/kvsearch generate bundled --plan $(DEMO)/plan.json --max-new-tokens 3

# The same job on a chat model, SmolLM2-135M-Instruct, and on questions about documentation.
real-demo: setup
	$(BIN)/python scripts/real_models.py smollm2
	$(BIN)/python docs/examples/api_questions.py $(REAL_DEMO)
	$(BIN)/kvsearch headroom smollm2 --dtype bfloat16 --ratio 0.8 --tasks jsonl:$(REAL_DEMO)/questions.jsonl --samples 3
	$(BIN)/kvsearch run smollm2 --dtype bfloat16 --recipe quick --tasks jsonl:$(REAL_DEMO)/questions.jsonl -o $(REAL_DEMO)/run
	$(BIN)/kvsearch generate smollm2 --dtype bfloat16 --plan $(REAL_DEMO)/run/plan.json --max-new-tokens 16 \
		--context @$(REAL_DEMO)/document.txt --prompt @$(REAL_DEMO)/question.txt

# From nothing to the tables of docs/results.md: hours, in steps that go on where they were stopped.
real: setup
	$(BIN)/python scripts/real_models.py smollm2
	$(BIN)/python docs/examples/api_questions.py runs/real/data
	$(BIN)/python docs/examples/api_questions.py runs/real/data/text --contexts 40 --text 2000000
	$(BIN)/python scripts/real_results.py --jobs 2

# One worker more than there are cores: many tests wait for processes of their own.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Before every commit.
test: setup
	$(PYTEST) -m "not nightly"

# After every change: without Ray and what else is marked slow.
quick: setup
	$(PYTEST) -m "not slow and not nightly"

# Every test, with 50 examples of each property, the same ones at every run: one commit has one verdict.
ci: setup
	$(PYTEST) --hypothesis-profile ci

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks scripts
	$(BIN)/lint-imports
	$(BIN)/python scripts/shape.py --check

# docs/ as a site in build/site, without network; a broken link is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Devices, files that are torn or changed, commands that are killed or meet: what `make ci` has of it, alone.
torture: setup
	$(PYTEST) tests/torture

# Other tools, each in an environment of its own, load what `kvsearch export --to` writes.
interop: setup
	$(BIN)/python benchmarks/environments.py
	$(BIN)/python -m pytest -q tests/interop

# The wheel in an environment of its own: help of every verb, recipes, a plan, a reply.
wheel: setup
	$(BIN)/python -m pip wheel -q . --no-deps -w dist
	$(BIN)/python scripts/try_wheel.py dist/kvsearch-*.whl

bench: setup
	$(BIN)/python benchmarks/bench_decode.py --batch 1
	$(BIN)/python benchmarks/bench_decode.py --batch 4
	$(BIN)/python benchmarks/bench_solver.py
	$(BIN)/python benchmarks/bench_policies.py
	$(BIN)/python benchmarks/bench_policies.py --bundled
	$(BIN)/python benchmarks/bench_allocation.py
	$(BIN)/python benchmarks/bench_evaluation.py
	$(BIN)/python benchmarks/bench_calibration.py
	$(BIN)/python benchmarks/bench_search.py
	$(BIN)/python benchmarks/bench_checks.py
	$(BIN)/python benchmarks/bench_report.py

# About an hour on two cores for the bundled model, half an hour on one for the redundant one, which starts from it.
train: setup
	$(BIN)/python scripts/train_bundled.py --out runs/bundled --minutes 60
	$(BIN)/python scripts/train_bundled.py --redundant --out runs/bundled-redundant --minutes 26 --threads 1

clean:
	rm -rf .venv runs build dist *.egg-info
