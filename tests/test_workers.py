"""Several equal workers: optima, searches and bounds, against all ways to split the requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import brute_force
import numpy as np
import pytest
from command_line import invoke as run, one_line_error
from exhaustive_batches import Exhaustive
from test_batch_bounds import tiny as tiny_batches
from test_most_in_time import by_brute_force, slos_of, text, tiny
from test_service_bound import most_by_search, slos_for

import optsched
from optsched import (
    BatchCost,
    Fleet,
    Instance,
    Problem,
    Result,
    Schedule,
    bound,
    evaluate,
    load_cost_model,
    solve,
    write_instance,
)
from optsched.bounds import lower_bound
from optsched.files.read_write import write_json
from optsched.optimize.formulations import Task, get
from optsched.optimize.search.offline import improve
from optsched.optimize.solvers.base import SolveOptions
from optsched.policies import behind, behind_routers
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, OptschedError, UsageError
from optsched.show.report import gather

MODEL = "llama2-7b-a100-infermax"


def split_in_two(instance: Instance, alone: Callable[[Instance], float], sign: int = 1) -> float:
    """Return the best sum over two workers, each of which serves its part as well as possible."""
    everybody, best = np.arange(instance.n), np.inf
    for bits in range(2 ** (instance.n - 1)):
        one = (bits >> everybody) & 1 == 1
        parts = [instance.subset(everybody[who]) for who in (one, ~one) if who.any()]
        best = min(best, sum(sign * alone(part) for part in parts))
    return sign * best


def more(slos: dict[str, float]) -> dict[str, float]:
    """Return limits that are half as long again."""
    return {name: 1.5 * limit for name, limit in slos.items()}


def check_rounds(seed: int, count: int) -> int:
    """Compare two workers in rounds with all splits by brute force; return how often two are
    quicker."""
    generator, gained = np.random.default_rng(seed), 0
    for k in range(count):
        instance, slos = tiny(generator), slos_of(generator)
        total = split_in_two(instance, lambda part: float(brute_force.brute_force(part, "tel")[0]))
        most = split_in_two(instance, partial(by_brute_force, slos=slos), -1)
        method = ("highs", "split")[k % 2]
        case = (instance.to_dict(), slos, method)
        found = solve(Problem(instance, Fleet.of(2)), method=method)
        assert (found.status.value, found.value, found.bound) == ("optimal", total, total), case
        judged = evaluate(instance, found.schedule)
        assert (judged.metrics["tel"], judged.pauses.sum()) == (total, 0)
        served = solve(Problem(instance, Fleet.of(2), text(slos)), method=method)
        assert served.status.value == "optimal", case
        assert round(served.value * instance.n) == most == round(served.bound * instance.n)
        longer = solve(Problem(instance, Fleet.of(2), text(more(slos))), method="highs")
        assert served.value <= longer.value, case
        one = solve(instance)
        assert total <= one.value
        gained += total < one.value
    return gained


def test_two_workers_in_rounds_equal_the_best_split() -> None:
    """Seed 5, four instances, of which one at least is quicker on two workers."""
    assert check_rounds(5, 4) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30, 34))
def test_two_workers_in_rounds_on_two_thousand(seed: int) -> None:
    check_rounds(seed, 500)


def small(generator: np.random.Generator) -> tuple[Instance, BatchCost]:
    """Return two or three requests with at most five output tokens, and a cost model."""
    while True:
        instance, cost = tiny_batches(generator)
        if instance.n > 1 and int(instance.output_tokens.sum()) <= 5 and instance.kv_capacity <= 6:
            return instance, cost


def least(part: Instance, cost: BatchCost, objective: str) -> float:
    """Return the least total latency, or the least sum of TTFTs, by exhaustive search."""
    value = Exhaustive(part, cost).best(objective)[0]
    return value * (part.n if objective == "mean_ttft" else 1)


def check_seconds(seed: int, count: int) -> int:
    """Compare with exhaustive search, which neither evicts nor waits where SLOs count."""
    generator, gained = np.random.default_rng(seed), 0
    for _ in range(count):
        instance, cost = small(generator)
        total = split_in_two(instance, partial(least, cost=cost, objective="tel"))
        found = solve(Problem(instance, Fleet.of(2, cost)), time_limit_s=None)
        case = (instance.to_dict(), dict(cost.coefficients))
        assert (found.method, found.status.value) == ("split", "optimal")
        assert found.value == pytest.approx(total, rel=1e-9), case
        one = solve(Problem(instance, cost), time_limit_s=None).value
        gained += total < one * (1 - 1e-9)
        if instance.chunked_prefill:  # some policy ends then
            searched, _ = improve(Problem(instance, Fleet.of(2, cost)), Budget(0.02), seed=seed)
            reached = evaluate(Problem(instance, cost), searched).metrics["tel"]
            assert reached >= total * (1 - 1e-9), case
    return gained


def test_two_workers_in_seconds_equal_the_best_split() -> None:
    """Seed 2, three instances, of which two at least are quicker on two workers than on one."""
    assert check_seconds(2, 3) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 44))
def test_two_workers_in_seconds_on_two_thousand(seed: int) -> None:
    check_seconds(seed, 500)


def check_goodput(seed: int, count: int) -> tuple[int, int]:
    """Return how often exhaustive search, and the offline search, reach the optimum.

    Limits are often met exactly, so that counts have 1e-9 of them to spare.
    """
    generator, equal, searched = np.random.default_rng(seed), 0, 0
    for _ in range(count):
        instance, cost = small(generator)
        typical = cost.layers / 1000 * sum(float(v) for v in cost.coefficients.values())
        slos = slos_for(generator, typical)
        spare = {name: limit * (1 + 1e-9) for name, limit in slos.items()}
        case = (instance.to_dict(), dict(cost.coefficients), slos)

        def within(
            schedule: Schedule, instance: Instance = instance, cost: BatchCost = cost,
            spare: dict[str, float] = spare,
        ) -> int:  # fmt: skip
            judged = evaluate(Problem(instance, cost, **spare), schedule)
            return round((judged.metrics["slo_attainment"] or 0.0) * instance.n)

        def optimum(
            limits: dict[str, float], workers: int = 2, instance: Instance = instance,
            cost: BatchCost = cost,
        ) -> Result:  # fmt: skip
            return solve(
                Problem(instance, Fleet.of(workers, cost), text(limits)),
                method="cpsat" if workers == 1 else "split",
                eviction_free=True,
                time_limit_s=None,
            )

        most = split_in_two(instance, partial(most_by_search, cost=cost, slos=slos), -1)
        found = optimum(slos)
        reached, bound = within(found.schedule), round(found.bound * instance.n)
        waits = {"slo_tpot", "slo_gap"} & set(slos) and len(set(instance.arrival.tolist())) > 1
        assert most <= reached if waits else most == reached, case
        assert reached == bound, case
        assert optimum(slos, 1).bound <= found.bound <= optimum(more(slos)).bound, case
        equal += reached == most
        if not instance.chunked_prefill:
            continue
        schedule, _ = improve(Problem(instance, Fleet.of(2, cost), text(slos)), Budget(0.05))
        if not evaluate(Problem(instance, cost), schedule).evictions.any():
            assert within(schedule) <= bound, case
            searched += within(schedule) == bound
    return equal, searched


def test_goodput_of_two_workers_in_seconds_equals_the_best_split() -> None:
    # Of three instances (seed 3): how often exhaustive search and the offline one have the optimum.
    equal, searched = check_goodput(3, 3)
    assert equal >= 2
    assert searched >= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50, 54))
def test_goodput_of_two_workers_by_the_hundred(seed: int) -> None:
    check_goodput(seed, 150)


def test_no_bound_for_workers_exceeds_what_a_schedule_reaches() -> None:
    generator = np.random.default_rng(8)
    for _ in range(6):
        instance = tiny(generator)
        best = solve(Problem(instance, Fleet.of(2))).value
        bound, _ = lower_bound(Problem(instance, Fleet.of(2)), time_limit_s=0.02)
        assert bound <= best
        instance, cost = small(generator)
        for objective in ("tel", "mean_ttft"):  # the sum of TTFTs is n times their mean
            best = split_in_two(instance, partial(least, cost=cost, objective=objective))
            bound, _ = lower_bound(Problem(instance, Fleet.of(2, cost), objective))
            assert bound * (instance.n if objective == "mean_ttft" else 1) <= best * (1 + 1e-9)


def test_more_workers_are_never_worse_and_one_is_as_before() -> None:
    generator = np.random.default_rng(9)
    for _ in range(3):
        instance, slos = tiny(generator), slos_of(generator)
        totals = [solve(Problem(instance, Fleet.of(w))).value for w in (1, 2, 3)]
        assert totals == sorted(totals, reverse=True)
        assert totals[0] == solve(instance).value
        most = [solve(Problem(instance, Fleet.of(w), text(slos))).value for w in (1, 2, 3)]
        assert most == sorted(most)


def stream(n: int, rate: float) -> Instance:
    """Return requests of up to 1,499 + 99 tokens at a rate, with KV for 60,000."""
    generator = np.random.default_rng(2)
    return Instance(
        np.cumsum(generator.exponential(1 / rate, n)), generator.integers(50, 1500, n),
        generator.integers(2, 100, n), kv_capacity=60_000, time_unit="second",
        chunked_prefill=True,
    )  # fmt: skip


@pytest.mark.parametrize("objective", ["tel", "slo_attainment:slo_ttft=0.4,slo_tpot=0.05"])
def test_the_search_beats_every_policy_behind_every_router_that_it_starts_from(
    objective: str,
) -> None:
    instance = stream(150, 40.0)
    limits = {"slo_ttft": 0.4, "slo_tpot": 0.05} if ":" in objective else {}
    # Of attainment more is better, so its sign is turned.
    metric, sign = objective.partition(":")[0], -1 if limits else 1
    starts = ("least-work", "fcfs")
    routed = []
    for spec in behind_routers(starts, 3):
        try:
            judged = optsched.run(Problem(instance, Fleet.of(3, MODEL), **limits), spec).evaluation
        except OptschedError:
            continue
        routed.append(sign * judged.metrics[metric])
    schedule, origin = improve(
        Problem(instance, Fleet.of(3, MODEL), objective), Budget(1.0), policies=starts
    )
    found = evaluate(Problem(instance, MODEL, **limits), schedule)
    assert sign * found.metrics[metric] < min(routed)
    assert (origin, found.workers) == ("search", 3)
    bound, _ = lower_bound(
        Problem(instance, Fleet.of(3, load_cost_model(MODEL)), objective), time_limit_s=0.3
    )
    assert sign * found.metrics[metric] >= sign * bound


def test_the_search_in_rounds_finds_the_best_split_of_few_requests() -> None:
    generator, equal = np.random.default_rng(12), 0
    lns = get("hindsight").methods["lns"]
    for _ in range(12):
        n = int(generator.integers(2, 7))
        instance = Instance(
            generator.integers(0, 4, n), generator.integers(1, 4, n), generator.integers(1, 5, n),
            kv_capacity=8,
        )  # fmt: skip
        best = split_in_two(instance, lambda part: float(brute_force.brute_force(part, "tel")[0]))
        task = Task(instance, Fleet.of(2), ("tel",))
        found = lns.run(task, SolveOptions(time_limit_s=0.05))
        assert evaluate(instance, found.schedule).metrics["tel"] == found.objective >= best
        equal += found.objective == best
    assert equal >= 10  # of 12: a search may miss the best


def test_the_search_in_rounds_beats_policies_behind_routers() -> None:
    generator = np.random.default_rng(3)
    n = 400
    instance = Instance(
        np.sort(generator.integers(0, 60, n)), generator.integers(1, 60, n),
        generator.integers(1, 40, n), kv_capacity=300,
    )  # fmt: skip
    routed = [
        optsched.run(Problem(instance, Fleet.of(3)), spec).metrics["tel"]
        for spec in behind_routers(("mc-sf", "fcfs", "least-work"), 3)
    ]
    found = solve(Problem(instance, Fleet.of(3)), time_limit_s=1.0)
    assert (found.method, found.evaluation.workers) == ("lns", 3)
    assert found.bound <= found.value < min(routed)


def test_the_command_solves_for_workers(tmp_path, monkeypatch) -> None:
    # M = 3 holds one request at a time: three take 1, 2 and 3 rounds, or 1, 1 and 2 on two workers.
    monkeypatch.chdir(tmp_path)
    write_instance(Instance([0] * 3, [2] * 3, [1] * 3, kv_capacity=3), "three.json")
    shown = run("solve", "three.json", "--workers", 2, "--schedule-out", "s.json", "--json", "-")
    data = json.loads(shown.stdout)
    # 2 + 1 tokens are all of a worker's KV: two requests end at 1, and the third at 2.
    assert (data["objective"], data["bound"], data["status"]) == (4, 4, "optimal")
    judged = run("evaluate", "three.json", "s.json", "--json", "-")
    assert json.loads(judged.stdout)["metrics"]["tel"] == 4
    wrong = run("solve", "three.json", "--workers", 0)
    assert "workers: found 0; expected an integer from 1" in one_line_error(wrong, 2)


@pytest.mark.parametrize(("method", "limit"), [("highs", 20.0), ("split", 20.0), ("lns", 0.5)])
def test_more_workers_than_requests_are_as_many_as_requests(method: str, limit: float) -> None:
    instance = Instance([0, 0, 1], [3, 2, 1], [2, 4, 3], kv_capacity=8)
    found = solve(Problem(instance, Fleet.of(10_000)), method=method, time_limit_s=limit)
    # Each on a worker of its own, from its arrival: its output in rounds.
    assert (found.status, found.value) == ("optimal", 2 + 4 + 3)


def test_what_is_not_for_workers_is_refused() -> None:
    instance = Instance([0, 0], [1, 1], [1, 1], kv_capacity=3)
    with pytest.raises(InputError, match="workers: found 0"):
        solve(Problem(instance, Fleet.of(0)))
    with pytest.raises(UsageError, match="found cpsat, which cannot do workers; expected highs"):
        solve(Problem(instance, Fleet.of(2)), method="cpsat")
    many = Instance([0] * 9, [1] * 9, [1] * 9, kv_capacity=3)
    with pytest.raises(UsageError, match="found split for 9 requests; expected at most 8"):
        solve(Problem(many, Fleet.of(2)), method="split")


def test_a_report_takes_no_certificate_of_one_worker_for_a_bound_on_two(tmp_path) -> None:
    # Each of two requests fills the KV in its last round: they complete at 2 and 4 on one worker,
    # 6 in all, and both at 2 on two workers, 4 in all.
    instance = Instance([0, 0], [2, 2], [2, 2], kv_capacity=4)
    proof = bound(instance, method="ramp").certificate
    assert proof["value"] == 6
    names = [tmp_path / name for name in ("one.json", "two.json", "proof.json", "instance.json")]
    write_instance(instance, names[3])
    write_json(proof, names[2])
    for workers, name in zip((1, 2), names, strict=False):
        write_json(solve(Problem(instance, Fleet.of(workers))).to_dict(), name)
    (section,) = gather.gather(names).sections
    told = {e["workers"]: (e["bound"], e["certified"], e["verdicts"]["bound"].state)
            for e in section.results}  # fmt: skip
    assert told == {1: (6, 6, "verified"), 2: (4, None, "unchecked")}


def test_a_schedule_behind_a_router_is_a_start() -> None:
    # M = 3 holds one request at a time: four take 1, 2, 3 and 4 rounds on one worker; on two
    # workers 1, 1, 2 and 2.
    instance = Instance([0] * 4, [2] * 4, [1] * 4, kv_capacity=3)
    found = solve(Problem(instance, Fleet.of(2)), warm_start=behind("fcfs", "round-robin"))
    assert (found.value, found.bound) == (6, 6)
    assert solve(instance).value == 10
