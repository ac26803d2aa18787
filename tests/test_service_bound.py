"""How many requests can be within their SLOs: proved, and never contradicted."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import replace
from fractions import Fraction
from operator import add

import brute_force
import numpy as np
import pytest
from exhaustive_batches import SCALE, Exhaustive
from test_batch_bounds import tiny

from optsched import (
    BatchCost,
    Instance,
    Limits,
    Problem,
    bound,
    capacity,
    evaluate,
    load_cost_model,
    run,
)
from optsched.bounds.service import most_within
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, OptschedError, UsageError
from optsched.problem.limits import all_limits
from optsched.problem.metrics import served_well

# One layer, milliseconds: 1 per token, 10 per batch.
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10"})


def test_prefills_that_fit_before_their_deadlines() -> None:
    # M = 10, prompts of 10 fill it: 10 + 10 = 20 ms each. Five at 0 with 50 ms to the first token:
    # two of them and half of a third fit into 50 ms, so at most 2. Two workers: 2 x 2.5 = 5.
    instance = Instance(
        [0.0] * 5, [10] * 5, [1] * 5, kv_capacity=10, time_unit="second", kv_accounting="cached"
    )
    assert most_within(instance, PLAIN, {"slo_ttft": 0.05}) == 2
    assert most_within(instance, PLAIN, {"slo_ttft": 0.05}, 2) == 5
    assert most_within(instance, PLAIN, {"slo_ttft": 0.04}) == 2
    assert most_within(instance, PLAIN, {"slo_ttft": 0.0199}) == 0  # not one alone
    found = bound(Problem(instance, PLAIN, "slo_attainment:slo_ttft=0.05"), time_limit_s=5)
    assert found.bound == 0.4  # 2 of 5
    assert found.value == 0.4  # fcfs serves two by 40 ms


def test_what_a_limit_on_tpot_costs_in_base_time() -> None:
    # A decode takes 1 ms of own work and a batch 10 ms more, so 20 ms per token allow batches of
    # 10: a decode step costs 1 + 10 / (20 - 10) = 2 ms. With 100 prompt tokens and 100 later
    # tokens a request takes 100 + 100 * 2 = 300 ms. A TTFT of 2 s lets all end by
    # 2 + 100 * 0.02 = 4 s: 13 take 3.9 s, and 14 would take 4.2 s.
    def many(n: int) -> int:
        instance = Instance(
            [0.0] * n, [100] * n, [101] * n, kv_capacity=10**6, time_unit="second",
            kv_accounting="cached",
        )  # fmt: skip
        return most_within(instance, PLAIN, {"slo_ttft": 2, "slo_tpot": 0.02})

    assert [many(n) for n in (6, 13, 14, 30)] == [6, 13, 13, 13]


def test_the_price_of_tpot_counts_no_more_than_its_proof() -> None:
    # Refilling token k takes k ms and a decode 1 + 4 = 5 ms, 10 ms per batch. A limit of 30 ms
    # per token gives k = 10 / 20^2, c = 10 / 20: a decode counts 5 + 5 c = 7.5 ms, a refill
    # k - 5 * 30 * 10 / 400 = k - 3.75 ms. Tokens 2 to 11 count k - 3.75 (27.5 ms in all, of which
    # the first two are below 0), tokens 12 to 30 count 7.5 (142.5 ms). With the prefill 171 ms.
    # 1.72 s hold 10 requests; if a token counted at least 0 each would take 173.5 ms, and 9 fit.
    cost = BatchCost("heavy", 1, {"token": "1", "base": "10", "decode_request": "4"})
    instance = Instance(
        [0.0] * 20, [1] * 20, [30] * 20, kv_capacity=10**6, time_unit="second",
        kv_accounting="cached",
    )  # fmt: skip
    assert most_within(instance, cost, {"slo_ttft": 0.85, "slo_tpot": 0.03}) == 10


def test_a_time_that_equals_its_limit_is_within_it_for_bound_and_judge() -> None:
    # Two prompt tokens and a batch take 12 ms, a decode 11 ms. On a clock that is at 0.3 s the
    # first token comes after 0.01200000000000001 s.
    instance = Instance([0.0, 0.3, 1.1], [2] * 3, [2] * 3, kv_capacity=9, time_unit="second")
    alone = run(Problem(instance, PLAIN), "fcfs").evaluation
    assert max(alone.ttft) > 0.012
    assert max(alone.latency) > 0.023
    ties = {"slo_ttft": 0.012, "slo_tpot": 0.011, "slo_gap": 0.011, "slo_latency": 0.023}
    for name, limit in ties.items():
        judged = run(Problem(instance, PLAIN, **{name: limit}), "fcfs").evaluation
        assert judged.metrics["slo_attainment"] == 1, name
        assert most_within(instance, PLAIN, {name: limit}) == 3
        less = {name: limit * (1 - 1e-6)}
        judged = run(Problem(instance, PLAIN, **less), "fcfs").evaluation
        assert judged.metrics["slo_attainment"] == 0, name
        assert most_within(instance, PLAIN, less) == 0
    # So the load at which every request is in time is no longer below what nobody is proved to do.
    found = capacity(
        Problem(instance, PLAIN, slo_latency=0.023), ["fcfs"], attainment=1.0, search_s=0.0
    )
    assert found.best is not None
    assert found.best.attainment == 1
    assert found.bound is None or found.best.value < found.bound
    # In rounds times are exact, and limits too.
    rounds = Instance([0, 3], [2, 2], [1, 1], kv_capacity=9)
    for limit, share in ((1.0, 1.0), (1 - 1e-12, 0.0)):
        judged = run(Problem(rounds, slo_ttft=limit), "fcfs").evaluation
        assert judged.metrics["slo_attainment"] == share == most_within(
            rounds, None, {"slo_ttft": limit}
        ) / 2  # fmt: skip


def test_rounds_by_hand() -> None:
    # s = 3: 4 tokens in the round of the first token; M = 8: two per round, so two by round 1.
    instance = Instance([0] * 5, [3] * 5, [1] * 5, kv_capacity=8)
    assert most_within(instance, None, {"slo_ttft": 1}) == 2
    assert most_within(instance, None, {"slo_ttft": 1.9}) == 2
    assert most_within(instance, None, {"slo_ttft": 2}) == 4
    assert most_within(instance, None, {"slo_latency": 1}, workers=2) == 4
    one = Instance([0] * 5, [3] * 5, [1] * 5, kv_capacity=8, limits=Limits(max_running=1))
    assert most_within(one, None, {"slo_latency": 3}) == 3


def lp(begin, end, work, capacity) -> float:
    """Return the best value of the relaxation by a linear program over unit cells of time."""
    from scipy.optimize import linprog

    jobs, cells = len(work), int(max(end))
    cost = np.zeros(jobs * cells)
    limits, least = [], np.zeros((cells, jobs * cells))
    for i in range(jobs):
        row = np.zeros(jobs * cells)
        for t in range(int(begin[i]), int(end[i])):
            cost[i * cells + t] = -1 / work[i]
            row[i * cells + t] = 1
            least[t, i * cells + t] = 1
        limits.append(row)
    top = np.concatenate([work, np.full(cells, capacity)])
    inside = np.vstack([*limits, least])
    return -linprog(cost, A_ub=inside, b_ub=top).fun


def test_the_greedy_solves_its_linear_program() -> None:
    """`_greedy` returns the floor of what scipy finds for the program in full (`lp`)."""

    from optsched.bounds import service

    generator = np.random.default_rng(2)
    for _ in range(150):
        n, capacity = int(generator.integers(1, 7)), int(generator.integers(1, 4))
        begin = np.sort(generator.integers(0, 8, n)).astype(float)
        end = np.maximum.accumulate(begin + generator.integers(1, 5, n))
        work = generator.integers(1, 9, n).astype(float)
        # Unit cells hold `capacity`, so a job may use a whole cell: as in the bound.
        found = service._greedy(begin, end, work, capacity)
        assert found == int(np.floor(lp(begin, end, work, capacity) + 1e-6))


def slos_for(generator: np.random.Generator, unit: float) -> dict[str, float]:
    """Draw at least one limit: half a unit to nine units of time."""
    names = ["slo_ttft", "slo_tpot", "slo_gap", "slo_latency"]
    chosen = [name for name in names if generator.random() < 0.5] or ["slo_ttft"]
    return {name: float(unit * generator.choice([0.5, 1, 1.5, 2, 4, 9])) for name in chosen}


def test_no_starts_in_rounds_serve_more() -> None:
    """Against brute force over all starts, which counts those that are late."""
    generator = np.random.default_rng(3)
    tight = 0
    for _ in range(300):
        n, room = int(generator.integers(1, 6)), int(generator.integers(4, 10))
        prompt = generator.integers(1, 4, n)
        output = np.minimum(generator.integers(1, 5, n), room - prompt)
        instance = Instance(
            generator.integers(0, 5, n), prompt, output, kv_capacity=room,
            limits=Limits(max_running=None if generator.random() < 0.6 else 2),
        )  # fmt: skip
        slos = slos_for(generator, 1.0)
        first, last = slos.get("slo_ttft", 99), slos.get("slo_latency", 99)
        if min(slos.get("slo_tpot", 1), slos.get("slo_gap", 1)) < 1:
            continue  # a run without pauses has one round per token

        def late(arrival: int, output: int, start: int, first=first, last=last) -> int:
            return int(start + 1 - arrival > first or start + output - arrival > last)

        brute_force.OBJECTIVES["late"] = (late, add)
        try:
            served = n - brute_force.brute_force(instance, "late")[0]
        finally:
            del brute_force.OBJECTIVES["late"]
        most = most_within(instance, None, slos)
        assert served <= most, (instance.to_dict(), slos)
        tight += served == most
    assert tight > 100  # of 300: often the bound is reached


def most_by_search(
    instance: Instance,
    cost: BatchCost,
    slos: dict[str, float],
    split: bool | None = None,
    search: type[Exhaustive] = Exhaustive,
) -> int:
    """Return the most requests within SLOs without evictions, where batches start at once."""
    limits = all_limits(instance, slos)
    # Without evictions every batch is progress.
    exact = search(instance, cost, eviction_free=True, split=split)
    unit = 1000 * SCALE
    limit = {
        name: [Fraction(v) * unit if np.isfinite(v) else None for v in column.tolist()]
        for name, column in limits.items()
    }
    n, output = exact.n, exact.output
    start = tuple((0, 0, False) for _ in output)

    def over(name: str, i: int, time) -> bool:
        return limit[name][i] is not None and time > limit[name][i]

    # A label: the clock, and per request (late, first token, latest token).
    begin = (min(exact.arrival), tuple((False, None, None) for _ in output))
    labels, queue, best = {start: {begin}}, deque([start]), 0
    while queue:
        state = queue.popleft()
        for clock, known in labels.pop(state, ()):
            for time, latest, after in exact.from_state(state):
                now = max(clock, latest) + time
                seen = list(known)
                for i in range(n):
                    was = 0 if state[i] != "done" and not state[i][0] else 1
                    produced = state[i] == "done" or (
                        after[i] != "done" and after[i][0] == state[i][0]
                    )
                    if produced:
                        continue
                    late, first, last = seen[i]
                    if not was:
                        late, first = late or over("slo_ttft", i, now - exact.arrival[i]), now
                    else:
                        late = late or over("slo_gap", i, now - last)
                    if after[i] == "done":
                        late = late or over("slo_latency", i, now - exact.arrival[i])
                        if output[i] > 1:
                            late = late or over("slo_tpot", i, (now - first) / (output[i] - 1))
                        first, now_or_none = None, None
                    else:
                        now_or_none = now
                    seen[i] = (late, first, now_or_none)
                if all(s == "done" for s in after):
                    best = max(best, sum(not late for late, *_ in seen))
                    continue
                if after not in labels:
                    labels[after] = set()
                    queue.append(after)
                labels[after].add((now, tuple(seen)))
    return best


def check_seconds(seed: int, count: int) -> tuple[int, int]:
    """Hold the bound against exhaustive search; return how many were judged, and how often it is
    met."""
    generator = np.random.default_rng(seed)
    judged = tight = 0
    while judged < count:
        instance, cost = tiny(generator)
        if instance.n > 2 or int(instance.output_tokens.sum()) > 5 or instance.kv_capacity > 6:
            continue
        typical = cost.layers / 1000 * sum(float(v) for v in cost.coefficients.values())
        slos = slos_for(generator, typical)
        most, served = most_within(instance, cost, slos), most_by_search(instance, cost, slos)
        assert served <= most, (instance.to_dict(), dict(cost.coefficients), slos)
        judged += 1
        tight += served == most
    return judged, tight


def test_no_schedule_in_seconds_serves_more() -> None:
    """Seed 5, 60 draws; in more than half of those judged the bound is met."""
    judged, tight = check_seconds(5, 60)
    assert tight > judged / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 15))
def test_the_same_in_seconds_by_the_hundred(seed: int) -> None:
    check_seconds(seed, 400)


def check_workers_in_seconds(seed: int, count: int) -> int:
    """Compare two workers with the best split, and with one worker, longer limits and the rate."""
    generator = np.random.default_rng(seed)
    judged = gained = 0
    while judged < count:
        instance, cost = tiny(generator)
        if not 2 <= instance.n <= 3 or int(instance.output_tokens.sum()) > 5:
            continue
        try:
            queue = run(Problem(instance, cost), "fcfs").evaluation
        except OptschedError:
            continue
        slos = {  # tight: the last one of first come first served is late
            name: float(generator.uniform(0.4, 0.95) * column.max())
            for name, column in (("slo_ttft", queue.ttft), ("slo_latency", queue.latency))
            if name == "slo_latency" or generator.random() < 0.5
        }
        longer = {name: 1.5 * limit for name, limit in slos.items()}
        everybody = np.arange(instance.n)
        served = [most_by_search(instance, cost, limits) for limits in (slos, longer)]
        split = served[0]
        for bits in range(1, 2 ** (instance.n - 1)):
            one = (bits >> everybody) & 1 == 1
            parts = (instance.subset(everybody[who]) for who in (one, ~one))
            split = max(split, sum(most_by_search(part, cost, slos) for part in parts))
        case = (instance.to_dict(), dict(cost.coefficients), slos)
        most = [most_within(instance, cost, slos, workers) for workers in (1, 2, 3)]
        assert served[0] <= served[1], case
        assert split <= most[1], case
        assert most == sorted(most), case
        assert most[0] <= most_within(instance, cost, longer), case
        faster = replace(instance, arrival=instance.arrival / 2)
        assert most_within(faster, cost, slos) <= most[0], case
        judged += 1
        gained += split > served[0]
    return gained


def test_two_workers_in_seconds_serve_no_more() -> None:
    """Seed 6, 12 instances, of which in three at least two workers serve more than one."""
    assert check_workers_in_seconds(6, 12) > 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 45))
def test_two_workers_in_seconds_by_the_hundred(seed: int) -> None:
    check_workers_in_seconds(seed, 400)


@pytest.mark.parametrize("model", ["llama2-7b-a100-infermax", "plain"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_policy_and_no_router_contradicts_it(model: str, workers: int) -> None:
    """At most 29 requests with little KV, limits of some 0.03 s, and runs that end without an
    error."""
    cost = PLAIN if model == "plain" else load_cost_model(model)
    generator = np.random.default_rng(workers)
    for _ in range(25):
        n, capacity = int(generator.integers(2, 30)), int(generator.integers(20, 80))
        prompt = generator.integers(1, 18, n)
        instance = Instance(
            generator.random(n) * generator.choice([0.0, 0.2, 1.0]), prompt,
            generator.integers(1, capacity - prompt + 1).clip(1, 12), kv_capacity=capacity,
            time_unit="second",
        )  # fmt: skip
        slos = slos_for(generator, 0.03)
        most = most_within(instance, cost, slos, workers)
        for policy in ("fcfs", "vllm", "sarathi"):
            for router in ("round-robin", "least-requests"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        schedule = simulate(
                            Problem(instance, cost), f"{policy}:workers={workers},router={router}"
                        )
                    except OptschedError:
                        continue
                    good = served_well(evaluate(Problem(instance, cost, **slos), schedule))
                assert good is not None
                assert good.sum() <= most


def test_it_falls_with_the_rate_and_rises_with_limits_and_workers() -> None:
    generator = np.random.default_rng(8)
    cost = load_cost_model("llama2-7b-a100-infermax")
    n = 300
    arrival = np.cumsum(generator.exponential(0.05, n))
    prompt, output = generator.integers(50, 2000, n), generator.integers(2, 200, n)

    def most(scale: float = 1.0, ttft: float = 1.0, tpot: float = 0.05, workers: int = 1) -> int:
        instance = Instance(arrival / scale, prompt, output, kv_capacity=50_000, time_unit="second")
        return most_within(instance, cost, {"slo_ttft": ttft, "slo_tpot": tpot}, workers)

    # Each list of counts must not fall: over falling rates, longer limits and more workers.
    for values in (
        [most(scale) for scale in (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)],
        [most(ttft=limit) for limit in (0.1, 0.5, 1.0, 5.0, 20.0)],
        [most(tpot=limit) for limit in (0.02, 0.05, 0.1, 1.0)],
        [most(workers=count) for count in (1, 2, 3, 8)],
    ):
        assert values == sorted(values)
        assert values[0] < values[-1]  # no list is constant


def test_arrivals_at_a_time_stamp_and_in_late_rounds_are_counted_alike() -> None:
    """Asserted in rounds: 2**50 rounds later just as many are within their limits."""
    early = Instance([0, 0, 3], [3, 3, 3], [2, 2, 2], kv_capacity=8)
    late = Instance([2**50, 2**50, 2**50 + 3], [3, 3, 3], [2, 2, 2], kv_capacity=8)
    for limit in (1, 2, 3):
        slos = {"slo_latency": limit}
        assert most_within(early, None, slos) == most_within(late, None, slos)


def test_goodput_is_bounded_too() -> None:
    instance = Instance([0] * 5, [3] * 5, [1] * 5, kv_capacity=8)
    # Two by round 1; five requests of one token alone end at 1 or later: 2 per round.
    found = bound(Problem(instance, objective="slo_goodput:slo_ttft=1"), time_limit_s=1)
    assert (found.bound, found.method) == (2.0, "slo-volume")
    assert found.value == pytest.approx(2 / 3)  # ceil(5 / 2) = 3 rounds for all


def test_what_has_no_slo_or_a_wrong_one_is_refused() -> None:
    instance = Instance([0], [1], [1], kv_capacity=3)
    with pytest.raises(UsageError, match=r"SLO:.*slo_ttft.*slo_tpot"):
        most_within(instance, None)
    with pytest.raises(InputError, match=r"slo_ttft.*0.*0"):
        most_within(instance, None, {"slo_ttft": 0})
