"""The policy `edf-decode`: prefills in bursts, decodes by last deadlines."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from readable_deadlines import Readable

from optsched import BatchCost, Instance, Limits, Problem, run
from optsched.policies.edf_decode import EdfDecode
from optsched.problem.errors import InputError, PolicyError
from optsched.workloads.predict import predict

# One layer, milliseconds: 1 per token, 10 per batch.
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10"})
SLOS = {"slo_ttft": 0.3, "slo_tpot": 0.05}


def drawn(seed: int, n: int = 14, kv_capacity: int = 100_000) -> Instance:
    """Return one request in 80 ms on average, with prompts below 120 and outputs below 25."""
    generator = np.random.default_rng(seed)
    arrival = np.append(0.0, np.cumsum(generator.exponential(0.08, n - 1)))
    return Instance(
        arrival, generator.integers(5, 120, n),
        generator.integers(1, 25, n), kv_capacity=kv_capacity, time_unit="second",
    )  # fmt: skip


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("trust", [0.0, 0.5, 1.0])
def test_the_loop_decides_as_plain_python_does(trust: float, mixed: bool) -> None:
    late = 0
    for seed in range(8):
        slos = {**SLOS, "slo_gap": 0.08} if seed % 3 == 0 else SLOS
        told = predict(drawn(seed), "noisy:mae=3", seed=seed) if seed % 2 else drawn(seed)
        rules = EdfDecode(
            trust=trust, urgent=0.1, piece=0.15, lump=0.01, drop=seed % 5 > 0, mixed=mixed
        )
        problem = Problem(told, PLAIN, **slos)
        fast = run(problem, rules)
        plain = run(problem, Readable(problem.instance, PLAIN, rules))
        for name in ("batch_offsets", "request", "tokens"):
            assert (getattr(fast.schedule, name) == getattr(plain.schedule, name)).all()

        late += fast.metrics["slo_attainment"] < 1

    assert late > 0  # some come late, so the cases are not all easy


def test_a_mixed_batch_decodes_first_and_prefills_in_the_time_that_is_left() -> None:
    # The first decodes from 20 ms on, and the second arrives at 30 ms. Batches of 50 ms are 10 ms,
    # the decode and 39 tokens of the prefill, whose 100 tokens take 39, 39 and 22.
    instance = Instance(
        [0.0, 0.03], [10, 100], [9, 1], kv_capacity=1000, time_unit="second",
        slo_ttft=[1.0, 1.0], slo_tpot=[1.0, 1.0],
    )  # fmt: skip
    rules = EdfDecode(mixed=True, trust=1.0, piece=0.05, lump=0.01)
    schedule = run(Problem(instance, PLAIN), rules).schedule
    entries = [*zip(schedule.request.tolist(), schedule.tokens.tolist(), strict=True)]
    batches = [entries[a:b] for a, b in pairwise(schedule.batch_offsets.tolist())]
    # Those of all batches that process request 1.
    together = [dict(batch) for batch in batches if 1 in dict(batch)]
    assert together == [{0: 1, 1: 39}, {0: 1, 1: 39}, {0: 1, 1: 22}]


def test_a_prefill_may_make_others_wait_that_can_catch_up() -> None:
    # The first has a token at 20 ms and ten more, due by 20 + 10 x 50 = 520 ms; each takes 11 ms.
    # At 21 ms the second arrives, whose prefill takes 310 ms, due by 400. `paced` cuts it into
    # pieces of 50 ms, of which 11 are not prefill, and is late. Here it is whole: done by 341 or
    # so, and nine tokens are left that take 99 ms, until 440.
    instance = Instance(
        [0.0, 0.021], [10, 300], [11, 1], kv_capacity=1000, time_unit="second",
        slo_ttft=[0.379, 0.379], slo_tpot=[0.05, 0.05],
    )  # fmt: skip
    share = {
        policy: run(Problem(instance, PLAIN), policy).metrics["slo_attainment"]
        for policy in ("paced", "edf-decode:trust=1,floor=0.3")
    }
    assert share == {"paced": 0.5, "edf-decode:trust=1,floor=0.3": 1.0}


def test_the_largest_is_let_go_when_somebody_would_be_late() -> None:
    # Prefills of 10 + 100 and 10 + 40 ms are due by 120: one after the other takes 160 in two
    # batches, or 150 in one.
    instance = Instance(
        [0.0, 0.0, 0.0], [100, 20, 20], [1] * 3, kv_capacity=1000, time_unit="second",
        slo_ttft=[0.12] * 3,
    )  # fmt: skip
    share = {
        drop: run(Problem(instance, PLAIN), f"edf-decode:drop={drop}").metrics["slo_attainment"]
        for drop in ("true", "false")
    }
    # Without the largest the two others are in time: 2 of 3. With it the first batch has it and 10
    # tokens of another, 10 + 110 ms, and the two others wait until 160 ms.
    assert share == {"true": 2 / 3, "false": 1 / 3}


def test_it_evicts_where_predictions_are_too_short() -> None:
    evicted = 0
    for seed in range(12):
        told = predict(drawn(seed, kv_capacity=200), "noisy:mae=5,bias=-4", seed=seed)
        done = run(Problem(told, PLAIN, **SLOS), EdfDecode(reserve=0.0))
        assert np.isfinite(done.evaluation.latency).all()
        evicted += len(done.schedule.evicted)

    assert evicted > 0  # all end, and some were evicted before


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(PolicyError, match=r"slo_ttft.*slo_latency"):
        run(Problem(replace(drawn(0), slo_tpot=[0.05] * 14), PLAIN), "edf-decode")
    with pytest.raises(InputError, match="floor: found -1"):
        EdfDecode(floor=-1.0)


@pytest.mark.parametrize("hurried", [0, 1])
def test_an_slo_on_latency_alone_orders_decodes_whose_output_is_guessed_at_one(
    hurried: int,
) -> None:
    # A batch has one token and takes 11 ms. The eight of both requests take 88 ms, and one request
    # has 80 ms for its four: both are in time only if the other ends last.
    latency = [5.0, 5.0]
    latency[hurried] = 0.08
    instance = Instance(
        [0.0, 0.0], [1, 1], [4, 4], kv_capacity=100, time_unit="second", predicted=[1, 1],
        slo_ttft=[1.0, 1.0], slo_latency=latency, chunked_prefill=True,
        limits=Limits(max_batch_tokens=1),
    )  # fmt: skip
    assert run(Problem(instance, PLAIN), EdfDecode()).metrics["slo_attainment"] == 1
