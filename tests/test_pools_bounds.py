"""Bounds for pools of machines: against all schedules of few requests, certificates, corruptions."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
from exhaustive_pools import Best, Case

from optsched import BatchCost, Instance, Link, Machine, Pools
from optsched.bounds import lower_bound
from optsched.bounds.base import BoundTask
from optsched.bounds.certificate import certified_value, verify_certificate
from optsched.bounds.pools import certify_pools, pools_bound, stages_of
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError, UsageError, ViolationError
from optsched.problem.objective import parse_objective

ROLES = {"p": "prefill", "d": "decode", "m": "mixed"}
NAMES = ("base", "token", "decode_base", "prefill_base", "decode_request", "decode_kv",
         "prefill_token", "prefill_request", "prefill_square", "prefill_cross", "prefill_kv")  # fmt: skip
LARGE = 1000
"""A KV capacity that holds everybody."""


def tiny(generator: np.random.Generator) -> tuple[Case, Instance, Pools]:
    """Return two to four requests on two or three machines."""
    roles = str(generator.choice(["pd", "ppd", "pdd", "mm", "mmm", "pd", "pdm"]))
    n = int(generator.integers(2, 5 if len(roles) == 2 else 4))
    prompt = generator.integers(1, 5, n)
    output = generator.integers(1, 3 if n == 4 else 4, n)
    scale = 10.0 ** generator.integers(-4, 0, len(NAMES))
    values = np.round(generator.random(len(NAMES)) * scale * (generator.random(len(NAMES)) < 0.7), 6)
    cost = dict(zip(NAMES, values.tolist(), strict=True))
    cost["base"] += 0.001
    texts = {name: repr(1000 * value) for name, value in cost.items() if value}
    # Texts are what is meant, to the last digit.
    cost = {name: float(texts.get(name, 0)) / 1000 for name in cost}
    arrival = np.round(generator.random(n) * generator.choice([0.0, 0.01, 0.3]), 4)
    link = Link(
        float(generator.choice([0.0, 0.01])), float(generator.choice([0.0, 0.002])),
        bool(generator.random() < 0.3),
    )  # fmt: skip
    case = Case(
        tuple(arrival.tolist()), tuple(prompt.tolist()), tuple(output.tolist()), roles, cost,
        link.latency_s, link.seconds_per_token, link.recompute_last,
    )  # fmt: skip
    instance = Instance(
        arrival, prompt, output, kv_capacity=LARGE, time_unit="second", kv_accounting="cached",
    )  # fmt: skip
    model = BatchCost("tiny", 1, texts)
    machines = [Machine(LARGE, model, role=ROLES[role]) for role in roles]  # type: ignore[arg-type]
    return case, instance, Pools(machines, link)


def task_of(instance: Instance, pools: Pools, objective: str) -> BoundTask:
    cost = pools.machines[0].cost
    return BoundTask(instance, cost, parse_objective(objective), pools=pools)


def check_many(seed: int, count: int, factor: float = 1.0) -> tuple[int, int, int]:
    """Return on how many instances bounds exceed the optimum, meet it, and are certified."""
    generator = np.random.default_rng(seed)
    wrong = met = certified = 0
    for _ in range(count):
        case, instance, pools = tiny(generator)
        sums = {"tel": Best(case, "tel").best, "mean_ttft": Best(case, "ttft").best}
        exceeded = False
        for name, best in sums.items():
            proof = pools_bound(task_of(instance, pools, name), Budget(0.05))
            value = proof.value * (instance.n if name == "mean_ttft" else 1) * factor
            exceeded |= value > best * (1 + 1e-9) + 1e-12
            met += value >= best * (1 - 1e-6)
            if generator.random() < 0.3:
                proved = certify_pools(instance, pools, name, proof)["value"] * 1e-12
                exceeded |= proved * factor > best * (1 + 1e-9) + 1e-12
                certified += proved >= value / factor * (1 - 1e-6)

        slos = tuple((generator.random(2) * (0.3, 0.05) + 0.002).tolist())
        late = Best(case, "late", slos).best
        share, _ = lower_bound(
            instance, pools=pools, objective=f"slo_attainment:slo_ttft={slos[0]},slo_tpot={slos[1]}"
        )
        exceeded |= round(share * instance.n) < instance.n - late
        wrong += exceeded
    return wrong, met, certified


def test_no_bound_for_pools_exceeds_the_best_of_all_schedules() -> None:
    wrong, met, certified = check_many(1, 60)
    assert wrong == 0
    assert met > 10
    assert certified > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_no_bound_for_pools_exceeds_the_best_on_two_thousand(seed: int) -> None:
    assert check_many(seed, 500)[0] == 0


def test_a_bound_that_is_one_percent_too_large_is_noticed() -> None:
    assert check_many(1, 20, 1.01)[0] > 0
