"""The offline search for schedules with many requests within their SLOs.

Small cases are computed by hand; of random streams the judge says how many are in time, and a bound
how many can be.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optsched import (
    BatchCost,
    Fleet,
    Instance,
    Problem,
    bound,
    capacity,
    evaluate,
    load_cost_model,
    run,
    solve,
)
from optsched.bounds.service import most_within
from optsched.optimize.search.offline import improve
from optsched.optimize.search.on_time import _Search, serve_in_time
from optsched.optimize.search.on_time_kernel import let_go
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError

MODEL = "llama2-7b-a100-infermax"

# One layer, milliseconds: 1 per token, 10 per batch.
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10"})


def stream(n: int, rate: float, seed: int = 2) -> Instance:
    """Return random requests, `rate` a second, of 50 to 1,499 prompt and 2 to 99 output tokens."""
    generator = np.random.default_rng(seed)
    return Instance(
        np.cumsum(generator.exponential(1 / rate, n)), generator.integers(50, 1500, n),
        generator.integers(2, 100, n), kv_capacity=60_000, time_unit="second",
    )  # fmt: skip


SLOS = {"slo_ttft": 1.0, "slo_tpot": 0.05}


def test_a_long_prompt_is_let_go_for_three_short_ones() -> None:
    # Prefills alone take 10 + 100 and 10 + 20 ms, and all are due after 115 ms. First come first
    # served, the long one is in time and the others are not. Without it three take 10 + 60 ms.
    instance = Instance(
        [0.0, 0.001, 0.002, 0.003], [100, 20, 20, 20], [1] * 4, kv_capacity=1000,
        time_unit="second",
    )  # fmt: skip
    found = serve_in_time(Problem(instance, PLAIN, **{"slo_ttft": 0.115}), Budget(60.0), enough=3)
    assert found is not None
    assert found.good.tolist() == [False, True, True, True]
    judged = evaluate(Problem(instance, PLAIN, slo_ttft=0.115), found.schedule)
    assert judged.metrics["slo_attainment"] == 0.75  # three of four


def test_it_is_better_than_the_scheduler_it_adjusts_and_below_the_bound() -> None:
    """The numbers in time that it tells only rise, from beyond those of `edf-decode`'s schedule."""
    instance, cost = stream(80, 30.0), load_cost_model(MODEL)
    counts = []
    problem = Problem(instance, cost, **SLOS)
    found = serve_in_time(problem, Budget(1.0), tell=lambda one: counts.append(one.total))
    assert found is not None
    assert counts == sorted(counts)
    assert counts[-1] == found.total <= most_within(instance, cost, SLOS)
    assert run(problem, "edf-decode").metrics["slo_attainment"] * instance.n < found.total
    judged = evaluate(Problem(instance, cost, **SLOS), found.schedule).metrics["slo_attainment"]
    assert judged == found.total / instance.n


def test_it_ends_when_enough_are_in_time_and_has_the_same_answer_again() -> None:
    """27 of 30 twice, with one seed; for one of 30 it need not let anybody go."""
    instance, cost = stream(30, 30.0), load_cost_model(MODEL)
    runs = [
        serve_in_time(Problem(instance, cost, **SLOS), Budget(60.0), enough=enough, seed=1)
        for enough in (27, 27, 1)
    ]
    assert runs[0] is not None
    assert runs[1] is not None
    assert runs[2] is not None
    assert (runs[0].gone == runs[1].gone).all()
    assert not runs[2].gone.any()
    assert runs[2].total <= runs[0].total


def test_the_search_counts_as_the_judge_does() -> None:
    # Evictions (KV for about five requests), gaps and latencies: what the loop counts without
    # writing a schedule is what the judge finds in the schedule.
    instance = replace(stream(60, 8.0), kv_capacity=6000)
    for slos in ({**SLOS, "slo_gap": 0.2}, {"slo_latency": 4.0}, {"slo_ttft": 0.8, "slo_gap": 0.1}):
        search = _Search(Problem(instance, MODEL, **slos), 0, Budget(60.0), None)
        for knobs in search.first_knobs():
            search.best = None
            gone = search.without_batches(1.2)  # with a fifth more work each
            home, rows = np.where(gone, -1, 0), np.repeat(knobs[None], search.rows, axis=0)
            late = search.count_late(home, rows)
            search.serve(home, rows)
            # It counts all who are let go as late. The judge may find some of them in time after
            # all, so that the schedule has as many in time as were counted, or more.
            assert 0 < instance.n - late <= search.best.total


def test_solve_and_bound_maximize_attainment() -> None:
    """Both search and prove: no value is above the bound, which is the same of both."""
    instance = stream(60, 9.0)
    free = Instance(
        instance.arrival, instance.prompt_tokens, instance.output_tokens, kv_capacity=60_000,
        time_unit="second", chunked_prefill=True,
    )  # fmt: skip
    problem = Problem(free, MODEL, "slo_attainment:slo_ttft=1,slo_tpot=0.05")
    result = solve(problem, time_limit_s=6)
    assert result.method == "search"
    found = bound(problem, time_limit_s=6)
    for one in (result.value, found.value):
        assert one is not None
        assert one <= result.bound == pytest.approx(found.bound)


def test_capacity_has_a_row_for_it_between_policies_and_the_bound() -> None:
    """Rates: the best policy's, at most that of the search, below the bound. Rounds are refused."""
    found = capacity(
        Problem(stream(120, 4.0), MODEL, **SLOS),
        ["paced"],
        attainment=0.95,
        search_s=1.0,
        tolerance=0.1,
    )
    paced, offline = found.rows
    assert (offline.policy, offline.clairvoyant) == ("offline search", True)
    assert paced.value <= offline.value < found.bound
    assert offline.attainment >= 0.95
    assert found.best == offline or offline.value == paced.value
    rounds = Instance([0, 1], [2, 2], [1, 1], kv_capacity=3)
    with pytest.raises(UsageError, match="expected one in seconds"):
        capacity(Problem(rounds, slo_ttft=1), ["fcfs"], search_s=2.0, fewest=True)


