"""For which schedules a bound holds: said as data and in words, and true of every schedule."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from brute_force import brute_force_tel
from command_line import one_line_error
from exhaustive_batches import Exhaustive
from test_batch_bounds import tiny
from test_service_bound import slos_for
from typer.testing import CliRunner

from optsched import BatchCost, Fleet, Instance, Limits, Problem, bound, compare, evaluate, solve
from optsched.bounds import list_bounds, lower_bound
from optsched.bounds.certificate import verify_certificate
from optsched.cli import app
from optsched.files.read_write import write_instance, write_schedule
from optsched.optimize.formulations import Task, get
from optsched.problem.errors import OptschedError
from optsched.problem.schedule import from_batches, runs_on
from optsched.problem.scope import KINDS, ONE_WORKER, Scope

UNIT = BatchCost("rounds", 1, {"base": "1000"})
"""Every batch takes one second, which stands for a round."""

PAUSES = Instance(
    [2, 4, 6, 4, 6], [4, 2, 1, 4, 2], [4, 3, 2, 1, 4], kv_capacity=200,
    limits=Limits(max_prefill_tokens=4), hybrid_batching=False, name="pauses",
)  # fmt: skip
"""Without pauses 24 rounds are the least. Those that decode may wait while others prefill: 20."""
# A schedule of `PAUSES` of total latency 20.
PAUSED = from_batches(
    [0, 1, 2, 3, 4, 6, 10, 13, 14], [0, 0, 1, 3, 2, 4, 0, 1, 2, 4, 0, 1, 4, 4],
    [4, 1, 2, 4, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1], instance=PAUSES, evict_mode="restart",
)  # fmt: skip
TWO = Instance([0, 0], [1, 2], [3, 2], 6, name="two")
"""One after the other, or both from round 2 on: 6 rounds. On a worker each: 3 + 2 = 5."""


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_scope_is_worded_in_one_place() -> None:
    assert str(ONE_WORKER) == "any schedule on one worker"
    assert str(Scope(2, frozenset({"pauses"}))) == "any schedule without pauses, on 2 workers"
    both = Scope(without=frozenset({"split_prefills", "evictions"}))
    assert both.schedules == "any schedule without evictions or split prefills"
    assert both.to_dict() == {
        "workers": 1, "without": ["evictions", "split_prefills"], "words": str(both),
    }  # fmt: skip


def test_every_bound_and_formulation_declares_kinds_that_have_words() -> None:
    # Bounds of `optsched.bounds` hold for all that the judge accepts.
    assert {one.leaves_out for one in list_bounds().values()} == {frozenset()}
    seconds = Instance([0.0], [1], [1], kv_capacity=3, time_unit="second")
    for name, instance in (("hindsight", PAUSES), ("infermax", seconds)):
        model = get(name)
        task = Task(instance, None if instance.in_rounds else "llama2-7b-a100-infermax")
        assert model.leaves_out(task) <= set(KINDS)


def test_a_bound_of_runs_without_pauses_says_so_beside_one_for_all() -> None:
    # Claims: 24 is the least without pauses, as brute force says, and 20 with them. The bound says
    # for which schedules each number holds, and the certificate is of the general one.
    assert evaluate(PAUSES, PAUSED).metrics["tel"] == 20
    assert brute_force_tel(PAUSES)[0] == 24
    found = bound(PAUSES, time_limit_s=600)
    assert (found.bound, found.method) == (24, "cpsat")
    assert found.scope.without == {"pauses", "split_prefills"}
    assert found.general is not None
    # Of any schedule pairs prove 14 = 4 + 3 + 2 + 1 + 4, every output on its own.
    assert found.general[0] == found.certified == 14 <= 20
    assert found.certificate is not None
    assert verify_certificate(PAUSES, found.certificate) == 14
    data = found.to_dict()
    assert (data["bound"], data["general_bound"]) == (24, 14)
    assert data["scope"]["words"] == "any schedule without pauses or split prefills, on one worker"


def test_every_command_says_for_which_schedules_its_bound_holds(tmp_path) -> None:
    file, proof = tmp_path / "pauses.json", tmp_path / "proof.json"
    write_instance(PAUSES, file)
    # `PAUSES` has 24 rounds at least without pauses; 14 are proved of all schedules.
    shown = run("bound", file, "--time-limit", 600, "--certificate-out", proof).stdout
    none = "any schedule without pauses or split prefills"
    assert f"total latency of {none} >= 24 rounds (cpsat), on one worker" in shown
    assert "total latency of any schedule >= 14 rounds (pairs), on one worker" in shown
    assert "best such schedule found: 24 rounds" in shown
    assert f"{proof}: certificate of 14, for any schedule on one worker" in shown
    assert "14 rounds or more in any schedule on one worker" in run("verify", file, proof).stdout
    assert f"the bound holds for {none}, on one worker" in run("solve", file).stdout
    assert f"the bound holds for {none}, on one worker" in run("compare", file).stdout
    # vLLM's scheduler pauses and takes 20 rounds: no run without a pause is below 0.95 x 20 = 19.
    words = ("solve", file, "--below", 0.95, "--than", "vllm")
    assert "none exists without pauses or split prefills" in run(*words).stdout
    plain = tmp_path / "two.json"
    write_instance(TWO, plain)
    assert "total latency of any schedule >= 6 rounds" in run("bound", plain).stdout
    assert "the bound holds for any schedule on 2 workers" in run(
        "solve", plain, "--workers", 2
    ).stdout  # fmt: skip


def test_results_and_comparisons_carry_their_scope() -> None:
    for answer in (solve(TWO), compare(TWO, ["fcfs"])):
        assert answer.scope == ONE_WORKER
        assert answer.to_dict()["scope"] == ONE_WORKER.to_dict()
        assert "any schedule on one worker" in answer._repr_html_()
    two = solve(Problem(TWO, Fleet.of(2)))
    # On a worker each they take 3 and 2 rounds.
    assert (two.value, two.bound, two.scope.workers) == (5, 5, 2)
    assert two.to_dict()["scope"]["workers"] == 2
    seconds = Instance([0.0], [3], [2], kv_capacity=9, time_unit="second")
    found = solve(Problem(seconds, UNIT), eviction_free=True)
    # Two chunks of a prefill take no less than one, so those who split it win nothing.
    assert found.scope.without == {"evictions"}


def test_a_schedule_says_how_many_workers_it_uses(tmp_path) -> None:
    """`TWO` takes 6 rounds at best on one worker, and 3 + 2 on a worker each."""
    file, one, two = (tmp_path / name for name in ("i.json", "one.json", "two.json"))
    write_instance(TWO, file)
    write_schedule(runs_on(TWO, np.array([0, 0]), np.array([0, 1])), two)
    write_schedule(runs_on(TWO, np.array([1, 0]), np.array([0, 0])), one)
    lines = {name: run("verify", file, name).stdout for name in (one, two)}
    assert "tel 6 rounds, makespan 4 rounds\nit runs on one worker\n" in lines[one]
    assert (
        "tel 5 rounds, makespan 3 rounds\nit runs on 2 workers: bounds and optima on one"
        in (lines[two])
    )
    assert "it runs on 2 workers: bounds and optima" in run("evaluate", file, two).stdout
    for name, count in ((one, 1), (two, 2)):
        data = json.loads(run("evaluate", file, name, "--json", "-").stdout)
        assert data["workers"] == count
    words = ("simulate", file, "--policy", "fcfs:workers=2")
    assert json.loads(run(*words, "--json", "-").stdout)["workers"] == 2
    assert "it runs on 2 workers" in run(*words).stdout


def in_rounds(rng: np.random.Generator) -> Instance:
    """A small instance with limits, blocks and switches, and few states."""

    def maybe(low: int, high: int) -> int | None:
        return int(rng.integers(low, high)) if rng.random() < 0.4 else None

    while True:
        n = int(rng.integers(1, 4))
        output = rng.integers(1, 4, n)
        try:
            instance = Instance(
                rng.integers(0, 4, n), rng.integers(1, 5, n), output, int(rng.integers(4, 14)),
                kv_accounting="generated" if rng.random() < 0.5 else "cached",
                limits=Limits(maybe(1, 6), maybe(1, 6), maybe(1, 3)),
                hybrid_batching=False if rng.random() < 0.4 else None,
                chunked_prefill=[None, True, False][int(rng.integers(3))],
                kv_block_tokens=int(rng.choice([1, 1, 1, 2, 3])),
            )  # fmt: skip
        except OptschedError:
            continue
        if output.sum() <= 6:
            return instance


def optimum(instance: Instance, workers: int = 1) -> int | None:
    """The least total latency of what the judge accepts: with pauses, restarts and chunks."""
    everybody = np.arange(instance.n)
    least: dict[int, int] = {}
    for members in range(1, 2**instance.n):
        part = instance.subset(everybody[(members >> everybody) & 1 == 1])
        split = instance.chunked_prefill is not False
        try:
            (value,) = Exhaustive(part, UNIT, restart=True, split=split).best("tel")
        except (KeyError, ValueError):  # with limits some request is never served
            return None
        least[members] = round(value)
        if workers == 1:
            least = {2**instance.n - 1: least[members]} if part.n == instance.n else {}
    whole = 2**instance.n - 1
    splits = [least[m] + least[whole ^ m] for m in least if m != whole] if workers == 2 else []
    return min([least[whole], *splits])


def check_rounds(seed: int, count: int) -> int:
    """Hold bounds against the optimum of what their scope names; return how often pauses help."""
    rng = np.random.default_rng(seed)
    judged = narrower = 0
    while judged < count:
        instance = in_rounds(rng)
        best = optimum(instance)
        if best is None:
            continue
        judged += 1
        for name, one in list_bounds().items():
            if (
                "tel" in one.objectives
                and one.time_unit == "round"
                and not (one.searches or one.needs)
            ):
                value, _ = lower_bound(instance, method=name)
                assert value is not None
                assert value <= best, (name, instance.to_dict())
        runs = brute_force_tel(instance)[0]
        found = bound(instance, time_limit_s=0.2)
        assert found.general is not None
        assert found.general[0] <= best <= runs
        assert found.bound is not None
        assert found.bound <= (runs if found.scope.without else best), instance.to_dict()
        assert found.certificate is not None
        assert verify_certificate(instance, found.certificate) <= best
        try:
            exact = solve(instance, time_limit_s=5)
        except OptschedError:  # blocks, or a prompt that must be split
            continue
        least = runs if exact.scope.without else best
        assert exact.bound is not None
        assert exact.bound <= least, (exact.method, instance.to_dict())
        assert exact.status != "optimal" or exact.value == least, instance.to_dict()
        narrower += runs > best
    return narrower


def test_no_schedule_in_rounds_beats_a_bound_of_its_scope() -> None:
    """Seed 3, 12 instances; pauses help in one of them at least, or scopes would not matter."""
    assert check_rounds(3, 12) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_the_same_in_rounds_by_the_hundred(seed: int) -> None:
    assert check_rounds(seed, 500) > 10


@pytest.mark.parametrize("count", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_no_schedule_on_two_workers_beats_a_bound_for_two(count: int) -> None:
    """`optimum` tries all splits and all schedules. Where `solve` leaves kinds of schedules out,
    its bound is not held against that."""
    rng = np.random.default_rng(4)
    judged = 0
    while judged < count:
        instance = in_rounds(rng)
        best = optimum(instance, 2)
        if best is None or instance.n < 2:
            continue
        judged += 1
        value, _ = lower_bound(Problem(instance, Fleet.of(2)))
        assert value is not None
        assert value <= best, instance.to_dict()
        try:
            exact = solve(Problem(instance, Fleet.of(2)), time_limit_s=5)
        except OptschedError:
            continue
        assert exact.scope.workers == 2
        if not exact.scope.without and exact.bound is not None:
            assert exact.bound <= best, instance.to_dict()


def test_no_schedule_in_seconds_beats_a_bound_of_its_scope() -> None:
    """Against exhaustive search of the schedules that the scope names."""
    rng = np.random.default_rng(5)
    judged = 0
    while judged < 3:
        instance, cost = tiny(rng)
        if instance.n > 2 or int(instance.output_tokens.sum()) > 4:
            continue
        judged += 1
        # Schedulers may split prefills unless the instance forbids it, also where it says nothing.
        any_split = instance.chunked_prefill is not False
        (best,) = Exhaustive(instance, cost, split=any_split).best("tel")
        found = bound(Problem(instance, cost), time_limit_s=0.2)
        assert found.scope == ONE_WORKER
        assert found.bound is not None
        assert found.bound <= best * (1 + 1e-9)
        for free in (False, True):
            exact = solve(Problem(instance, cost), eviction_free=free, time_limit_s=1)
            left_out = exact.scope.without
            least = Exhaustive(
                instance, cost, eviction_free="evictions" in left_out,
                split=any_split and "split_prefills" not in left_out,
            ).best("tel")[0]  # fmt: skip
            assert exact.bound is not None
            assert exact.bound <= least * (1 + 1e-9), instance.to_dict()


def test_a_pause_may_help_within_slos_where_it_helps_no_total_latency(tmp_path) -> None:
    # M = 9, prompts of 3: both may hold 4 tokens in round 1, and 4 + 5 in round 2. Both have their
    # first token in round 1, one waits in round 2: two within a TTFT of 1. Without pauses the
    # second would hold 5 + 5 = 10 in round 2.
    two = Instance([0, 0], [3, 3], [2, 2], kv_capacity=9)
    paused = from_batches([0, 2, 3, 4], [0, 1, 0, 1], [3, 3, 1, 1], instance=two)
    assert evaluate(Problem(two, slo_ttft=1), paused).metrics["slo_attainment"] == 1
    found = solve(Problem(two, objective="slo_attainment:slo_ttft=1"))
    assert found.bound == 0.5
    assert found.scope.without == {"pauses"}
    # Of schedules with pauses all may be in time.
    assert bound(Problem(two, objective="slo_attainment:slo_ttft=1"), time_limit_s=1).bound == 1
    assert solve(two).scope == ONE_WORKER
    file = tmp_path / "two.json"
    write_instance(two, file)
    assert "found the objective" in one_line_error(
        run("bound", file, "--objective", "slo_attainment:slo_ttft=1", "--certificate-out", "c"), 2
    )


def test_no_schedule_in_rounds_serves_more_within_slos() -> None:
    """Exhaustive search takes batches of a second (`UNIT`) for rounds; the bound knows rounds."""

    from test_service_bound import most_by_search

    from optsched.bounds.service import most_within

    rng = np.random.default_rng(6)
    judged = 0
    while judged < 60:
        instance = in_rounds(rng)
        if instance.n > 2 or optimum(instance) is None:
            continue
        judged += 1
        slos = slos_for(rng, 1.0)
        served = most_by_search(
            instance, UNIT, slos, split=instance.chunked_prefill is not False
        )  # fmt: skip
        assert served <= most_within(instance, None, slos), (instance.to_dict(), slos)
