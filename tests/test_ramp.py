"""The ramp relaxation: never above the optimum, equal to it when refined, and certified."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from typing import Any

import numpy as np
import pytest
from brute_force import brute_force_tel
from readable_ramp import Plain

from optsched.bounds.checker import check_certificate, states as checker_states
from optsched.bounds.checker.parts import columns_of
from optsched.bounds.checker.ramp import Replays, check_ramp, compiled
from optsched.optimize.formulations import Task, get
from optsched.optimize.ramp import prove, refine, second_thread
from optsched.optimize.ramp.climb import Ladder, count_multisets
from optsched.optimize.ramp.finish import finish
from optsched.optimize.ramp.graph import Interrupted
from optsched.optimize.ramp.jobs import (
    max_completed_by,
    needed_clock,
    periods,
    ramp_leaf,
    refusal,
)
from optsched.optimize.ramp.prove import Proof, prove_all
from optsched.optimize.ramp.relaxation import Growth, Relaxation
from optsched.optimize.ramp.second_thread import Helper
from optsched.optimize.ramp.tuning import MEASURED, Tuning
from optsched.optimize.search.orders import Annealing
from optsched.optimize.solve import solve
from optsched.optimize.solvers.base import SolveOptions
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance, Limits
from optsched.workloads.generate import generate


def tiny_instance(rng: np.random.Generator, turn: int, most: int = 4) -> Instance:
    """All shapes in turn: arrivals or none, equal requests, one request, M filled exactly."""
    n = 1 if turn % 25 == 0 else int(rng.integers(2, most + 1))
    prompt, output = rng.integers(1, 6, n), rng.integers(1, 7, n)
    if turn % 5 == 0:
        prompt[:], output[:] = prompt[0], output[0]
    accounting = ("generated", "cached")[turn % 2]
    peak = int((prompt + output).max()) - (accounting == "cached")
    return Instance(
        rng.integers(0, rng.choice([1, 1, 4, 9]), n),
        prompt,
        output,
        kv_capacity=peak + int(rng.choice([0, 0, 1, 3, 6])),
        kv_accounting=accounting,
    )


def certified(instance: Instance, proofs: list[Proof], replays: Replays = compiled) -> int:
    """Return what the checker proves by the certificate of all periods."""
    leaf = ramp_leaf([(p.jobs, p.bound, p.denominator, p.clock, p.levels) for p in proofs])
    return check_ramp(columns_of(instance), leaf, replays=replays)


def replayed(instance: Instance, relaxation: Relaxation) -> int:
    """Return what the checker finds that the chain of the only period proves."""
    r = relaxation
    leaf = ramp_leaf([(r.jobs, r.bound, r.scale, r.clock, r.levels)])
    return check_ramp(columns_of(instance), leaf)


def check_against_brute_force(seed: int, count: int, most: int, tuning: Tuning = MEASURED) -> None:
    """Prove tiny instances and hold bounds, schedules and certificates against brute force."""
    rng = np.random.default_rng(seed)
    for turn in range(count):
        instance = tiny_instance(rng, turn, most)
        optimum, _ = brute_force_tel(instance)
        proofs = prove_all(instance, seed=turn, tuning=tuning)
        assert sum(p.bound for p in proofs) == optimum, instance.to_dict()
        assert sum(p.value for p in proofs) == optimum, instance.to_dict()
        assert all(p.jobs.feasible(p.starts) for p in proofs)
        assert certified(instance, proofs) == optimum


def test_refined_bound_schedule_and_certificate_equal_the_optimum_of_tiny_instances() -> None:
    check_against_brute_force(1, 400, 4)  # seed 1, 400 instances of up to 4 requests


def test_deletion_before_the_ascent_is_certified_too() -> None:
    # Every graph is large, so arcs are deleted before every ascent: a level without floors.
    tuning = Tuning(large_nodes=0, first_nodes=10)
    check_against_brute_force(3, 150, 4, tuning)  # seed 3, 150 instances
    instance = generate("jaillet-model-2", seed=2, n=7)
    (proof,) = prove_all(instance, tuning=tuning)
    assert any(level.floors is None for level in proof.levels[:-1])
    assert certified(instance, [proof]) == proof.value == proof.bound


def test_multipliers_of_a_part_of_the_graph_are_certified_and_keep_the_bound() -> None:
    # On every graph, however small, multipliers are improved on a part first, and arcs deleted
    # before.
    tuning = Tuning(divided_nodes=0, large_nodes=0, first_nodes=10)
    jobs = periods(generate("jaillet-model-1", seed=1, n=14))[0]
    relaxation = Relaxation(jobs, 900, tuning=tuning)
    relaxation.use_floors(coarse_to_fine(relaxation)[0])
    before, other = relaxation.graph_bound, relaxation.fork()
    other.tuning = MEASURED
    other.ascend()
    relaxation.ascend()
    # Both end within a hundredth of the gap of the best multipliers, whatever they begin with.
    assert before < other.graph_bound
    # So they differ by two hundredths of the gap at most, and by 1 where bounds are rounded.
    assert abs(relaxation.graph_bound - other.graph_bound) <= 0.02 * (900 - other.graph_bound) + 1
    check_against_brute_force(4, 100, 4, tuning)  # seed 4, 100 instances


def test_targets_below_the_schedule_lead_to_the_optimum_and_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Graphs of 8 nodes without a target, so that nearly every instance is proved target by target.
    targets: list[tuple[int, int]] = []
    lowered = Relaxation.target

    def target(relaxation: Relaxation, nodes: float, *growth: Growth) -> int:
        found = lowered(relaxation, nodes, *growth)
        targets.append((found, relaxation.upper))
        return found

    monkeypatch.setattr(Relaxation, "target", target)
    for first, large in ((10, 4_000_000), (3, 0)):
        tuning = Tuning(budget=8, first_nodes=first, large_nodes=large)
        check_against_brute_force(31 + first, 100, 4, tuning)
    # In these two checks of 100 instances each, targets below the schedule were used.
    assert sum(found < upper for found, upper in targets) > 30
    instance = generate("jaillet-model-2", seed=2, n=7)
    (proof,) = prove_all(instance, tuning=tuning)
    assert certified(instance, [proof]) == proof.value == proof.bound


def test_a_proved_target_is_a_bound_whatever_the_optimum() -> None:
    # The bound counts up to the target: below the optimum it is reached, above it is the optimum.
    rng = np.random.default_rng(77)
    reached = 0
    for turn in range(100):
        instance = tiny_instance(rng, turn)
        for jobs in periods(instance):
            part = instance.subset(jobs.index)
            optimum, _ = brute_force_tel(part)
            relaxation = Relaxation(jobs, max(1, optimum + int(rng.integers(-4, 3))))
            target = relaxation.upper
            for floors in coarse_to_fine(relaxation):
                if relaxation.graph is not None and not relaxation.closed:
                    relaxation.use_floors(floors)
                    relaxation.ascend(until=int(rng.integers(optimum - 3, optimum + 4)))
                    relaxation.prune()
            finish(relaxation, 10**6)
            least = int(jobs.output.sum())
            assert relaxation.bound == max(least, min(target, optimum))
            if relaxation.levels:
                assert replayed(part, relaxation) == relaxation.bound
            reached += least < target < optimum
    assert reached > 25  # targets below the optimum that took a proof


def test_a_target_is_the_largest_value_with_so_few_nodes_on_paths_below_it() -> None:
    """Against what a fork has left when it is offered each value in turn."""
    jobs = periods(generate("jaillet-model-2", seed=4, n=9))[0]
    # 540 stands for the value of a known schedule.
    relaxation = Relaxation(jobs, 540)
    relaxation.use_floors(np.maximum(relaxation.floor, relaxation.floor.max() - 2))
    relaxation.ascend()
    relaxation.prune()

    def nodes_below(value: int) -> int:
        other = relaxation.fork()
        other.offer(value)
        other.prune()
        return 0 if other.closed else int(other.graph.nodes)

    assert relaxation.bound + 5 < relaxation.upper  # several values to try
    sizes = {v: nodes_below(v) for v in range(relaxation.bound + 1, relaxation.upper + 1)}
    assert len(set(sizes.values())) > 3  # values differ in what they leave
    for nodes in {0, *sizes.values(), *(s - 1 for s in sizes.values())}:
        fitting = [v for v, size in sizes.items() if size <= nodes]
        assert relaxation.target(nodes) == max(fitting, default=relaxation.bound)


def test_what_a_fork_does_leaves_the_relaxation_as_it_was() -> None:
    """Two forks with other values climb to the end; then the relaxation gives what one that
    never had a fork gives."""
    jobs = periods(generate("jaillet-model-2", seed=4, n=8))[0]

    def climb(relaxation: Relaxation) -> tuple[int, int, list[int]]:
        relaxation.use_floors(relaxation.floor)
        relaxation.ascend()
        return relaxation.bound, relaxation.graph.nodes, relaxation.pi.tolist()

    def ready() -> Relaxation:
        # A value of 10**6 is far above any schedule of eight requests, and those offered are not.
        relaxation = Relaxation(jobs, 10**6)
        relaxation.use_floors(np.full_like(relaxation.floor, relaxation.floor.max()))
        relaxation.ascend()
        return relaxation

    relaxation = ready()
    for value in (relaxation.bound + 10, relaxation.bound + 100):
        other = relaxation.fork()
        other.offer(value)
        other.prune()
        climb(other)
        assert relaxation.upper == 10**6
    assert climb(relaxation) == climb(ready())


def test_a_schedule_above_the_target_is_found_all_the_same() -> None:
    # One request alone: every path is its schedule, of total latency o = 3.
    jobs = periods(Instance([0], [2], [3], kv_capacity=9))[0]
    relaxation = Relaxation(jobs, 8)
    target = relaxation.fork()
    target.offer(3)
    target.use_floors(target.floor)
    assert [jobs.total(starts) for starts in target.schedules] == [3]
    assert relaxation.schedules == []


@pytest.mark.slow
def test_refined_bound_equals_the_optimum_of_2000_instances_up_to_six_requests() -> None:
    check_against_brute_force(2, 2000, 6)


def test_any_clock_leaves_a_bound_below_the_optimum_and_a_certificate_that_passes() -> None:
    """Clocks are drawn from 0 to what all arrivals need; the optimum is brute force's."""
    # Shorter clocks forget arrivals: weaker bounds, but valid ones.
    rng = np.random.default_rng(8)
    weaker = 0
    for turn in range(120):
        instance = tiny_instance(rng, turn)
        for jobs in periods(instance):
            part = instance.subset(jobs.index)
            optimum, _ = brute_force_tel(part)
            horizon = int(rng.integers(0, needed_clock(jobs) + 1))
            relaxation = Relaxation(jobs, optimum + 5, horizon=horizon)
            for floors in coarse_to_fine(relaxation):
                # Coarser floors, also above the peak.
                coarser = rng.integers(0, 3, len(floors)) * (turn % 3 > 0)
                relaxation.use_floors(floors + coarser)
                if relaxation.graph is None:
                    break
                if turn // 2 % 2:  # deletion before the ascent is a level without a tracker
                    relaxation.prune()
                relaxation.ascend(evaluations=30)
                relaxation.prune()
            assert relaxation.bound <= optimum
            assert replayed(part, relaxation) == relaxation.bound
            weaker += relaxation.bound < optimum and horizon < needed_clock(jobs)
    assert weaker > 4  # clocks too short for the optimum were drawn


