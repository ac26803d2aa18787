PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# The wheel alone, in an environment with the lowest versions that pyproject.toml allows and in one
# with the newest: tests of what versions change, and of what a wheel holds.
LOWEST := .venv-lowest
NEWEST := .venv-newest
EXTRAS := dask data parquet report
WHEEL_TESTS := test_plot test_queueing test_fit test_io test_policy_helpers test_score

# Without bytecode each process of the tests compiles all that it imports, and there are hundreds.
unexport PYTHONDONTWRITEBYTECODE

VLLM := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed

.PHONY: demo docs docs-version notebooks release-check test test-all test-lowest test-slow test-times test-vllm vllm-installed vllm-table trust bench check clean

demo: $(STAMP)
	$(BIN)/optsched demo

test: $(STAMP) check
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Tests of 1.5 CPU seconds or more, all cases of a function together, wait for `make test-all`.
test-times: $(STAMP)
	rm -f .cache/times && mkdir -p .cache
	OPTSCHED_TEST_TIMES=$(CURDIR)/.cache/times $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'
	awk '{ cpu = $$1; sub(/^[^ ]* /, ""); sub(/\[.*/, ""); sum[$$0] += cpu } \
	    END { for (test in sum) if (sum[test] >= 1.5) print test }' .cache/times | LC_ALL=C sort > tests/long.txt

# Beside them what takes long, and the product as a whole: guides, notebooks, site, survival, browser, wheel.
test-all: test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'whole and not slow'
	$(MAKE) test-lowest

# It needs an index of packages, and says so where there is none.
test-lowest: $(STAMP)
	@if $(MAKE) --quiet $(LOWEST)/.installed; then $(call in_wheel,$(LOWEST)); \
	else echo "test-lowest: SKIPPED, since the lowest versions cannot be installed here"; fi

# A source distribution, the wheel built from it, and the wheel in both environments with its demo.
release-check: $(STAMP)
	rm -rf $(LOWEST) $(NEWEST) dist
	$(MAKE) $(LOWEST)/.installed $(NEWEST)/.installed
	$(call in_wheel,$(LOWEST),optsched demo --out demo.html)
	$(call in_wheel,$(NEWEST),optsched demo --out demo.html)

# $(call in_wheel,ENVIRONMENT,COMMAND): tests, and a command, in a folder that has no source.
define in_wheel
rm -rf $(1)/work && mkdir $(1)/work && cp -r tests $(1)/work && cd $(1)/work && \
    export PATH="$$PWD/../bin:$$PATH" NUMBA_CACHE_DIR="$$PWD/../numba" && \
    python -P -m pytest -o addopts= -q -p no:cacheprovider -m "not slow and not whole" \
        $(patsubst %,tests/%.py,$(WHEEL_TESTS)) && $(or $(2),true)
endef

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

# The site of this version beside those of others, on the branch gh-pages of this repository only.
docs-version: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check mike
	PATH="$$PWD/$(BIN):$$PATH" mike deploy --update-aliases $$($(BIN)/optsched --version | cut -d' ' -f2) latest
	PATH="$$PWD/$(BIN):$$PATH" mike set-default latest

notebooks: $(STAMP)
	cd notebooks && for name in $(basename $(notdir $(wildcard notebooks/*.py))); do \
	    ../$(BIN)/python -m jupytext --quiet --to ipynb --output $$name.ipynb $$name.py && \
	    ../$(BIN)/ruff format --quiet $$name.ipynb && \
	    ../$(BIN)/python -m jupytext --quiet --to py:percent --output $$name.py $$name.ipynb; done

# Public measured runs beside the twin, with an alarm; OPTSCHED_DATA names the folder of the runs.
trust: $(STAMP)
	$(BIN)/python -W ignore benchmarks/trust/trust.py

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

dist/.built: pyproject.toml $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	touch dist/.built

$(LOWEST)/.installed: RESOLUTION := lowest-direct
$(NEWEST)/.installed: RESOLUTION := highest
$(LOWEST)/.installed $(NEWEST)/.installed: dist/.built
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(@D)/bin/uv pip compile --quiet --python $(@D)/bin/python --resolution $(RESOLUTION) $(EXTRAS:%=--extra %) pyproject.toml -o $(@D)/versions.txt
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python -r $(@D)/versions.txt dist/*.whl
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python pytest hypothesis jsonschema psutil
	touch $@

# torch first, or its newest version comes; what vLLM's package asks for beside it does not fit to it.
$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check -e '.[vllm]' pytest
	$(VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_STAMP)

clean:
	rm -rf .venv .venv-lowest .venv-newest .venv-vllm .cache site .pytest_cache .mypy_cache .ruff_cache build dist
