"""Fleets: machines that differ, and simulations that stop at a first token or a completion."""

from __future__ import annotations

import numpy as np
import pytest

import optsched
from optsched import Fleet, Problem, run
from optsched.costs.batch import COEFFICIENTS
from optsched.costs.cost import BatchCost
from optsched.costs.machine import Machine
from optsched.judge.evaluate import evaluate
from optsched.policies import make_policy, runner_of
from optsched.policies.base import Job
from optsched.policies.engine.simulate import simulate
from optsched.policies.routers import begin_on
from optsched.policies.workers import Event
from optsched.problem.errors import InputError, UsageError, ViolationError
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import from_batches
from optsched.workloads.generate import generate

MODEL = "llama2-7b-a100-infermax"
POLICIES = ("vllm", "vllm-v1", "trail", "mc-sf", "gsa")


def each_batch(seconds: float) -> BatchCost:
    """Return a cost model of which every batch takes the same time."""
    values = {**dict.fromkeys(COEFFICIENTS, 0.0), "base": 1000.0 * seconds}
    return BatchCost(name=f"{seconds} s", layers=1, coefficients=values)


def busy(n: int = 60) -> Instance:
    return generate("lognormal", seed=3, n=n, kv_capacity=4000, rate=40.0, time_unit="second")


def pair(output: int = 2) -> Instance:
    """Two requests at 0 with a prompt of 2: at its peak each holds 2 + output - 1 tokens."""
    return Instance([0, 0], [2, 2], [output] * 2, 100, time_unit="second", kv_accounting="cached")


@pytest.mark.parametrize("spec", POLICIES)
def test_equal_machines_are_as_many_workers(spec: str) -> None:
    instance, behind = busy(), f"{spec}:workers=2,router=least-requests"
    machine = Machine(cost_model=MODEL, kv_capacity=instance.kv_capacity, limits=instance.limits)
    one = run(Problem(instance, MODEL), behind).evaluation
    two = (machine, machine)
    assert run(Problem(instance, two), behind).metrics == one.metrics


def test_the_times_of_each_batch_are_those_of_its_machine() -> None:
    # One request on each machine, with two batches: a prefill and a decode of 1 s each, or of 2.5
    # s.
    machines = (
        Machine(cost_model=each_batch(1.0), kv_capacity=3),
        Machine(cost_model=each_batch(2.5), kv_capacity=3),
    )
    schedule = simulate(Problem(pair(), machines), "vllm:workers=2,router=round-robin")
    found = evaluate(Problem(pair(), machines), schedule)
    assert found.first_token.tolist() == [1.0, 2.5]
    assert found.finish.tolist() == [2.0, 5.0]
    assert found.workers == 2


def test_each_batch_keeps_to_the_limits_of_its_machine() -> None:
    """Both on worker 1: its 6 tokens are enough and 3 are not, nor is one seat; there is no
    worker 2."""
    small, large = (
        Machine(cost_model=each_batch(1.0), kv_capacity=3),
        Machine(cost_model=each_batch(1.0), kv_capacity=6, limits=Limits(max_running=1)),
    )
    both = from_batches(  # both requests on worker 1: 2 + 2 tokens, then 3 + 3
        [0, 2, 4], [0, 1, 0, 1], [2, 2, 1, 1], instance=pair(), worker=[1, 1]
    )  # fmt: skip
    roomy = Machine(cost_model=each_batch(1.0), kv_capacity=6)
    assert evaluate(Problem(pair(), (small, roomy)), both).metrics["peak_kv"] == 6  # 3 + 3
    with pytest.raises(ViolationError, match=r"4.*tokens.*kv_c"):
        evaluate(Problem(pair(), (roomy, small)), both)
    with pytest.raises(ViolationError, match="holds KV of 2 requests at its end; expected at most"):
        evaluate(Problem(pair(), (small, large)), both)
    third = from_batches([0, 1], [0], [2], instance=pair(), worker=[2])
    with pytest.raises(ViolationError, match=r"worker 2.*0 to 1"):
        evaluate(Problem(pair(), (small, roomy)), third)