def test_a_first_clock_that_forgets_everything_leads_to_the_optimum_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The optimum is brute force's. A clock of 0 forgets all arrivals, and more than 30 are 0
    where some are needed."""
    clocks = []
    first = prove._first_clock

    def clock(session: refine.Session, *rest: Any) -> int:
        clocks.append((first(session, *rest), needed_clock(session.annealing.jobs)))
        return clocks[-1][0]

    monkeypatch.setattr(prove, "_first_clock", clock)
    # Clocks are shortened down to nothing: seed 5, 150 instances of 4 requests at most.
    check_against_brute_force(5, 150, 4, Tuning(whole_clock=0, clocked_nodes=0, lost=1.0))
    assert sum(short == 0 < needed for short, needed in clocks) > 30


def test_a_first_clock_is_shorter_but_says_nearly_as_much_in_coarse_graphs() -> None:
    jobs = periods(generate("jaillet-model-2", seed=3, n=40))[0]
    annealing = Annealing(jobs, np.random.default_rng(0), None)
    value, stop = annealing.value, np.zeros(1, dtype=np.int8)
    proof, tell = refine.Proof.known(jobs, annealing.starts), (lambda *_: None)
    # Without the time to look at graphs, it is as long as the room allows.
    clock, longest = (
        prove._first_clock(refine.Session(proof, annealing, end, stop, 0.0, tell), 1e8, MEASURED)
        for end in (math.inf, 0.0)
    )
    assert 0 < clock < longest <= needed_clock(jobs)
    bounds = []
    for horizon in (needed_clock(jobs), clock, clock // 2):
        relaxation = Relaxation(jobs, value, horizon=horizon)
        relaxation.use_floors(np.maximum(relaxation.floor, 9))
        relaxation.ascend()
        bounds.append(relaxation.graph_bound)
    # A quarter of a percent of the value may be lost, and half as much again by the two ascents.
    # Half of that clock would lose more.
    assert bounds[0] - bounds[1] <= 0.00375 * value < bounds[0] - bounds[2]


def coarse_to_fine(relaxation: Relaxation) -> list[Any]:
    """Return floors: the largest for all, every second value, the exact ones."""
    values = np.unique(relaxation.floor)
    chosen = [values[::-1][::step][::-1] for step in (len(values), 2, 1)]
    return [some[np.searchsorted(some, relaxation.floor)] for some in chosen]


def multisets(peak: list[int], floor: list[int], copies: list[int], capacity: int) -> int:
    """Count the multisets of live (floor, weight) items, one by one."""
    items = sorted({(f, w) for p, f in zip(peak, floor, strict=True) for w in range(f, p + 1)})

    def fits(chosen: tuple[tuple[int, int], ...]) -> bool:
        return sum(w for _, w in chosen) <= capacity and all(
            sum(g == f and v >= w for g, v in chosen)
            <= sum(n for p, g, n in zip(peak, floor, copies, strict=True) if g == f and p >= w)
            for f, w in chosen
        )

    return sum(
        fits(chosen)
        for size in range(sum(copies) + 1)
        for chosen in combinations_with_replacement(items, size)
    )


def test_counted_multisets_are_those_that_can_be_listed() -> None:
    # Peaks 2 and 3, floor 2, M = 5: {}, {2}, {3}, {2, 2}, {2, 3}; {3, 3} is too heavy.
    one = np.array([1, 1])
    assert count_multisets(np.array([2, 3]), np.array([2, 2]), one, 5) == 5
    rng = np.random.default_rng(12)
    for _ in range(60):
        kinds = int(rng.integers(1, 4))
        floor = rng.integers(1, 4, kinds)
        peak = floor + rng.integers(-1, 4, kinds)  # one below its floor leaves no trace
        copies, capacity = rng.integers(1, 3, kinds), int(rng.integers(3, 12))
        expected = multisets(peak.tolist(), floor.tolist(), copies.tolist(), capacity)
        assert count_multisets(peak, floor, copies, capacity) == expected


def test_a_ladder_falls_from_alike_floors_to_exact_ones_and_graphs_have_no_more_states() -> None:
    # Floors 2 to 6 (prompts 1 to 5, generated accounting): max(f, v) for v = 6 x (3, 2, 1.5, 1.25),
    # then 6, 5, 4, 3, 2.
    jobs = periods(generate("jaillet-model-2", seed=4, n=14))[0]
    relaxation = Relaxation(jobs, 10**6, horizon=20)
    own = relaxation.floor
    assert np.unique(own).tolist() == [2, 3, 4, 5, 6]
    ladder = Ladder(relaxation)
    assert [int(f.min()) for f in ladder.steps] == [18, 12, 9, 7, 6, 5, 4, 3, 2]
    assert (ladder.steps[6] == np.maximum(own, 4)).all()
    assert (ladder.steps[-1] == own).all()
    states = [ladder.states(k) for k in range(9)]
    assert states == sorted(states)
    assert [ladder.finest(0, x) for x in (0, states[3], states[4] - 1, 10**12)] == [0, 3, 3, 8]
    pairs = int((max_completed_by(jobs, 20) + 1).sum())
    for k in (0, 4, 6):
        relaxation.use_floors(ladder.steps[k])
        assert relaxation.graph.nodes <= (jobs.n + 1 + pairs) * states[k] + 1


def test_a_second_thread_looks_for_schedules_and_changes_no_optimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance = generate("jaillet-model-2", seed=5, n=16, kv_capacity=30)
    tuning = Tuning(orders=100)  # so that the second thread has work to do
    helpers = []
    monkeypatch.setattr(prove, "Helper", lambda *a: helpers.append(Helper(*a)) or helpers[-1])
    # Without a deadline there is one thread, and the same result each time.
    (alone,), (again,) = prove_all(instance, threads=2), prove_all(instance)
    assert alone.bound == alone.value
    assert (alone.starts == again.starts).all()
    assert not helpers
    told = []
    (both,) = prove_all(
        instance,
        threads=2,
        time_limit_s=300,
        report=lambda low, high: told.append((low, high)),
        tuning=tuning,
    )
    assert (both.bound, both.value) == (alone.value, alone.value) == told[-1]
    assert both.jobs.feasible(both.starts)
    assert len(helpers) == 1
    assert all(low <= alone.value <= high for low, high in told)


def test_what_the_second_thread_finds_last_is_kept_and_reports_only_improve() -> None:
    """Sixty requests are not proved within a second, so both threads are stopped at work. The
    last report is the answer's."""
    instance = generate("jaillet-model-2", seed=5, n=60)
    told = []
    (proof,) = prove_all(
        instance, threads=2, time_limit_s=1, report=lambda low, high: told.append((low, high))
    )
    assert told[-1] == (proof.bound, proof.value)
    assert proof.bound < proof.value == proof.jobs.total(proof.starts)
    assert proof.jobs.feasible(proof.starts)
    for before, after in pairwise(told):
        assert after != before
        assert before[0] <= after[0] <= after[1] <= before[1]


