"""The alarm of `benchmarks/trust`: an error two points farther from 0, or one that is gone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parent.parent / "benchmarks" / "trust" / "trust.py"


@pytest.fixture(scope="module")
def trust() -> Any:
    """Return the benchmark's module, which is no part of the package."""
    if not FILE.is_file():
        pytest.skip("not a checkout")
    spec = importlib.util.spec_from_file_location("trust", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_alarm_is_on_more_than_two_points(trust: Any) -> None:
    before = {("run", "ttft"): -2.0, ("run", "tpot"): 1.0}
    # From 2 to 4 and from 1 to 3 points off, whatever the sign, are two and no more.
    assert trust.grown(before, {("run", "ttft"): 4.0, ("run", "tpot"): -3.0}) == []
    assert len(trust.grown(before, {("run", "ttft"): 4.1, ("run", "tpot"): -3.1})) == 2
    assert trust.grown(before, {("run", "ttft"): 0.0}) == [
        "run: tpot: no error any more; it was +1.00 %"
    ]


def test_every_table_has_every_run(trust: Any) -> None:
    wanted = {(name, metric) for name in trust.RUNS for metric in trust.METRICS}
    for file in FILE.parent.glob("*.csv"):
        assert trust.read(file).keys() >= wanted
