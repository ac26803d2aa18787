"""Replica-hours over time: what no schedule undercuts, and what threshold scaling pays."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke, one_line_error, run

from optsched import BatchCost, Instance, Problem, generate, write_instance
from optsched.analysis.replicas import fewest, replica_hours
from optsched.problem.errors import InputError

# One layer, milliseconds: a token takes 1 ms, and nothing else takes time.
TOKENS = BatchCost("tokens", 1, {"token": "1"})


def prefills(arrival: list[float], tokens: list[int], ttft: list[float]) -> Problem:
    """Return requests of one output token, whose work is a millisecond for each token."""
    instance = Instance(
        arrival, tokens, [1] * len(tokens), kv_capacity=10**6, time_unit="second",
        kv_accounting="cached", slo_ttft=ttft,
    )  # fmt: skip
    return Problem(instance, TOKENS)


def test_machines_follow_the_work() -> None:
    # Cells of 1 s. At 0 come 3 x 500 ms due at 0.9 s: 1.5 s of work in one cell, so 2 machines. At
    # 2 s comes 1 x 500 ms: 1 machine there and none between. 3 machine-seconds; 2 of 4 requests at
    # 500 ms each fit into one machine for a second.
    problem = prefills([0.0, 0.0, 0.0, 2.0], [500] * 4, [0.9] * 4)
    assert fewest(problem, 1.0, 0.0, 4) == 3.0
    assert fewest(problem, 1.0, 0.0, 3) == 2.0  # one of the first three is let go
    assert fewest(problem, 1.0, 0.0, 2) == 1.0
    # A machine that is new at 2 s serves from 2.6 s on, and 400 ms are too few: two of them, or one
    # that stays from the second cell on, so 2 more machine-seconds than without the last request.
    assert fewest(problem, 1.0, 0.6, 4) == 4.0


def exhaustive(problem: Problem, cell: float, startup: float, need: int) -> float:
    """Return the least machine time by trying all numbers of machines, for deadlines in cells.

    Work of several windows fits if for all runs of cells the work of the windows inside does (the
    condition of Hall and Hoffman on intervals).
    """
    instance = problem.instance
    assert instance.slo_ttft is not None
    begin = np.floor(instance.release / cell).astype(int)
    end = np.floor((instance.release + instance.slo_ttft) / cell).astype(int)
    work = instance.prompt_tokens / 1000
    count = int(end.max()) + 1
    best = math.inf
    for machines in itertools.product(range(5), repeat=count):
        new = [max(0, b - a) for a, b in itertools.pairwise(machines)]
        room = [cell * m - startup * k for m, k in zip(machines, [0, *new], strict=True)]
        runs = [(a, b) for a in range(count) for b in range(a, count)]
        for chosen in itertools.combinations(range(instance.n), need):
            kept = np.array(chosen)
            inside = (
                work[kept][(begin[kept] >= a) & (end[kept] <= b)].sum() <= sum(room[a : b + 1])
                for a, b in runs
            )
            if all(inside):
                best = min(best, cell * sum(machines))
                break

    return best


SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(25, 1000)]


@pytest.mark.parametrize("seed", [*range(25), *SLOW])
def test_the_bound_is_that_of_exhaustive_search_and_never_above(seed: int) -> None:
    random = np.random.default_rng(seed)
    # Cells are of 1 s, as `exhaustive` counts them.
    n, startup = int(random.integers(2, 5)), float(random.choice([0.0, 0.25, 0.5]))
    # Arrivals and deadlines lie in the middle of cells, so that no rounding decides.
    arrival = np.sort(random.integers(0, 3, n)) + 0.1
    arrival -= arrival[0]
    slack = random.integers(0, 2, n) + 0.95
    problem = prefills(arrival.tolist(), random.integers(100, 900, n).tolist(), slack.tolist())
    assert fewest(problem, 1.0, startup, n) == exhaustive(problem, 1.0, startup, n)
    assert fewest(problem, 1.0, startup, n - 1) <= exhaustive(problem, 1.0, startup, n - 1)


@pytest.mark.parametrize("startup", [0.0, 5.0])
def test_threshold_scaling_pays_at_least_the_bound(startup: float) -> None:
    instance = generate(
        "lognormal", seed=1, n=60, kv_capacity=8000, rate=2.0, time_unit="second", arrivals="gamma"
    )
    problem = Problem(instance, "llama2-7b-a100-infermax", slo_ttft=10, slo_tpot=0.2)
    # Replicas are counted in cells of 10 s, and one is the least that the rule keeps.
    found = replica_hours(problem, 10.0, startup_s=startup, attainment=0.9)
    assert found.value is not None
    assert found.attainment is not None
    assert found.attainment >= 0.9
    assert 0 < found.bound <= found.value == 10.0 * sum(found.replicas)
    assert min(found.replicas) >= 1


def test_the_command_prints_both(tmp_path: Path) -> None:
    problem = prefills([0.0, 0.0, 2.0], [500] * 3, [1.5] * 3)
    write_instance(problem.instance, tmp_path / "i.json")
    text = 'format = "optsched-cost-model"\nversion = 1\nname = "tokens"\nunit = "ms_per_layer"\n'
    text += "layers = 1\n[coefficients]\ntoken = 1\n"
    (tmp_path / "tokens.toml").write_text(text, encoding="utf-8")
    words = ["capacity", tmp_path / "i.json", "--cost-model", tmp_path / "tokens.toml"]
    said = run(*words, "--replicas-over-time", "1", "--policy", "fcfs", "--attainment", "1")
    # 1 s of work from 0 to 1.5 s, and 0.5 s from 2 s on: two cells of a second at least.
    assert "fcfs" in said
    # Told are hours.
    assert f"no schedule with this attainment takes less than {2 / 3600:.4g}" in said
    # By default the share is 0.99: of three requests all.
    said = run(*words, "--replicas-over-time", "1")
    assert "vllm-v1" in said
    assert f"no schedule with this attainment takes less than {2 / 3600:.4g}" in said
    one_line_error(invoke(*words, "--replicas-over-time", "1", "--startup", "2"), 2)
    to_write = ("--certificate-out", tmp_path / "c.json")
    one_line_error(invoke(*words, "--replicas-over-time", "1", *to_write), 2)
    with pytest.raises(InputError, match="expected 0 to 1 s, a cell"):
        replica_hours(problem, 1.0, startup_s=2.0)
