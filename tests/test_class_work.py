"""Work by batch length: below every optimum, and no schedule in time contradicts it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import invoke
from test_charges import table
from test_classes import Served, of_2026, question, some_table
from test_service_bound import most_by_search, slos_for
from test_slo_prices import contradicts, drawn, forged, just_in_time, sealed, some_schedule

from optsched import (
    BatchCost,
    Fleet,
    Instance,
    Limits,
    Problem,
    evaluate,
    run,
    verify,
    write_instance,
)
from optsched.analysis.capacity_question import scale_arrivals
from optsched.bounds import tail
from optsched.bounds.base import BoundTask
from optsched.bounds.certificate import certify, verify_certificate
from optsched.bounds.charges import class_charges
from optsched.bounds.checker import check_certificate
from optsched.bounds.checker.batches import batches_of, least_prefills
from optsched.bounds.checker.class_work import (
    Floors,
    alone,
    floors_of,
    later_work,
    prefill_work,
)
from optsched.bounds.checker.classes import exact_charges
from optsched.bounds.checker.parts import Rejected
from optsched.bounds.class_paths import path_charges
from optsched.bounds.class_work import class_work, machine_of, within_slos
from optsched.bounds.leaves import class_work_leaf
from optsched.bounds.slo_prices import Ask, by_class
from optsched.costs.batch import EMPTY, add_decode, add_prefill, batch_time
from optsched.costs.fleet import fleet_of
from optsched.costs.model_file import to_toml
from optsched.costs.table import CostTable, Grid
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError

NO_LIMIT = Budget(None)
GOALS = ("tel", "mean_ttft", "makespan")


def check_sums(seed: int, count: int, *kind: Any) -> list[float]:
    """Hold the bound against optima; return its mean share of them for each of `GOALS`."""
    rng = np.random.default_rng(seed)
    shares: list[list[float]] = []
    for _ in range(count):
        instance, cost = question(rng, *kind)
        if cost.table is None:
            continue
        shares.append([])
        for goal in GOALS:
            (optimum,) = Served(instance, cost).best(goal)
            task = BoundTask.of(Problem(instance, cost, objective=goal))
            proof = class_work(task, NO_LIMIT)
            assert proof.tree is not None
            assert proof.value <= optimum * (1 + 1e-12), (goal, instance.to_dict())
            certificate = json.loads(json.dumps(certify(instance, cost, goal, proof.tree)))
            value = verify_certificate(instance, certificate, cost)
            assert value == pytest.approx(proof.value, rel=1e-9, abs=1e-9)
            shares[-1].append(proof.value / optimum)
    return list(np.mean(shares, axis=0))


def test_it_is_below_the_optimum_of_tiny_instances() -> None:
    # In the mean over the draws it proves a fifth of each optimum, and is so no idle bound.
    assert min(check_sums(0, 10)) > 0.2
    assert min(check_sums(1, 10, of_2026, 1.0)) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_the_same_by_the_thousand(seed: int) -> None:
    check_sums(seed, 150)
    check_sums(seed, 150, of_2026, 1.0)


def check_in_time(seed: int, count: int) -> tuple[int, int]:
    """Hold how many are in time at most against exhaustive search; return draws, and how often
    some are excluded."""
    rng = np.random.default_rng(seed)
    judged = excluded = 0
    while judged < count:
        instance, cost = question(rng, of_2026 if rng.random() < 0.5 else table, 1.0)
        if instance.n > 2 or int(instance.output_tokens.sum()) > 5 or instance.kv_capacity > 6:
            continue
        unit = float(batch_time(cost.array, add_decode(add_prefill(EMPTY, 2, 0), 3)))
        slos = slos_for(rng, unit)
        served = most_by_search(instance, cost, slos, search=Served)
        problem = Problem(instance, cost, objective="slo_attainment", **slos)
        proof = by_class(BoundTask.of(problem), NO_LIMIT)
        most = round(proof.value * instance.n)
        assert served <= most, (instance.to_dict(), slos)
        judged += 1
        excluded += most < instance.n
        if proof.tree is not None:
            made = certify(problem.instance, cost, "slo_attainment", proof.tree)
            assert verify(problem, json.loads(json.dumps(made))) == proof.value
    return judged, excluded


def test_nobody_serves_more_in_exhaustive_search() -> None:
    """Seed 3, 25 draws; in a fifth of them at least some request cannot be in time."""
    judged, excluded = check_in_time(3, 25)
    assert excluded > judged / 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30, 40))
def test_nobody_serves_more_by_the_hundreds(seed: int) -> None:
    check_in_time(seed, 30)


def dense_alone(rng: np.random.Generator) -> CostTable:
    """The dense part of a table alone: its batches get no shorter with prompts, KV or requests."""
    whole = of_2026(rng)
    return CostTable(whole.grids[:1], whole.minorants)


def just_in_time_case(
    rng: np.random.Generator, workers: int
) -> tuple[Instance, BatchCost, dict[str, Any]]:
    """Return an instance under a table, and limits that a schedule of it is just within."""
    while True:
        instance, _ = drawn(rng, 12)
        # As much room as there is would make the search for charges long. Schedules that break
        # what else is drawn are left out.
        instance = replace(
            instance,
            kv_capacity=60,
            kv_block_tokens=int(rng.choice([1, 1, 4])),
            kv_accounting=str(rng.choice(["cached", "generated"])),
            chunked_prefill=None if rng.random() < 0.8 else False,
            limits=Limits(max_batch_tokens=int(rng.choice([9, 16, 60]))),
        )
        tables = (dense_alone, of_2026, table)[int(rng.integers(3))]
        cost = some_table(rng, instance, tables)
        schedule = some_schedule(rng, instance, workers, bool(rng.random() < 0.3))
        try:
            judged = evaluate(Problem(instance, Fleet.of(workers, cost)), schedule)
        except OptschedError:
            continue
        return instance, cost, just_in_time(rng, judged, instance)


def floors_for(instance: Instance, cost: BatchCost) -> tuple[dict[str, Any], Floors]:
    found = within_slos(BoundTask(instance, fleet_of(cost)), NO_LIMIT)
    assert found is not None
    return found


def contradicted(seed: int, count: int, change: Any = lambda floors: floors) -> int | None:
    """Return the first of some schedules that the judge accepts and prices contradict, or None."""
    rng = np.random.default_rng(seed)
    for k in range(count):
        workers = int(rng.choice([1, 1, 2]))
        instance, cost, limits = just_in_time_case(rng, workers)
        floors = change(floors_for(instance, cost)[1])
        demand = Ask(instance, cost, limits, workers, floors=floors).demand()
        if len(demand.who) < instance.n or contradicts(demand, instance.n, rng):
            return k
    return None


def contradicted_at_rates(seed: int, count: int) -> int | None:
    """Return the first of some schedules at other rates that an interval of rates contradicts, or
    all rates from one on, or None."""
    rng = np.random.default_rng(seed)
    for k in range(count):
        instance, cost, _ = just_in_time_case(rng, 1)
        rate = float(rng.uniform(0.5, 2.0))
        moved = scale_arrivals(instance, rate)
        schedule = some_schedule(rng, moved, 1, bool(rng.random() < 0.3))
        try:
            judged = evaluate(Problem(moved, cost), schedule)
        except OptschedError:
            continue
        limits = just_in_time(rng, judged, moved)
        ask = Ask(instance, cost, limits, floors=floors_for(instance, cost)[1])
        low, high = rate * float(rng.uniform(0.8, 1)), rate * float(rng.uniform(1, 1.3))
        between = ask.between(instance.n, NO_LIMIT, low, high)
        beyond = ask.onwards(low, instance.n, NO_LIMIT)
        if between.most < instance.n or beyond is not None:
            return k
    return None


def test_no_schedule_at_another_rate_contradicts_an_interval() -> None:
    assert contradicted_at_rates(7, 20) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60, 65))
def test_intervals_by_the_hundred(seed: int) -> None:
    assert contradicted_at_rates(seed, 200) is None


def check_percentiles(seed: int, count: int) -> float:
    """Hold percentiles and goodput against schedules; return the largest share of a percentile."""
    rng, largest = np.random.default_rng(seed), 0.0
    for _ in range(count):
        instance, cost, limits = just_in_time_case(rng, 1)
        schedule = some_schedule(rng, instance, 1, evictions=False)
        columns = {k: v for k, v in limits.items() if np.isfinite(v).any()}
        instance = replace(instance, **columns)
        try:
            judged = evaluate(Problem(instance, cost), schedule)
        except OptschedError:
            continue
        for goal in ("p50_ttft", "p90_latency"):
            least = tail.by_class(BoundTask.of(Problem(instance, cost, goal)), NO_LIMIT).value
            assert least <= judged.metrics[goal] * (1 + 1e-12), instance.to_dict()
            largest = max(largest, least / judged.metrics[goal])
        most = by_class(BoundTask.of(Problem(instance, cost, "slo_goodput")), NO_LIMIT).value
        assert judged.metrics["slo_goodput"] <= most * (1 + 1e-12), instance.to_dict()
    return largest


def test_percentiles_and_goodput_are_on_the_right_side_of_schedules(monkeypatch: Any) -> None:
    monkeypatch.setattr(tail, "_MANY", 2)  # prices are tried for few requests, too
    assert check_percentiles(8, 15) > 0.3  # of a percentile at least once


def test_a_request_at_0_under_a_falling_table_has_a_goodput() -> None:
    # The grid of prefills falls with what is cached before, so that its least value is below 0;
    # no batch is as short, and so goodput is at most one request over the shortest batch.
    grids = [
        Grid({"tokens": np.array([0.0, 2])}, np.array([0.44, 2.1])),
        Grid({"requests": np.array([0.0, 1])}, np.array([0.23, 1.86])),
        Grid(
            {"prefill_tokens": np.array([1.0, 6]), "prefill_kv": np.array([0.0, 1])},
            np.array([[2.0, 1.9], [3.0, 2.9]]),
        ),
    ]
    cost = BatchCost("falls", 1, {"base": "1"}, table=CostTable(grids, [{"base": "0.001"}]))
    instance = Instance([0.0], [4], [1], kv_capacity=69, time_unit="second", slo_ttft=[1.0])
    problem = Problem(instance, cost, "slo_goodput")
    best = run(problem, "fcfs").metrics["slo_goodput"]
    assert best <= by_class(BoundTask.of(problem), NO_LIMIT).value < np.inf


def test_a_linear_model_has_least_prefills_too() -> None:
    # A token takes 1 ms and a batch 2 ms beside: c tokens at least 2 + c ms.
    cost = BatchCost("linear", 1, {"base": "2", "token": "1"})
    instance = Instance([0.0], [10], [2], kv_capacity=200, time_unit="second")
    least = least_prefills(batches_of(instance, cost))
    assert least[[1, 4, 10]] == pytest.approx([0.003, 0.006, 0.012])


def test_no_schedule_that_is_just_in_time_contradicts_it() -> None:
    assert contradicted(1, 30) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_the_same_of_schedules_by_the_hundred(seed: int) -> None:
    assert contradicted(seed, 200) is None


# What the proof must not do: each of these is contradicted by some schedule.
CHANGES = {
    "twice the charges": lambda f: f._replace(charges=2 * f.charges),
    "batches that last longer": lambda f: f._replace(lo=1.5 * f.lo),
    "prefills that take longer": lambda f: f._replace(prefills=1.1 * f.prefills),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_counts_too_much_is_contradicted(change: str) -> None:
    """Seed 5, 60 cases: on one of them at least a schedule is in time that prices exclude."""
    assert contradicted(5, 60, CHANGES[change]) is not None


def test_forged_certificates_are_refused() -> None:
    """Seed 2; 10 schedules are in time whole, and 10 forgeries of each say that one is late."""
    rng, refused = np.random.default_rng(2), 0
    while refused < 100:
        instance, cost, limits = just_in_time_case(rng, 1)
        columns = {k: v for k, v in limits.items() if np.isfinite(v).any()}
        instance = replace(instance, **columns)
        task = BoundTask.of(Problem(instance, cost, objective="slo_attainment"))
        tree = by_class(task, NO_LIMIT).tree
        if tree is None:
            continue
        honest = certify(instance, cost, "slo_attainment", tree)
        assert check_certificate(instance, honest) == honest["value"] == instance.n
        for k in range(10):
            wrong = forged(rng, tree)
            if k % 2:  # charges that are a tenth too large
                rows = [
                    [row[0], row[1], 0, *(x * 11 // 10 for x in row[3:])] for row in tree["classes"]
                ]
                wrong = {**tree, "classes": rows}
            claim = sealed({**honest, "tree": wrong, "value": instance.n - 1})
            with pytest.raises(Rejected):
                check_certificate(instance, claim)
            refused += 1


def experts() -> BatchCost:
    """A decode of k requests takes 1 s at 1 request, 2 s at 2 and 3 s from 3 on: seconds a layer
    of 1000 ms."""
    tokens = np.array([0.0, 1, 2, 3, 16])
    grid = Grid({"tokens": tokens}, np.array([0.0, 1000, 2000, 3000, 3000]))
    return BatchCost("experts", 1, {"base": "1"}, table=CostTable([grid], [{"base": "999"}]))


def test_tokens_pay_what_batches_short_enough_leave_them() -> None:
    # Batches of 1 s, 2 s and 3 s have 1, 2 and up to 16 tokens. Limits leave each of four steps
    # 2 s: a mean of batches of 1 s (1 s a token) and 3 s (3/16 s), or of 2 s with 1 s a token.
    # Half of the tokens in each is (1 + 3/16) / 2 s, the least there is.
    limits = Limits(max_batch_tokens=16)
    instance = Instance([0.0], [1], [5], kv_capacity=200, limits=limits, time_unit="second")
    edges = [1.5, 2.5]
    task = BoundTask(instance, fleet_of(experts()))
    charges = class_charges(task, [[1, 0, 0, 1, 0]], edges)
    leaf = class_work_leaf(np.array([1.0, 1.999, 2.999]), charges.vectors[:, 0])
    one, many = np.array([1.0]), np.array([4.0])
    found = floors_of(machine_of(task), exact_charges(leaf))
    assert found.charges[:, 0] == pytest.approx([1, 1, 3 / 16], rel=1e-2)
    free, paced = (later_work(found, one, many, limit)[0] for limit in (np.inf, 4 * 2.0))
    # Beside no limit a refill may be cheaper: of 2 to 5 tokens at 3/16 s each it is not.
    assert free == pytest.approx(4 * 3 / 16, rel=1e-2)
    assert paced == pytest.approx(4 * (1 + 3 / 16) / 2, rel=1e-2)
    assert prefill_work(found, one)[0] == pytest.approx(found.charges[:, 3].min(), rel=1e-6)


def test_refills_are_charged_no_less_than_decodes() -> None:
    # One vector of a class may charge refills nothing where its decodes hold KV, which a refill
    # then avoids: that happened in the shortest classes of a measured server.
    rng = np.random.default_rng(12)
    for _ in range(12):
        instance, cost = question(rng, of_2026 if rng.random() < 0.5 else table, 1.0)
        charges = path_charges(BoundTask(instance, fleet_of(cost)), NO_LIMIT).vectors[:, 0]
        decode, context, memory, prefill, _ = charges.T
        longest = int((instance.prompt_tokens + instance.output_tokens).max())
        for m in (int(np.ceil(np.quantile(instance.prompt_tokens, 0.1))), longest):
            decodes = decode + context * m + memory * (m + 1)
            assert (decodes <= prefill * (m + 1) * (1 + 1e-6) + 1e-15).all()
        assert (prefill > 0).all()


def test_prompts_alone_take_their_batches() -> None:
    # A chunk of 4 tokens takes 3 s, and so do 16. So 10 tokens take one batch of 3 s; 40 take at
    # least 40 times 3/16 s, where batches end at 16 tokens.
    instance = Instance([0.0], [16], [2], kv_capacity=200, time_unit="second")
    least = least_prefills(batches_of(instance, experts()))
    assert least[[1, 2, 4, 10]] == pytest.approx([1, 2, 3, 3])
    found = Floors(np.array([1.0]), np.zeros((1, 5)), least[:17], False)
    first, rest = alone(found, np.array([10.0, 40.0]), np.array([1.0, 3.0]))
    assert first == pytest.approx([3, 40 * 3 / 16])
    assert rest == pytest.approx([1, 3])


def test_bound_takes_it_under_a_table_and_verify_accepts_it(tmp_path: Path) -> None:
    # Four prompts of 4 tokens at 0 take 3 s in one batch, and so each has its first token then.
    instance = Instance([0.0] * 4, [4] * 4, [3] * 4, kv_capacity=200, time_unit="second")
    write_instance(instance, tmp_path / "four.json")
    (tmp_path / "experts.toml").write_text(to_toml(experts()), encoding="utf-8")
    at, model, out = tmp_path / "four.json", tmp_path / "experts.toml", tmp_path / "c.json"
    slos = ("--slo-ttft", "3", "--slo-tpot", "1")
    for goal, extra, value in (
        ("mean_ttft", (), 3.0),
        ("makespan", (), 3 + 2 * 1.0),
        ("slo_attainment", slos, None),
    ):
        asked = ("--objective", goal, *extra, "--time-limit", "2", "--certificate-out", out)
        invoke("bound", at, model, *asked)
        stated = json.loads(out.read_text(encoding="utf-8"))
        shown = invoke("verify", at, out, "--cost-model", model).stdout
        assert "valid certificate" in shown
        if value is None:
            # Within 1 s a step, each step is alone in its batch: four requests need 8 s for what
            # windows of 5 s have room for.
            assert stated["value"] < 4
        else:
            per = stated["ticks_per_second"] * (4 if goal == "mean_ttft" else 1)
            assert stated["value"] / per == pytest.approx(value, rel=0.02)