def test_an_error_in_the_second_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no schedules today")

    monkeypatch.setattr(second_thread, "look", fail)
    with pytest.raises(RuntimeError, match="no schedules today"):
        prove_all(generate("jaillet-model-2", seed=5, n=60), threads=2, time_limit_s=600)


def test_a_level_that_is_stopped_leaves_the_graph_as_it_was() -> None:
    """The flag is set before each of its reads in turn, while a level is made. The old graph is
    kept, and the level can be made again as if nothing had been."""

    class Stop:
        """A flag that another thread sets just before it is read for the k-th time."""

        def __init__(self, left: int) -> None:
            self.left = left

        def __getitem__(self, at: int) -> int:
            self.left -= 1
            return int(self.left < 0)

    jobs = periods(generate("jaillet-model-1", seed=1, n=6, kv_capacity=12))[0]

    def watched(reads: int) -> Relaxation:
        relaxation = Relaxation(jobs, 10**6)
        relaxation.use_floors(np.full_like(relaxation.floor, relaxation.floor.max()))
        relaxation.stop = Stop(reads)  # type: ignore[assignment]
        # Whether to go on is asked after each arc.
        relaxation.period.limits = replace(relaxation.period.limits, rest=1)
        return relaxation

    whole = watched(10**9)
    whole.use_floors(whole.floor)
    reads = 10**9 - whole.stop.left  # type: ignore[attr-defined]
    assert reads > 10  # a level may be stopped at many places
    for k in range(reads):
        relaxation = watched(k)
        before = relaxation.graph
        with pytest.raises(Interrupted):
            relaxation.use_floors(relaxation.floor)
        assert relaxation.graph is before
        relaxation.stop = np.zeros(1, dtype=np.int8)
        relaxation.use_floors(relaxation.floor)
        assert all((x == y).all() for x, y in zip(relaxation.graph, whole.graph, strict=True))