@pytest.mark.parametrize("spec", [*POLICIES, "isrtf"])
def test_policies_run_on_machines_that_differ(spec: str) -> None:
    """Batches of machine 1 take its 0.05 s and hold its 2,500 tokens at most, and both machines
    work."""
    instance = busy()
    machines = (
        Machine(cost_model=MODEL, kv_capacity=3000),
        Machine(cost_model=each_batch(0.05), kv_capacity=2500, limits=Limits(max_running=8)),
    )
    schedule = simulate(Problem(instance, machines), spec)
    found = evaluate(Problem(instance, machines), schedule)
    assert schedule.worker is not None
    length = found.batch_end - found.batch_start
    assert np.allclose(length[schedule.worker == 1], 0.05)
    assert found.batch_kv[schedule.worker == 1].max() <= 2500
    assert 0 < (schedule.worker == 1).sum() < schedule.batches
    again = optsched.timeline(optsched.Problem(instance, machines), schedule)
    assert again.batch_kv.tolist() == found.batch_kv.tolist()


def test_a_router_weighs_work_by_the_machine_that_does_it() -> None:
    # Machine 0 takes 4 s for each token, machine 1 takes 1 s. Requests of 2 prompt tokens and one
    # output arrive at once: 8 s or 2 s of work each. The loads before each are (0, 0), (8, 0),
    # (8, 2), (8, 4) and (8, 6), so the first goes to 0 and all others to 1. By the first machine's
    # cost every request weighed 8, and they would have taken turns.
    machines = tuple(
        Machine(
            cost_model=BatchCost("linear", 1, {"base": "0.001", "token": str(ms)}), kv_capacity=100
        )
        for ms in (4000, 1000)
    )
    instance = Instance([0.0] * 5, [2] * 5, [1] * 5, kv_capacity=100, time_unit="second")
    schedule = simulate(
        Problem(instance, machines), "fcfs:workers=2,router=least-work,predictor=oracle"
    )
    made = optsched.timeline(optsched.Problem(instance, machines), schedule)
    assert made.batch_prefill[made.batch_worker == 0].sum() == 2
    assert made.batch_prefill[made.batch_worker == 1].sum() == 8


def test_machines_that_do_not_fit_are_refused() -> None:
    cost = each_batch(1.0)
    one, small = Machine(cost_model=cost, kv_capacity=100), Machine(cost_model=cost, kv_capacity=2)
    for given, words in (
        ((), "fleet: number of machines: found 0; expected an integer from 1"),
        (
            (Machine(kv_capacity=9),),
            "cost model: found none for an instance in seconds",
        ),
        (
            (Machine(cost_model=cost, kv_capacity=9, role="decode"),),
            "fleet: found only decode machines; expected both kinds, or mixed",
        ),
        ((one, one, one), "found 2 workers; expected 3, the machines of the problem"),
        ((one, small), "machines: machine 1: kv_capacity: request 0: found 2; expected at least 3"),
    ):
        with pytest.raises((InputError, UsageError), match=words):
            simulate(Problem(pair(), given), "vllm:workers=2")
    with pytest.raises(InputError, match=r"machine:.*'drafts'"):
        Machine(kv_capacity=9, role="drafts")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="machine: kv_capacity: found 0"):
        Machine(kv_capacity=0)


@pytest.mark.parametrize("spec", [*POLICIES, "sarathi"])
@pytest.mark.parametrize("unequal", [False, True])
def test_watched_simulations_stop_at_every_event_in_order(spec: str, unequal: bool) -> None:
    """Nothing else changes: the schedule is that of a simulation that is not watched."""
    instance = busy(25)
    machines = (
        Machine(cost_model=MODEL, kv_capacity=4000),
        Machine(cost_model=MODEL, kv_capacity=4000)
        if not unequal
        else Machine(cost_model=MODEL, kv_capacity=3000),
    )
    name = f"{spec}:workers=2,router=round-robin"
    want = run(Problem(instance, machines), name).evaluation

    problem = Problem(instance, machines)
    job = Job(instance, instance, problem.cost_model, fleet=problem.hardware)
    fleet = begin_on(runner_of(make_policy(spec)[0]), job)
    assert fleet is not None
    order = np.lexsort((np.arange(instance.n), instance.release)).tolist()
    events: list[Event] = []
    last = 0.0
    for k, (i, until) in enumerate(
        zip([*order, -1], [*instance.release[order], np.inf], strict=True)
    ):
        while (event := fleet.advance(until, watch=True)) is not None:
            assert last <= event.time <= until
            last = event.time
            events.append(event)
        if i >= 0:
            fleet.assign(k % 2, i)

    found = evaluate(Problem(instance, machines), fleet.schedule())
    assert found.finish.tolist() == want.finish.tolist()
    finishes = {e.request: e.time for e in events}
    assert [finishes[i] for i in range(instance.n)] == found.clock.finish.tolist()


