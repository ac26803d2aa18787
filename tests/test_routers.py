"""Several workers behind a router: any policy, judged by the same judge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optsched import Batch, Fleet, Instance, Limits, Problem, evaluate, generate, run
from optsched.analysis.hits import lost_hits
from optsched.policies import allows, list_policies, make_policy
from optsched.policies.engine.online import Online
from optsched.policies.engine.simulate import simulate
from optsched.policies.routers import ROUTERS
from optsched.policies.rules import Rules
from optsched.policies.runner import Job
from optsched.problem.errors import InputError, UsageError

MODEL = "llama2-7b-a100-infermax"


def busy(n: int = 60, unit: str = "second", **more) -> Instance:
    """Return requests of seven users, 8 a second or one in two rounds, with KV for 6,000 tokens."""
    options = {"rate": 8.0} if unit == "second" else {"rate": 0.5}
    made = generate("lognormal", n=n, time_unit=unit, kv_capacity=6000, **options, seed=4)
    return replace(made, id=[f"user-{i % 7}/{i}" for i in range(n)], **more)


def homes(instance: Instance, spec: str, cost: str | None = None) -> list[int]:
    """Return the worker of each request, after the judge has accepted the schedule."""
    schedule = simulate(Problem(instance, cost), spec)
    evaluate(Problem(instance, cost), schedule)
    worker = np.repeat(schedule.worker, np.diff(schedule.batch_offsets))
    found = {int(i): int(w) for i, w in zip(schedule.request, worker, strict=True)}
    return [found[i] for i in range(instance.n)]


@pytest.mark.parametrize("unit", ["second", "round"])
@pytest.mark.parametrize("spec", ["fcfs", "sarathi", "mc-sf", "alpha-beta:alpha=0.1,beta=0.3",
                                  "a-min", "trail", "least-work", "vllm-v1"])  # fmt: skip
def test_one_worker_is_the_policy_itself_to_the_last_digit(spec: str, unit: str) -> None:
    instance = busy(unit=unit)
    cost = MODEL if unit == "second" else None
    alone = simulate(Problem(instance, cost), spec).to_dict()
    joint = f"{spec}{',' if ':' in spec else ':'}workers=1"
    assert simulate(Problem(instance, cost), joint).to_dict() == alone


@pytest.mark.parametrize("unit", ["second", "round"])
@pytest.mark.parametrize(
    "spec", ["fcfs", "sarathi", "vllm", "mc-sf", "least-work", "trail", "vllm-v1"]
)
def test_pausing_at_every_arrival_changes_nothing(spec: str, unit: str) -> None:
    # The requests of all but worker 0 arrive when worker 0 has been told of all of its own, or
    # between them: it is stopped at each arrival, and decides as if it had known all along.
    instance = busy(unit=unit)
    cost = MODEL if unit == "second" else None
    place = np.array(homes(instance, f"{spec}:workers=3,router=least-requests", cost))
    schedule = simulate(Problem(instance, cost), f"{spec}:workers=3,router=least-requests")
    latency = evaluate(Problem(instance, cost), schedule).finish
    for worker in range(3):
        mine = instance.subset(place == worker)
        whole = run(Problem(mine, cost), spec).evaluation.finish
        assert latency[place == worker] == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_policy_object_is_routed_as_its_compiled_loop(router: str) -> None:
    """`Online(trail)` is asked before every batch, as an object is; `trail` runs a loop of its
    own."""

    from optsched.policies.routers import Routed

    instance = replace(busy(30), predicted=busy(30).output_tokens)
    trail, _ = make_policy("trail")
    compiled = Routed(trail, router=router)
    asked = Routed(Online(trail), router=router)
    from optsched import load_cost_model

    cost = load_cost_model(MODEL)
    job = Job(instance, instance, cost, 1, fleet=Fleet.of(3, cost).on(instance))
    assert compiled.run(job).to_dict() == asked.run(job).to_dict()


def test_in_turn_and_by_key() -> None:
    instance = busy(20)
    order = np.argsort(instance.arrival, kind="stable")
    turns = np.array(homes(instance, "fcfs:workers=3,router=round-robin", MODEL))[order]
    assert turns.tolist() == [k % 3 for k in range(20)]
    keys = homes(instance, "fcfs:workers=3,router=sticky", MODEL)
    # The seven users of `busy`, by i % 7.
    by_key = {name: {w for i, w in enumerate(keys) if i % 7 == name} for name in range(7)}
    assert all(len(workers) == 1 for workers in by_key.values())


def test_loads_count_what_is_unfinished_when_a_request_arrives() -> None:
    # Rounds; one request of 5 output tokens at 0, one of 1 at 0, then one at 1 and one at 2.
    # At 0: worker 0, then worker 1. At 1 worker 1 has finished: it gets the third, for 9 rounds.
    # At 2 both have one unfinished: the lowest number.
    instance = Instance([0, 0, 1, 2], [2, 8, 1, 1], [5, 1, 9, 1], kv_capacity=20)
    assert homes(instance, "fcfs:workers=2,router=least-requests") == [0, 1, 1, 0]
    # By prompt tokens: 2 on worker 0 and 8 on worker 1 at 0, 2 and 0 at 1, 2 and 1 at 2.
    assert homes(instance, "fcfs:workers=2,router=least-tokens") == [0, 1, 1, 1]
    # By predicted work, s o + o (o + 1) / 2: 25 and 9, then 25 and 0, then 25 and 9 + 45.
    told = replace(instance, predicted=instance.output_tokens)
    assert homes(told, "fcfs:workers=2,router=least-work") == [0, 1, 1, 0]


def test_a_shared_prefix_is_worth_its_tokens_and_a_session_stays_together() -> None:
    # At 1 worker 0 has 6 unfinished prompt tokens and worker 1 has 1, but all 6 of the third are in
    # the cache of worker 0: 6 - 6 < 1.
    shared = Instance([0, 0, 1], [6, 1, 6], [9, 9, 1], kv_capacity=99,
                      prefix_parent=[None, None, 0], prefix_tokens=[0, 0, 6])  # fmt: skip
    assert homes(shared, "fcfs:workers=2,router=affinity") == [0, 1, 0]
    assert homes(shared, "fcfs:workers=2,router=least-tokens") == [0, 1, 1]

    calls = Instance([0, 0, None, None], [1] * 4, [2] * 4, kv_capacity=9,
                     after=[None, None, 0, 1], delay=[None, None, 1, 1])  # fmt: skip
    first, second, *later = homes(calls, "fcfs:workers=2,router=sticky")
    assert later == [first, second]


def test_two_choices_of_two_workers_are_all_of_them() -> None:
    instance = busy(30)
    two = homes(instance, "fcfs:workers=2,router=power-of-two", MODEL)
    assert two == homes(instance, "fcfs:workers=2,router=least-requests", MODEL)
    many = homes(instance, "fcfs:workers=8,router=power-of-two", MODEL)
    assert set(many) == set(range(8))  # drawn at random


@pytest.mark.parametrize("name", sorted(list_policies()))
@pytest.mark.parametrize("unit", ["second", "round"])
def test_every_policy_runs_on_workers(name: str, unit: str) -> None:
    instance = busy(24, unit)
    cost = MODEL if unit == "second" else None
    spec = f"{name}:workers=3"
    if allows(name, instance) is None:
        assert set(homes(instance, spec, cost)) == {0, 1, 2}


def test_more_workers_than_requests_leave_some_idle() -> None:
    instance = busy(3, limits=Limits(max_running=2))
    assert homes(instance, "fcfs:workers=9,router=round-robin", MODEL) == [0, 1, 2]


class Whole(Rules):
    """A scheduler with a loop of its own that cannot be paused."""

    def run(self, job: Job):
        return Rules().run(job)

    def begin(self, job: Job, workers: int):
        return None


def test_a_scheduler_that_cannot_be_paused_runs_on_one_worker() -> None:
    """`Whole` has a loop of its own: its `begin` returns None, so that no router can stop it
    between batches."""

    from optsched import load_cost_model
    from optsched.policies.routers import Routed

    instance = busy(20)
    cost = load_cost_model(MODEL)
    job = Job(instance, instance, cost, fleet=Fleet.of(3, cost).on(instance))
    with pytest.raises(UsageError, match="expected one worker, or"):
        Routed(Whole(), router="round-robin").run(job)


class Greedy:
    """A policy object that remembers, so that workers must not share it."""

    clairvoyant = False

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def batch(self, view) -> Batch:
        self.seen |= set(view.waiting)
        if not self.seen >= {*view.waiting, *view.running}:
            raise AssertionError("shown a request that another worker has")
        running = dict.fromkeys(view.running, 1)
        return Batch(running or {view.waiting[0]: view.rest(view.waiting[0])})


def test_every_worker_asks_an_object_of_its_own() -> None:
    from optsched.policies.routers import Routed

    instance = Instance([0, 0, 0, 5], [1, 2, 3, 1], [2, 2, 2, 2], kv_capacity=20)
    two = Problem(instance, Fleet.of(2))
    schedule = simulate(two, Routed(Online(Greedy()), router="round-robin"))
    # Requests 0 and 2 on worker 0 one after the other, 1 and 3 on worker 1.
    # Each takes 2 rounds: 0 and 2 end at 2 and 4, 1 at 2, and 3, there at 5, at 7.
    assert evaluate(two, schedule).finish.tolist() == [2, 2, 4, 7]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fcfs:workers=0", "workers: found 0; expected an integer from 1 to 10000"),
        ("fcfs:workers=-3", "workers: found -3"),
        ("fcfs:workers=1.5", "workers: found '1.5'; expected an integer"),
        ("fcfs:workers=2,router=best", "router 'best' is unknown; known are least-requests"),
    ],
)
def test_what_cannot_be_routed_is_one_line(spec: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulate(Instance([0], [1], [1], kv_capacity=3), spec)


def test_a_router_by_predicted_work_needs_predictions_and_one_by_key_needs_ids() -> None:
    bare = Instance([0, 0], [1, 1], [1, 1], kv_capacity=3)
    with pytest.raises(InputError, match="'least-work'"):
        simulate(bare, "fcfs:workers=2,router=least-work")
    simulate(bare, "fcfs:workers=2,router=least-work,predictor=oracle")
    with pytest.raises(InputError, match=r"'sticky'.*requests\.id"):
        simulate(bare, "fcfs:workers=2,router=sticky")


def test_lost_hits_are_told_apart_by_what_lost_them() -> None:
    # Three turns of one conversation, one after another: turn 1 has the 8 tokens of turn 0 before
    # its own 8, and turn 2 has all 16 of turn 1. They land on workers 0, 1 and 0, in this order.
    # So turn 1 finds none of the 8 on worker 0. Turn 2 finds them, and 8 more are on worker 1. Told
    # are tokens found, lost to routing, and lost to eviction: a stranger on each worker, of 24 of
    # 28 tokens of KV, leaves one block of 4.
    def lost(router: str, strangers: bool) -> tuple[int, ...]:
        turns = [(0, 8, None, 0), (20, 16, 0, 8), (60, 24, 1, 16)]
        rows = [*turns[:2], *[(40, 23, None, 0)] * 2 * strangers, turns[2]]
        arrival, prompt, parent, shared = map(list, zip(*rows, strict=True))
        tree = {"prefix_parent": parent, "prefix_tokens": shared, "prefix_block_tokens": 4}
        calls = Instance(arrival, prompt, [1] * len(rows), 28, "second", **tree)
        return lost_hits(run(Problem(calls, Fleet.of(2, MODEL)), f"vllm-v1:router={router}"))

    assert lost("round-robin", False) == (8, 8 + 8, 0)
    assert lost("round-robin", True) == (4, 8 + 8, 4)
    assert lost("affinity", False) == (8 + 16, 0, 0)