def test_optima_with_as_many_lengths_of_prompts_as_requests() -> None:
    """Eight prompts of 1 to 8 tokens, all at 0 or not, against CP-SAT."""
    rng = np.random.default_rng(6)
    for turn in range(4):
        arrival = np.sort(rng.integers(0, 5, 8)) * (turn % 2)
        instance = Instance(arrival, np.arange(1, 9), rng.integers(1, 7, 8), kv_capacity=24)
        exact = solve(instance, method="cpsat", time_limit_s=60, threads=1)
        assert exact.status == "optimal"
        assert sum(p.bound for p in prove_all(instance)) == exact.value


def test_more_kinds_than_masks_are_made_for_are_refused_by_number() -> None:
    many = Instance([0] * 130, [1] * 130, range(1, 131), kv_capacity=200)
    (jobs,) = periods(many)
    assert refusal(jobs) == "found 130 kinds of requests in a busy period; expected at most 128"
    with pytest.raises(ValueError, match="130 kinds"):
        Relaxation(jobs, 10**5)
    with pytest.raises(UsageError, match="130"):
        solve(many, method="ramp", time_limit_s=1)


def test_no_more_requests_complete_early_than_token_rounds_allow() -> None:
    # M = 6; each request s = 1, o = 2 holds 2 + 3 = 5 token-rounds, the one with o = 4 holds
    # 2 + 3 + 4 + 5 = 14. By round 2 there are 12 token-rounds: two of the short ones; the third
    # short one, which arrives at 2, can be done by round 4, and so can the long one by arrivals,
    # but 24 token-rounds hold the three short ones (15) only.
    instance = Instance([0, 0, 2, 0], [1] * 4, [2, 2, 2, 4], kv_capacity=6)
    jobs = periods(instance)[0]
    assert max_completed_by(jobs, 4).tolist() == [0, 0, 2, 2, 3]
    assert needed_clock(jobs) == 4


