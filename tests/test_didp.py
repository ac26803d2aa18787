"""didppy's optima are those of the package: an oracle that shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
from brute_force import brute_force_tel
from didp import solve as solve_by_didp
from sweeps import parts
from test_ramp import tiny_instance

from optsched import evaluate, generate, solve
from optsched.problem.schedule import from_starts

pytest.importorskip("didppy")


@pytest.mark.parametrize("turns", parts(40, 400))
def test_didppy_finds_the_exhaustive_optimum_of_tiny_instances(turns: range) -> None:
    for turn in turns:
        instance = tiny_instance(np.random.default_rng([3, turn]), turn, 5)
        found = solve_by_didp(instance)
        assert found.value == found.bound == brute_force_tel(instance)[0]
        schedule = from_starts(np.array(found.starts), instance)
        assert evaluate(instance, schedule).metrics["tel"] == found.value


@pytest.mark.parametrize("model", ["jaillet-model-1", "jaillet-model-2"])
@pytest.mark.parametrize("seed", parts(1, 10))
def test_didppy_agrees_with_the_ramp_relaxation_on_up_to_twelve_requests(
    model: str, seed: range
) -> None:
    for k in seed:
        instance = generate(model, seed=k, n=8 + k % 5, kv_capacity=20)
        optimum = solve(instance, method="ramp").value
        found = solve_by_didp(instance)
        assert found.value == found.bound == optimum
        again = solve_by_didp(instance, known=int(optimum or 0))
        assert again.bound == optimum  # nothing below it