@pytest.mark.parametrize("spec", ["vllm", "vllm-v1", "trail", "gba"])
def test_a_request_can_be_released_by_the_end_of_another(spec: str) -> None:
    """Batches take 1 s. Request 0 ends at 2, request 1 is released at 5 and ends at 7."""
    job = Job(pair(), pair(), each_batch(1.0))
    fleet = runner_of(make_policy(spec)[0]).begin(job, 1)
    assert fleet is not None
    fleet.assign(0, 0)
    event = fleet.advance(np.inf, watch=True)
    assert event == Event(0, 2.0)
    fleet.assign(0, 1, at=event.time + 3.0)
    assert fleet.advance(6.5, watch=True) is None
    assert fleet.advance(np.inf, watch=True) == Event(1, 7.0)
    assert fleet.advance(np.inf, watch=True) is None
    found = evaluate(Problem(pair(), job.cost), fleet.schedule())
    assert found.finish.tolist() == [2.0, 7.0]
    assert found.first_start.tolist() == [0.0, 5.0]


def test_no_worker_goes_beyond_an_event_of_another() -> None:
    """Batches of worker 0 take 1 s, of worker 1 they take 0.4 s, and each request has 3.

    Worker 1 ends at 1.2, in the second batch of worker 0. Its third begins at 2, after that.
    """
    instance = pair(3)
    machines = [Machine(each_batch(seconds), kv_capacity=9) for seconds in (1.0, 0.4)]
    job = Job(instance, instance, each_batch(1.0), fleet=Fleet(machines).on(instance))
    fleet = begin_on(runner_of(make_policy("vllm")[0]), job)
    assert fleet is not None
    fleet.assign(0, 0)
    fleet.assign(1, 1)
    event = fleet.advance(np.inf, watch=True)
    assert event is not None
    assert event.request == 1
    assert event.time == pytest.approx(1.2)
    assert fleet.clock(0) == 2.0
    assert fleet.advance(np.inf, watch=True) == Event(0, 3.0)


def test_releases_are_the_arrivals() -> None:
    instance = Instance([7.5, 4.0], [2, 2], [1, 1], 100, time_unit="second")
    found = run(Problem(instance, each_batch(1.0)), "vllm").evaluation
    assert found.release_times.tolist() == instance.release_times.tolist() == [7.5, 4.0]
    # The clock counts from the first arrival, 4 s, or round 1.
    assert found.clock.release.tolist() == instance.release.tolist() == [3.5, 0.0]
    rounds = Instance([3, 1], [2, 2], [1, 1], 100)
    judged = evaluate(rounds, optsched.from_starts([3, 1], rounds))
    assert (judged.release_times.tolist(), judged.clock.release.tolist()) == ([3, 1], [2, 0])
    assert judged.release_times.dtype == judged.clock.release.dtype == np.int64


def test_bounds_of_the_instance_do_not_cover_a_schedule_on_a_larger_machine() -> None:
    """A larger machine serves all at once, within its own KV; on the instance's machine a
    schedule is inside the model."""
    # One request holds 9 + 8 = 17 of 20 tokens, so the six of them run one after another. A machine
    # of 6 * 17 = 102 tokens runs them at once, in 8 rounds each.
    instance = Instance([0] * 6, [9] * 6, [8] * 6, kv_capacity=20)
    large = Machine(kv_capacity=102)
    at_once = optsched.Schedule("starts", starts=np.zeros(6, dtype=np.int64))
    for schedule in (simulate(Problem(instance, large), "fcfs"), at_once):
        found = evaluate(Problem(instance, large), schedule)
        assert found.metrics["tel"] == 6 * 8
        assert "peak_kv 102 of 102 tokens" in repr(found)
    on_own = evaluate(Problem(instance, Machine(kv_capacity=20)), simulate(instance, "fcfs"))
    assert on_own.outside_reason is None


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ([3], "machine 0: found int; expected an optsched.Machine"),
        (np.array([Machine(kv_capacity=30), None]), "machine 1: found NoneType"),
        (
            [Machine(kv_capacity=30), Machine(kv_capacity=20)],
            "found 2 for a schedule of starts; expected one",
        ),
    ],
)
def test_what_is_no_machine_or_too_many_is_refused(machines: object, said: str) -> None:
    instance = Instance([0, 0], [2, 2], [2, 2], kv_capacity=30)
    starts = optsched.Schedule("starts", starts=np.zeros(2, dtype=np.int64))
    with pytest.raises((InputError, UsageError), match=said):
        evaluate(Problem(instance, machines), starts)  # type: ignore[arg-type]


def test_limits_of_a_machine_are_limits() -> None:
    with pytest.raises(InputError, match="limits: found 3; expected"):
        Machine(kv_capacity=30, limits=3)  # type: ignore[arg-type]