def test_every_level_and_any_multipliers_stay_below_the_optimum() -> None:
    # Pruned with the optimum's own value as known schedule, or with a worse one.
    rng = np.random.default_rng(3)
    tight = 0
    for turn in range(100):
        instance = tiny_instance(rng, turn)
        for jobs in periods(instance):
            optimum, _ = brute_force_tel(instance.subset(jobs.index))
            relaxation = Relaxation(jobs, optimum + int(rng.integers(0, 4)))
            for floors in coarse_to_fine(relaxation):
                relaxation.use_floors(floors)
                if relaxation.graph is None:
                    break
                for _ in range(3):
                    pi = rng.integers(-900, 4000, len(relaxation.copies))
                    total, backward, _ = relaxation._evaluate(pi)
                    if backward[0] < 2**30:  # there is a path
                        value = -(-total // relaxation.scale) - relaxation.latency_offset
                        # Where the optimum is known already, its paths are cut off, and what is
                        # left may be above.
                        assert value <= optimum or relaxation.upper == optimum
                relaxation.ascend(evaluations=5)
                assert relaxation.bound <= max(optimum, sum(jobs.output))
                relaxation.prune()
            tight += relaxation.bound == optimum
    assert tight > 50  # in many of 100 it is reached, too


def test_two_requests_by_hand() -> None:
    # M = 4, two requests s = 1, o = 2 at 0: they peak at 3 and hold 2 in their first round, so
    # they may not overlap (3 + 2 > 4): completions 2 and 4.
    instance = Instance([0, 0], [1, 1], [2, 2], kv_capacity=4)
    proofs = prove_all(instance)
    assert [p.bound for p in proofs] == [6]
    # Cached accounting: they hold 1, then 2. 2 + 2 <= 4, so both at once: completions 2 and 2.
    cached = Instance([0, 0], [1, 1], [2, 2], kv_capacity=4, kv_accounting="cached")
    assert [p.bound for p in prove_all(cached)] == [4]


def test_method_ramp_is_judged_and_its_certificate_passes_the_independent_checker() -> None:
    for model, n in (("jaillet-model-1", 9), ("jaillet-model-2", 9)):
        instance = generate(model, seed=5, n=n)
        result = solve(instance, method="ramp", time_limit_s=60)
        assert result.status == "optimal"
        assert result.bound == result.value == result.metrics["tel"]  # type: ignore[index]
        assert result.certificate["claim"] == "optimal"
        assert check_certificate(instance, result.certificate) == result.value


@pytest.mark.parametrize("model", ["jaillet-model-1", "jaillet-model-2"])
def test_ramp_and_cpsat_agree(model: str) -> None:
    """Against CP-SAT, which knows nothing of the relaxation."""
    for seed in range(4):
        instance = generate(model, seed=seed, n=8, kv_capacity=20)
        exact = solve(instance, method="cpsat", time_limit_s=60, threads=1)
        assert exact.status == "optimal"
        proofs = prove_all(instance, seed=seed)
        assert sum(p.bound for p in proofs) == exact.value
        assert sum(p.value for p in proofs) == exact.value


@pytest.mark.slow
@pytest.mark.parametrize("model", ["jaillet-model-1", "jaillet-model-2"])
def test_ramp_and_cpsat_agree_on_ten_requests(model: str) -> None:
    """Against CP-SAT, which knows nothing of the relaxation."""
    for seed in range(10):
        instance = generate(model, seed=seed, n=10)
        exact = solve(instance, method="cpsat", time_limit_s=120, threads=1)
        assert exact.status == "optimal"
        assert sum(p.bound for p in prove_all(instance)) == exact.value


def test_arrivals_a_billion_rounds_apart_are_separate_periods() -> None:
    far = 10**9
    instance = Instance([0, far, far, 3 * far], [3, 2, 2, 3], [7, 4, 4, 7], kv_capacity=10)
    proofs = prove_all(instance)
    assert len(proofs) == 3
    # The two in the middle peak at 6: one holds 6 at its end, the other may hold 4 then, but
    # holds 3, 4, 5, 6; so with a shift of two rounds they never exceed 6 + 4 = 10.
    assert [p.bound for p in proofs] == [7, 4 + 6, 7]
    # 7 + 10 + 7 = 24.
    assert certified(instance, proofs) == 24
    assert solve(instance, method="ramp").status == "optimal"


def test_a_clock_too_long_for_an_array_leaves_a_valid_bound() -> None:
    # One busy period, since a request of 10^8 rounds runs through all of it. There is room for
    # both, so neither waits.
    long = 10**8
    instance = Instance([0, long // 2], [1, 1], [long, 5], kv_capacity=2 * long)
    proofs = prove_all(instance, time_limit_s=5)
    assert sum(p.bound for p in proofs) == long + 5
    assert refusal(proofs[0].jobs)
    assert certified(instance, proofs) == long + 5


def test_a_time_limit_or_interruption_leaves_bound_and_schedule() -> None:
    """45 requests are not proved in 0.1 s, nor at the first report of progress."""
    instance = generate("jaillet-model-1", seed=1, n=45)
    result = solve(instance, method="ramp", time_limit_s=0.1)
    assert result.status == "feasible"
    # Latencies are o at least, so their sum is proved without any search.
    assert instance.output_tokens.sum() <= result.bound < result.value  # type: ignore[operator]
    stop = threading.Event()
    reached: list[Any] = []

    def progress(state: Any) -> None:
        reached.append(state)
        stop.set()

    # The limit of 600 s is far off: the interruption ends it.
    result = solve(instance, method="ramp", time_limit_s=600, progress=progress, stop=stop)
    assert reached
    assert result.status == "feasible"


def test_seventy_kinds_stay_separate_and_have_a_certificate() -> None:
    rng = np.random.default_rng(0)
    instance = Instance(np.zeros(70), rng.integers(1, 4, 70), np.arange(1, 71), kv_capacity=75)
    jobs = periods(instance)[0]
    annealing = Annealing(jobs, rng)
    annealing.anneal(20_000)
    relaxation = Relaxation(jobs, annealing.value)
    assert len(relaxation.copies) == 70
    # Two levels of coarse floors only, so that a gap stays.
    for floor in (30, 22):
        relaxation.use_floors(np.maximum(relaxation.floor, floor))
        relaxation.ascend(evaluations=10)
        relaxation.prune()
    assert jobs.output.sum() < relaxation.bound < annealing.value
    # Whatever is claimed, the checker returns what the levels prove.
    for claim in (relaxation.bound, relaxation.bound + 1):
        leaf = ramp_leaf([(jobs, claim, relaxation.scale, 0, relaxation.levels)])
        for replays in (compiled, Plain):
            assert check_ramp(columns_of(instance), leaf, replays=replays) == relaxation.bound


@pytest.mark.parametrize("n", [63, 64, 65, 66, 70, 130])
def test_compiled_and_plain_checkers_agree_on_each_of_many_kinds(n: int) -> None:
    # The compiled one keeps sets of kinds as the bits of 64-bit words: one, two or three of them.
    # Only requests 61, ... differ in price. Each level after the first tells some of them apart.
    # Request k peaks at k + 2, and as a floor that tells it apart; n + 2 is M.
    instance = Instance([0] * n, [1] * n, range(1, n + 1), kv_capacity=n + 2)
    rng = np.random.default_rng(n)
    free = [[n + 2] * n, [n - 1] * n]
    for k in range(61, n, 1 if n < 100 else 17):
        apart = [[n + 2] * n, [n - 1] * n]
        apart[0][k], apart[1][61:k] = k + 2, range(63, k + 2)
        levels = []
        for floors in (*free, None, *apart):
            multipliers = [60] * n
            multipliers[61:] = rng.integers(30, 300, n - 61).tolist()
            level = {"floors": floors, "counters": [], "multipliers": multipliers}
            levels.append(level)
        period = {"value": 10**6, "denominator": 1, "clock": 0, "levels": levels}
        leaf = {"relaxation": "ramp", "periods": [period]}
        found = check_ramp(columns_of(instance), leaf)
        assert found == check_ramp(columns_of(instance), leaf, replays=Plain)


def test_the_next_target_is_above_what_the_second_thread_has_proved() -> None:
    """The next target is above the last one and above what is proved, whichever is larger."""
    instance = generate("jaillet-model-1", seed=4, n=14)
    jobs = periods(instance)[0]
    annealing = Annealing(jobs, np.random.default_rng(0))
    relaxation = Relaxation(jobs, annealing.value)
    proof = refine.Proof(jobs, annealing.starts, annealing.value, 0)
    nothing: Any = len  # it is not called
    stop = np.zeros(1, dtype=np.int8)
    session = refine.Session(proof, annealing, 0.0, stop, 0.0, nothing)
    refinement = refine.Refinement(relaxation, session)
    refinement.climb.take(0, 10**6, annealing.value)
    relaxation.ascend()
    last = relaxation.bound + 1
    for proved in (relaxation.bound, last + 3):
        proof.bound = proved
        assert max(last, proved) < refinement._next_target(last, 1.0) <= annealing.value


def test_what_ends_while_tables_are_made_ends_without_an_error() -> None:
    """The flag to stop is set from the beginning: the schedule known before stays."""
    jobs = periods(generate("jaillet-model-1", seed=4, n=14))[0]
    annealing = Annealing(jobs, np.random.default_rng(0))
    relaxation = Relaxation(jobs, annealing.value)
    proof = refine.Proof.known(jobs, annealing.starts)
    stop = np.ones(1, dtype=np.int8)
    session = refine.Session(proof, annealing, math.inf, stop, 0.0, lambda *_: None)
    refinement = refine.Refinement(relaxation, session)
    refinement.climb.take(0, 10**6, annealing.value)
    relaxation.ascend()
    refinement._follow_some(relaxation, 1.0)
    assert proof.value == annealing.value


def test_bounds_of_a_stopped_run_are_certified_too() -> None:
    instance = generate("jaillet-model-1", seed=4, n=14)
    jobs = periods(instance)[0]
    annealing = Annealing(jobs, np.random.default_rng(0))
    annealing.anneal(2000)
    relaxation = Relaxation(jobs, annealing.value)
    # Without the last of three levels, whose floors are exact: as if time had run out.
    for floors in coarse_to_fine(relaxation)[:2]:
        relaxation.use_floors(floors)
        relaxation.ascend()
        relaxation.prune()
    assert 0 < relaxation.bound < annealing.value
    leaf = ramp_leaf(
        [(jobs, relaxation.bound, relaxation.scale, relaxation.clock, relaxation.levels)]
    )
    assert check_ramp(columns_of(instance), leaf) == relaxation.bound


def test_instances_with_limits_are_refused_by_the_method() -> None:
    from optsched.problem.errors import UsageError

    instance = Instance([0, 0], [1, 1], [2, 2], kv_capacity=9, limits=Limits(max_running=1))
    with pytest.raises(UsageError, match="max_running"):
        solve(instance, method="ramp")


def test_the_same_seed_gives_the_same_schedule() -> None:
    instance = generate("jaillet-model-1", seed=9, n=16)
    ramp = get("hindsight").methods["ramp"]
    answers = [
        ramp.run(Task(instance, objective=("tel",)), SolveOptions(time_limit_s=None, seed=3))
        for _ in range(2)
    ]
    assert answers[0].objective == answers[1].objective == answers[0].bound
    assert answers[0].schedule.starts.tolist() == answers[1].schedule.starts.tolist()  # type: ignore[union-attr]


def of_capacity(capacity: int) -> Instance:
    """Eight requests with prompts of thirds of M, of which two or three fit at once."""
    share = np.array([0.29, 0.43, 0.27, 0.33, 0.28, 0.41, 0.49, 0.39])
    output = np.array([12, 17, 9, 5, 2, 12, 8, 10])
    return Instance(np.zeros(8, int), (share * capacity).astype(int), output, kv_capacity=capacity)


def test_what_is_counted_and_kept_does_not_grow_with_the_capacity() -> None:
    # Totals of live weights at M = 10^8 are told apart in units of some 1500 tokens, rounded
    # down: no array has more than 2^16 of them, and no multiset that fits is left out.
    small, large = (periods(of_capacity(m))[0] for m in (1000, 10**8))
    # A megabyte is far from M = 10^8, and counts are of one size, up to what is rounded.
    counts = []
    for jobs in (small, large):
        one = np.ones_like(jobs.peak)
        counts.append(count_multisets(jobs.peak, jobs.first_kv, one, jobs.capacity))
        kinds = checker_states.Kinds(
            jobs.output, jobs.peak, jobs.first_kv, one, jobs.capacity, jobs.peak
        )
        tracker = checker_states.new_tracker(kinds, jobs.first_kv)
        columns = (tracker.heavy, tracker.items, tracker.rows, tracker.slots)
        assert sum(column.nbytes for column in columns) < 10**6
    assert 0.5 * counts[0] < counts[1] < 2 * counts[0]


def test_an_instance_is_solved_as_fast_at_any_capacity() -> None:
    """At 2,000 times the capacity both optima are proved, too. No time is asserted."""
    # The least total latency is the same where all sizes are scaled and outputs are short beside
    # them: who fits beside whom hardly changes. Both are proved, with certificates.
    for capacity in (10**5, 2 * 10**8):
        instance = of_capacity(capacity)
        proofs = prove_all(instance, seed=1)
        assert sum(p.value for p in proofs) == sum(p.bound for p in proofs)
        assert certified(instance, proofs) == sum(p.value for p in proofs)


def test_counting_ends_when_it_is_told_to() -> None:
    jobs = periods(of_capacity(10**5))[0]
    stop = np.ones(1, dtype=np.int8)
    with pytest.raises(Interrupted):
        count_multisets(jobs.peak, jobs.first_kv, np.ones_like(jobs.peak), 10**5, stop)