def test_several_workers_serve_more_in_time_than_behind_a_router() -> None:
    """One search for three workers serves more than a policy behind a router that knows lengths."""
    instance, cost = stream(240, 60.0), load_cost_model(MODEL)
    found = serve_in_time(Problem(instance, Fleet.of(3, cost), **SLOS), Budget(1.0))
    assert found is not None
    routed = simulate(
        Problem(instance, cost, **SLOS), "paced:workers=3,router=least-work,predictor=oracle"
    )
    judged = evaluate(Problem(instance, cost, **SLOS), routed).metrics["slo_attainment"]
    assert judged * instance.n < found.total <= most_within(instance, cost, SLOS, 3)
    again = evaluate(Problem(instance, cost, **SLOS), found.schedule)
    assert (again.metrics["slo_attainment"] * instance.n, again.workers) == (found.total, 3)
    assert set(found.home[found.good].tolist()) == {0, 1, 2}


def test_capacity_searches_offline_with_several_workers_and_for_the_fewest() -> None:
    """The search beside a policy: a larger rate on two workers, or fewer workers for a rate."""
    instance = stream(150, 8.0)
    more = {"attainment": 0.95, "search_s": 2.0, "tolerance": 0.1}
    two = Problem(instance, Fleet.of(2, MODEL), **SLOS)
    paced, offline = capacity(two, ["paced"], **more).rows
    assert paced.value <= offline.value
    one = Problem(instance, MODEL, **SLOS)
    fewest = capacity(one, ["paced"], rate_scale=5.0, fewest=True, **more)
    paced, offline = fewest.rows
    assert fewest.bound < offline.value <= paced.value
    assert offline.attainment >= 0.95


def test_whom_a_machine_without_batches_lets_go() -> None:
    # Prefills of 6, 2 and 2 s at 0, 1 and 1.5, due at 7, 5 and 5.5; the last decodes 3 s by 9. The
    # short ones are due by 5.5 and then 3 s are left of the long one, until 8 > 7: it has the most
    # work of what must lie in [0, 7]. Without it all are done by 5.5 and 8.5 <= 9.
    release, first = np.array([0.0, 1.0, 1.5]), np.array([7.0, 5.0, 5.5])
    last, decodes = np.array([np.inf, 5.0, 9.0]), np.array([0.0, 0.0, 3.0])
    prefill = np.array([6.0, 2.0, 2.0])
    assert let_go(release, first, last, prefill, decodes).tolist() == [True, False, False]
    # Due at 10 instead, the long one is in time, but the decodes are not: 6 + 2 + 2 + 3 > 9 - 0.
    later = np.array([10.0, 5.0, 5.5])
    assert let_go(release, later, last, prefill, decodes).tolist() == [True, False, False]
    last[2] = 13.0
    assert not let_go(release, later, last, prefill, decodes).any()
    assert not let_go(release, np.full(3, np.inf), np.full(3, np.inf), prefill, decodes).any()


def test_those_who_are_left_fit_by_earliest_deadlines() -> None:
    # All work between two moments that must lie there fits there: enough for earliest deadlines.
    generator = np.random.default_rng(5)
    dropped = 0
    for _ in range(40):
        n = int(generator.integers(2, 9))
        release = np.sort(generator.uniform(0, 6, n))
        first, rest = generator.uniform(1, 4, n), generator.uniform(0, 4, n)
        prefill, decodes = generator.uniform(0.2, 2, n), generator.uniform(0, 1, n)
        gone = let_go(release, release + first, release + first + rest, prefill, decodes)
        stay = ~gone
        begin = np.tile(release[stay], 2)
        end = np.concatenate([(release + first)[stay], (release + first + rest)[stay]])
        work = np.concatenate([prefill[stay], decodes[stay]])
        for a in begin:
            for b in end:
                assert work[(begin >= a) & (end <= b)].sum() <= max(b - a, 0) + 1e-6
        dropped += int(gone.sum())
    assert dropped > 20  # in 40 cases: not all fit


def test_percentiles_are_searched_for() -> None:
    # M = 101 holds the long one alone, or both short ones. The median is the second of three times:
    # 10 + 40 ms if the short ones go first, together, and 10 + 100 + 50 if the long one does.
    instance = Instance(
        [0.0] * 3, [100, 20, 20], [1] * 3, kv_capacity=101, time_unit="second", name="three"
    )
    problem = Problem(instance, PLAIN, "p50_ttft")
    result = solve(problem, method="search", time_limit_s=20.0)
    assert result.value == pytest.approx(0.05)
    first = run(Problem(instance, PLAIN), "fcfs").metrics["p50_ttft"]
    assert result.value < first
    assert result.bound is None or result.bound <= result.value


@pytest.mark.parametrize("objective", ["p99_ttft", "p90_latency"])
def test_a_percentile_found_is_above_its_bound_and_no_worse_than_fcfs(objective: str) -> None:
    instance, cost = stream(60, 9.0), load_cost_model(MODEL)
    # No policy of the usual ones is run before the search.
    schedule, _ = improve(Problem(instance, cost, objective), Budget(0.5), policies=())
    found = evaluate(Problem(instance, cost), schedule).metrics[objective]
    first = run(Problem(instance, cost), "fcfs").metrics[objective]
    proved = bound(Problem(instance, cost, objective), time_limit_s=0.5).bound
    assert proved is not None
    assert proved <= found <= first
