"""The label-setting method: against exhaustive search by feature, and rules that are wrong.

Exhaustive search (exhaustive_batches.py) goes through all batches in exact fractions.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from exhaustive_batches import NAMES, SCALE, Exhaustive
from sweeps import parts

from optsched import Instance, Problem, solve
from optsched.costs.cost import BatchCost
from optsched.costs.load import load_cost_model
from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations import Task, check_method, get
from optsched.optimize.formulations.batches import best_first, labels
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.problem.errors import UsageError
from optsched.problem.instance import Limits
from optsched.problem.schedule import from_batches

A100 = load_cost_model("llama2-7b-a100-infermax")
KINDS = ("ample", "evictions", "blocks", "limits", "apart", "kept", "equal", "zeros")
"""Much KV, little KV, KV in blocks, limits, no hybrid batches, no evictions, equal requests, and
cost models in which most coefficients are 0. `drawn` makes them: "kept" is without evictions, and
"apart" without hybrid batches."""


def drawn_cost(rng, often=0.7):
    """Return a shipped cost model, or a random one in which some coefficients are 0."""
    if often == 0.7 and rng.random() < 0.2:
        return A100

    sizes = dict.fromkeys(NAMES, 3.0) | {"base": 60.0, "decode_base": 25.0, "prefill_base": 40.0}
    sizes["decode_base"] *= float(rng.choice([0.0, 0.1, 1.0]))  # refills pay if it is large
    sizes |= {"prefill_square": 0.5, "prefill_cross": 0.5, "prefill_kv": 0.5, "decode_kv": 1.0}
    drawn = {
        name: str(round(max(0.01, float(rng.random()) * size) / 1000, 5))  # not 0
        for name, size in sizes.items()
        if rng.random() < often
    }
    return BatchCost("drawn", 1, {"token": "0.005", **drawn})


def drawn(rng, kind, most=4):
    """Return a random tiny instance with its cost model, and what is asked besides."""
    cost = drawn_cost(rng, 0.25 if kind == "zeros" else 0.7)
    n = int(rng.integers(2, most + 1))
    small = 3 if n > 3 else 4
    prompt, output = rng.integers(1, 9, n), rng.integers(1, small + 1, n)
    if kind == "equal" or rng.random() < 0.3:
        prompt[:], output[:] = prompt[0], output[0]

    batch_s = cost.layers * (cost["base"] + cost["token"] * 4) / 1000
    arrival = np.round(rng.random(n) * batch_s * int(rng.integers(1, 8)), 6)
    arrival[rng.random(n) < 0.5] = 0.0
    if kind == "equal":
        arrival = rng.choice(arrival[:2], n)

    accounting = "cached" if rng.random() < 0.5 else "generated"
    block = int(rng.integers(2, 5)) if kind == "blocks" else 1
    peaks = -(-(prompt + output - (accounting == "cached")) // block) * block
    most_kv = peaks.sum() if kind == "evictions" else peaks.sum() + 3
    room = int(rng.integers(peaks.max(), most_kv + 1))
    if kind == "ample":
        room = int(peaks.sum()) + int(rng.integers(0, 2))

    limits, hybrid = {}, kind != "apart"
    if kind in ("limits", "blocks", "apart"):
        if rng.random() < 0.4:
            limits["max_batch_tokens"] = int(rng.integers(prompt.max(), prompt.sum() + 3))
        if rng.random() < 0.4:
            limits["max_prefill_tokens"] = int(rng.integers(prompt.max(), prompt.sum() + 2))
        if rng.random() < 0.4:
            limits["max_running"] = int(rng.integers(1, n + 1))

    instance = Instance(
        arrival, prompt, output, room, time_unit="second", kv_accounting=accounting,
        kv_block_tokens=block, limits=Limits(**limits), hybrid_batching=hybrid,
        chunked_prefill=None if rng.random() < 0.5 else False,
    )  # fmt: skip
    return instance, cost, {"eviction_free": True} if kind == "kept" else {}


def run(instance, cost, limit=600.0, goal="tel", **extras):
    """Return the method's answer."""
    task = Task(instance, cost, (goal,), extras=extras)
    return check_method(get("infermax"), "labels", task).run(task, SolveOptions(limit))


