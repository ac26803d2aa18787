PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO := mc-sf least-work mc-benchmark fcfs sarathi vllm alpha-protection

.PHONY: demo docs notebooks test test-slow bench check clean recompile

demo: $(STAMP)
	$(BIN)/optsched compare instances/tiny.json $(foreach p,$(DEMO),--policy $(p))

test: $(STAMP) check
	$(BIN)/python -m pytest -n 2

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict

notebooks: $(STAMP)
	cd notebooks && for name in $(basename $(notdir $(wildcard notebooks/*.py))); do \
	    ../$(BIN)/python -m jupytext --quiet --to ipynb --output $$name.ipynb $$name.py && \
	    ../$(BIN)/ruff format --quiet $$name.ipynb && \
	    ../$(BIN)/python -m jupytext --quiet --to py:percent --output $$name.py $$name.ipynb; done

bench: $(STAMP)
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only -m ''

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

# numba does not notice that a compiled function in another file has changed.
recompile:
	find optsched tests \( -name '*.nbi' -o -name '*.nbc' \) -delete

clean:
	rm -rf .venv .cache site .pytest_cache .mypy_cache .ruff_cache build dist
