PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# The lowest versions that pyproject.toml allows, and tests of what versions change.
LOWEST := .venv-lowest/bin
LOWEST_STAMP := .venv-lowest/.installed
LOWEST_TESTS := tests/test_plot.py tests/test_queueing.py tests/test_fit.py tests/test_io.py

# Without bytecode each process of the tests compiles all that it imports, and there are hundreds.
unexport PYTHONDONTWRITEBYTECODE

VLLM := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed

.PHONY: demo docs notebooks test test-all test-lowest test-slow test-vllm vllm-installed vllm-table bench check clean

demo: $(STAMP)
	$(BIN)/optsched demo

test: $(STAMP) check
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Beside them the product as a whole: guides, notebooks, site, survival, browser, wheel.
test-all: test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'whole and not slow'
	$(MAKE) test-lowest

# It needs an index of packages, and says so where there is none.
test-lowest:
	@if $(MAKE) --quiet $(LOWEST_STAMP); then \
	    NUMBA_CACHE_DIR=.venv-lowest/numba $(LOWEST)/python -m pytest -p no:cacheprovider $(LOWEST_TESTS); \
	else echo "test-lowest: SKIPPED, since the lowest versions cannot be installed here"; fi

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# vLLM's own scheduler beside optsched's twin, without a model; in an environment of its own.
test-vllm: $(VLLM_STAMP)
	NUMBA_CACHE_DIR=.venv-vllm/numba $(VLLM)/python -m pytest -o addopts= -q tests/real_vllm

vllm-table: $(VLLM_STAMP)
	NUMBA_CACHE_DIR=.venv-vllm/numba $(VLLM)/python tests/real_vllm/conformance.py

vllm-installed: $(VLLM_STAMP)

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

$(LOWEST_STAMP): pyproject.toml
	test -x $(LOWEST)/python || $(PYTHON) -m venv .venv-lowest
	$(LOWEST)/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/uv pip install --quiet --python $(LOWEST)/python --resolution lowest-direct -e '.[dask,data,parquet,report]'
	$(LOWEST)/uv pip install --quiet --python $(LOWEST)/python pytest pytest-benchmark nbmake hypothesis jsonschema psutil
	touch $(LOWEST_STAMP)

# torch first, or its newest version comes; what vLLM's package asks for beside it does not fit to it.
$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check -e '.[vllm]' pytest
	$(VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_STAMP)

clean:
	rm -rf .venv .venv-lowest .venv-vllm .cache site .pytest_cache .mypy_cache .ruff_cache build dist