def agrees(instance, cost, extras, what, goal="tel"):
    """Hold the optimum and the bound of the method against exhaustive search over all batches."""
    (best,) = Exhaustive(instance, cost, split=False, **extras).best(goal)
    answer = run(instance, cost, goal=goal, **extras)
    what = f"{what}: {instance.to_dict()} {dict(cost.coefficients)}"
    assert answer.status == Status.OPTIMAL, what
    assert answer.bound == pytest.approx(best, rel=1e-12, abs=1e-13), what
    judged = evaluate(Problem(instance, cost), answer.schedule)
    assert judged.metrics[goal] == pytest.approx(best, rel=1e-9), what
    assert not (extras and judged.metrics["evictions"]), what


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", parts(15, 250))
def test_labels_agree_with_exhaustive_search(kind, draws):
    for seed in draws:
        rng = np.random.default_rng([48, KINDS.index(kind), seed])
        agrees(*drawn(rng, kind, most=5 if seed % 30 == 29 else 4), f"{kind} {seed}")


@pytest.mark.parametrize("goal", ["makespan", "mean_ttft", "mean_tpot"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", parts(6, 100))
def test_other_objectives_agree_with_exhaustive_search(goal, kind, draws):
    """Mean TPOT only where all arrive together and some request has a second token."""
    for seed in draws:
        rng = np.random.default_rng([50, KINDS.index(kind), seed])
        instance, cost, extras = drawn(rng, kind)
        if goal == "mean_tpot":
            instance = replace(instance, arrival=np.zeros(instance.n))
            if (instance.output_tokens == 1).all():
                continue
        agrees(instance, cost, extras, f"{goal} {kind} {seed}", goal)


def most_in_time(instance, cost, **extras):
    """Return the most requests within limits on first tokens and latencies, by all batches."""
    exact = Exhaustive(instance, cost, split=False, **extras)
    limits = {
        name: [Fraction(v) * 1000 * SCALE if np.isfinite(v) else None for v in column.tolist()]
        for name, column in instance.slos.items()
    }

    def over(name, i, end):
        limit = limits.get(name, [None] * exact.n)[i]
        return limit is not None and end - exact.arrival[i] > limit

    def produced(i, state):
        return exact.output[i] if state == "done" else state[0]

    start = tuple((0, 0, False) for _ in exact.output)
    labels, best = {start: [(min(exact.arrival), frozenset())]}, exact.n
    while labels:  # every batch produces a token
        state = min(labels, key=lambda one: sum(produced(i, s) for i, s in enumerate(one)))
        reached = labels.pop(state)
        if all(s == "done" for s in state):
            best = min(best, *(len(late) for _, late in reached))
            continue
        for (clock, late), (time, latest, after) in product(reached, exact.from_state(state)):
            end, now = max(clock, latest) + time, set(late)
            for i, (old, new) in enumerate(zip(state, after, strict=True)):
                if produced(i, old) == 0 < produced(i, new) and over("slo_ttft", i, end):
                    now.add(i)
                if new == "done" != old and over("slo_latency", i, end):
                    now.add(i)
            others = labels.setdefault(after, [])
            if not any(t <= end and seen <= now for t, seen in others):
                others[:] = [(t, seen) for t, seen in others if not (end <= t and now <= seen)]
                others.append((end, frozenset(now)))
    return exact.n - best


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", parts(8, 100))
def test_as_many_are_in_time_as_exhaustive_search_says(kind, draws):
    """Limits are some 0.5 to 2 n times `unit`, a prefill batch of 8 tokens: some are kept."""
    for seed in draws:
        rng = np.random.default_rng([53, KINDS.index(kind), seed])
        instance, cost, extras = drawn(rng, kind, most=3 if seed % 4 else 4)
        unit = cost.layers / 1000 * (cost["base"] + cost["prefill_base"] + 8 * cost["token"])
        slos = {
            name: np.round(unit * rng.uniform(0.5, 2.0 * instance.n, instance.n), 9)
            for name in ("slo_ttft", "slo_latency")
            if rng.random() < 0.7
        } or {"slo_latency": np.full(instance.n, unit)}
        if kind == "equal":
            slos = {name: np.full(instance.n, column[0]) for name, column in slos.items()}
        instance = replace(instance, **slos)
        most = most_in_time(instance, cost, **extras)
        found = run(instance, cost, goal="slo_attainment", **extras)
        what = f"{kind} {seed}: {instance.to_dict()} {dict(cost.coefficients)}"
        assert found.status == Status.OPTIMAL, what
        assert (found.objective, found.bound) == (most / instance.n, most / instance.n), what


def test_limits_on_the_time_between_tokens_are_refused_by_name():
    instance = Instance([0], [4], [2], 20, time_unit="second", slo_tpot=[1.0])
    with pytest.raises(UsageError, match=r"labels.*slo_attainment.*cpsat"):
        run(instance, A100, goal="slo_attainment")


def test_busy_periods_that_cannot_meet_add_up():
    """The first three need at most 3 x (prefill + 39 decodes), far below 100 s."""
    few = spread(3)
    twice = instance_of(
        np.concatenate([few.arrival, few.arrival + 100]), np.tile(few.prompt_tokens, 2),
        np.tile(few.output_tokens, 2), 100_000,
    )  # fmt: skip
    alone = run(few, A100)
    assert alone.status == Status.OPTIMAL
    assert run(twice, A100).objective == pytest.approx(2 * alone.objective, rel=1e-12)


def test_throughput_is_tokens_by_the_makespan():
    """All tokens over the time from the first arrival to the least makespan."""
    instance, cost, _ = drawn(np.random.default_rng(4), "evictions")
    last, rate = (run(instance, cost, goal=goal) for goal in ("makespan", "tps"))
    assert rate.status == last.status == Status.OPTIMAL
    span = last.objective - instance.first_arrival
    assert rate.objective == pytest.approx(instance.output_tokens.sum() / span)


DEAR = BatchCost(
    "a decode's own work is comparable with fixed costs",
    1,
    {
        "token": "5", "base": "60", "decode_kv": "3", "decode_request": "5", "decode_base": "20",
        "prefill_square": "1", "prefill_request": "10",
    },
)  # fmt: skip


def instance_of(arrival, prompt, output, capacity, accounting="cached", **rest):
    """Return an instance in seconds without chunks."""
    return Instance(
        arrival, prompt, output, capacity, time_unit="second", kv_accounting=accounting,
        chunked_prefill=False, **rest,
    )  # fmt: skip


def test_a_resident_is_left_out_where_it_pays():
    """The rule "a resident is never left out" gives 2.831168."""
    instance = instance_of([0, 0.518916, 0.518916], [12, 5, 5], [8, 4, 3], 100)
    agrees(instance, DEAR, {}, "left out")
    answer = run(instance, DEAR)
    assert answer.objective == 2.771168  # exhaustive search has the same, as `agrees` saw
    assert evaluate(Problem(instance, DEAR), answer.schedule).metrics["evictions"] == 0


def test_a_refill_in_place_pays_with_dear_decode_batches():
    """The rule "a refill in place never pays" loses."""
    cost = BatchCost("dear decodes", 1, {"token": "1", "base": "1", "decode_base": "50"})
    instance = instance_of([0, 0], [1, 1], [3, 2], 100)
    agrees(instance, cost, {}, "refill")
    answer, without = run(instance, cost), run(instance, cost, eviction_free=True)
    # Each of the 2 + 1 tokens after the first ones comes by a refill, whose batch does not pay the
    # 50 ms of one that decodes.
    assert evaluate(Problem(instance, cost), answer.schedule).metrics["evictions"] == 3
    assert answer.objective < without.objective


FULL = instance_of([0, 0.012], [10, 11], [11, 1], 20)
"""A prefill of the first alone ends when the second arrives, which does not fit beside it."""
PLAIN = BatchCost("tokens and batches", 1, {"token": "1", "base": "2"})


def test_a_machine_waits_for_kv():
    """If nothing is evicted, the first would end at 12 + 10 x 3 and the second at 42 + 13 ms.

    The second ends at 12 + 13, and then the first at 25 + 12 + 10 x 3: with 25 + 67 - 12 = 80 ms of
    latencies, and not 42 + 55 - 12 = 85.
    """
    agrees(FULL, PLAIN, {"eviction_free": True}, "waits")
    assert run(FULL, PLAIN, eviction_free=True).objective == 0.08


@pytest.mark.parametrize("accounting", ["cached", "generated"])
@pytest.mark.parametrize("limits", [{}, {"max_prefill_tokens": 7}])
def test_prefills_apart_from_the_batch_before_agree(accounting, limits):
    """The rule "merge a prefill into the batch before" loses on instances such as these."""
    # Alone under `dear`, the first prefill (300 + 90 + 3 x 5 ms) is over at 0.405 s and decodes
    # (300 + 40 + 5) at 0.75 and 1.095 s: each `late` is amid another of these batches.
    dear = BatchCost(
        "dear batches", 1, {"token": "5", "base": "300", "decode_base": "40", "prefill_base": "90"}
    )
    for late in (0.3, 0.6, 1.051905):
        late_two = instance_of(
            [0, 0, late, late], [3, 3, 4, 1], [3, 3, 1, 1], 7, accounting, limits=Limits(**limits)
        )
        equal = instance_of(
            [0, 0, late], [4, 4, 1], [3, 3, 2], 12, accounting, kv_block_tokens=2,
            limits=Limits(**limits),
        )  # fmt: skip
        for cost in (dear, DEAR):
            agrees(late_two, cost, {}, "two late")
            agrees(equal, cost, {}, "blocks")


# Of `tiny-seconds`, in seconds.
OPTIMA = {"tel": 0.13913902461056, "makespan": 0.03819322857024}


@pytest.mark.parametrize("goal", OPTIMA)
def test_the_shipped_instance_is_optimal(goal):
    """The method proves what it finds, to the last digit, and `solve` takes it by itself."""
    result = solve(Problem("tiny-seconds", A100, goal), time_limit_s=60)
    assert result.status == Status.OPTIMAL
    assert result.method == "labels"
    assert result.value == pytest.approx(OPTIMA[goal], abs=1e-14)
    assert result.bound == pytest.approx(result.value, rel=1e-15)


@pytest.mark.parametrize("draws", parts(2, 8))
def test_cpsat_agrees(draws):
    """CP-SAT, another method for the same problem, proves the same optimum."""
    for seed in draws:
        instance, cost, _ = drawn(np.random.default_rng([49, seed]), "evictions", most=3)
        task = Task(instance, cost, ("tel",))
        found = check_method(get("infermax"), "cpsat", task).run(task, SolveOptions(60.0))
        assert found.status == Status.OPTIMAL
        assert run(instance, cost).objective == pytest.approx(found.objective, rel=1e-12)


def spread(n, capacity=100_000):
    """Return n requests that all overlap."""
    rng = np.random.default_rng(5)
    arrival = np.round(np.cumsum(rng.exponential(0.02, n)), 6)
    return instance_of(arrival, rng.integers(100, 1500, n), rng.integers(10, 40, n), capacity)


def test_a_stopped_search_keeps_its_bound():
    """What is told of the bound rises to that of the answer, below a value; and the same under a
    time limit."""
    instance, stop = spread(14), threading.Event()
    task, seen = Task(instance, A100, ("tel",)), []
    method = check_method(get("infermax"), "labels", task)

    def told(state):
        seen.append(state.bound)
        if len(seen) == 40:  # amid the search
            stop.set()

    answer = method.run(task, SolveOptions(None, progress=told, stop=stop))
    assert answer.native_status.startswith("interrupted")
    assert answer.status == Status.FEASIBLE
    assert 0 < seen[0] <= seen[-1] <= answer.bound < answer.objective
    assert seen == sorted(seen)

    timed = method.run(task, SolveOptions(0.5))
    assert timed.native_status.startswith("time limit")
    assert timed.bound <= answer.objective


def test_the_memory_limit_ends_the_search(monkeypatch):
    monkeypatch.setattr(best_first, "MAX_BYTES", 2_000_000)  # far less than its labels take
    answer = run(spread(14), A100)
    assert answer.native_status.startswith("memory limit")
    assert answer.bound < answer.objective


def test_arrays_that_grow_change_nothing():
    instance = spread(6)
    first = run(instance, A100)
    assert first.status == Status.OPTIMAL
    assert first.bound == first.objective


def test_below_the_optimum_is_proved_impossible():
    instance, cost, _ = drawn(np.random.default_rng(3), "evictions")
    best = run(instance, cost).objective
    assert run(instance, cost, below=best * (1 - 1e-9)).status == Status.INFEASIBLE
    assert run(instance, cost, below=best * (1 + 1e-9)).status == Status.OPTIMAL


def test_long_decimals_of_arrivals_leave_an_interval():
    rng = np.random.default_rng(1)
    instance = instance_of(rng.random(4) * 5e-6, [5, 40, 9, 30], [3, 9, 5, 4], 60)
    answer = run(instance, A100)
    assert answer.status == Status.FEASIBLE
    # Each of four arrivals is rounded down by less than 1e-12 s, and floats come on top.
    assert answer.bound <= answer.objective <= answer.bound + 5e-12
    assert solve(Problem(instance, A100)).status == Status.OPTIMAL  # within the judge's rounding


def chunked(rng):
    """Return a tiny instance whose prefills may be split, with its cost model."""
    instance, cost, _ = drawn(rng, "evictions", most=3 if rng.random() < 0.2 else 2)
    few = 2 if instance.n > 2 else 3
    prompt = np.minimum(instance.prompt_tokens, few + 1)
    output = np.minimum(instance.output_tokens, few)
    room = int(max((prompt + output).max(), instance.kv_capacity // 2))
    return replace(
        instance, prompt_tokens=prompt, output_tokens=output, kv_capacity=room,
        limits=Limits(max_batch_tokens=room if rng.random() < 0.5 else None), chunked_prefill=True,
    ), cost  # fmt: skip


@pytest.mark.parametrize("goal", ["tel", "makespan", "mean_ttft"])
@pytest.mark.parametrize("draws", parts(15, 300))
def test_chunks_do_not_matter_where_it_is_said(goal, draws):
    """The exhaustive search splits prefills wherever it likes."""
    for seed in draws:
        instance, cost = chunked(np.random.default_rng([52, seed]))
        if labels.why_chunks_matter(Task(instance, cost, (goal,))):
            continue
        (best,) = Exhaustive(instance, cost).best(goal)
        found = run(instance, cost, goal=goal)
        assert found.status == Status.OPTIMAL
        assert found.bound == pytest.approx(best, rel=1e-12, abs=1e-13), instance.to_dict()


def test_why_chunks_matter_is_said_by_name():
    cheap = BatchCost("cheap chunks", 1, {"token": "1", "prefill_square": "1"})
    even = BatchCost("even", 1, {"token": "1", "prefill_square": "1", "prefill_request": "12"})
    of = {"time_unit": "second", "chunked_prefill": True}
    whole = Instance([0, 0.1], [4, 4], [2, 2], 20, **of)
    short = Instance([0, 0.1], [4, 4], [2, 2], 20, **of, limits=Limits(max_batch_tokens=9))
    # Inputs of 5 + 5 tokens at most. Two chunks of 2 and 3 save 2 x 2 x 3 = 12 squares, which a
    # second chunk costs under `even`, so that it is not cheaper.
    for instance, cost, why in (
        (whole, A100, ""),
        (whole, even, ""),
        (whole, cheap, "a prefill in chunks cheaper"),
        (short, A100, "max_batch_tokens 9 may cut prefills .up to 10 tokens at once"),
    ):
        found = labels.why_chunks_matter(Task(instance, cost, ("tel",)))
        assert bool(found) == bool(why)
        assert why in found.replace("(", ".")
        if why:
            with pytest.raises(UsageError, match=f"labels with chunked_prefill.*{why}.*cpsat"):
                run(instance, cost)
    with pytest.raises(UsageError, match=r"labels.*'max_tpot'"):
        solve(Problem("tiny-seconds", A100, "max_tpot"), method="labels")


class AtAsk(threading.Event):
    """Is set from the k-th time on that it is asked."""

    def __init__(self, k):
        super().__init__()
        self.left = k

    def is_set(self):
        self.left -= 1
        return self.left <= 0


def test_a_search_stops_amid_a_label():
    """All but one of 2^18 batches fit, and next to none is below the incumbent.

    The search is stopped at its fourth look at the event, amid the batches of the first label.
    """
    n, cost = 18, BatchCost("tokens", 1, {"token": "1", "base": "0.0001"})
    prompt = np.arange(100, 100 + n)
    instance = instance_of(
        np.zeros(n), prompt, np.ones(n, int), 10**6,
        limits=Limits(max_batch_tokens=int(prompt.sum()) - 1),
    )  # fmt: skip
    start = from_batches(
        np.arange(n + 1), list(range(n)), prompt.tolist(), instance=instance,
        evicted_offsets=np.zeros(n + 1, int), evicted=[], cost_model_sha256=cost.sha256,
    )  # fmt: skip
    task = Task(instance, cost, ("tel",))
    method = check_method(get("infermax"), "labels", task)
    answer = method.run(task, SolveOptions(None, warm_start=start, stop=AtAsk(4)))
    assert answer.native_status == "interrupted, 0 labels expanded"
    # Shortest first is optimal but for the bases of 18 batches, 0.1 us each: latencies have 1, 2,
    # ..., 18 of them, 171 x 0.1 us in all.
    assert 0 < answer.bound <= answer.objective == pytest.approx(answer.bound, abs=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("goal", ["tel", "makespan", "mean_ttft"])
@pytest.mark.parametrize("steps", [1, 5])
def test_slices_that_end_amid_labels_change_nothing(kind, goal, steps, monkeypatch):
    """STEPS are the steps between two looks at the clock: 1 and 5 stop amid a label."""
    for seed in range(4):
        instance, cost, extras = drawn(np.random.default_rng([51, KINDS.index(kind), seed]), kind)
        monkeypatch.setattr(best_first, "STEPS", 2**14)
        whole = run(instance, cost, goal=goal, **extras)
        monkeypatch.setattr(best_first, "STEPS", steps)
        cut = run(instance, cost, goal=goal, **extras)
        assert whole.status == cut.status == Status.OPTIMAL
        assert (whole.bound, whole.objective) == (cut.bound, cut.objective)
        assert whole.native_status == cut.native_status
