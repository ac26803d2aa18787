"""Enumerated schedules: the optimum or the target, as the readable twin has it, and certified."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from brute_force import brute_force_tel
from readable_finish import Readable
from readable_ramp import Plain
from sweeps import parts
from test_certificate import corrupted
from test_ramp import certified, coarse_to_fine, replayed, tiny_instance

from optsched.bounds.certificate import make_certificate
from optsched.bounds.checker import (
    check_certificate,
    period as checker_period,
)
from optsched.bounds.checker.enumeration import larger_kinds
from optsched.bounds.checker.groups import groups, rows_of
from optsched.bounds.checker.parts import Budget, Limits, Rejected, TooLarge, columns_of
from optsched.bounds.checker.period import Period
from optsched.bounds.checker.product import (
    ARCS,
    CELLS,
    KEPT,
    LABELS,
    NODES,
    PARTS,
    STATES,
    Graph,
    Level as Product,
)
from optsched.bounds.checker.ramp import check_ramp, compiled
from optsched.bounds.checker.replay import Compiled
from optsched.bounds.checker.states import kinds_of
from optsched.optimize.ramp import second_thread
from optsched.optimize.ramp.finish import Finished, enumerate_below, finish, reach, refusal, samples
from optsched.optimize.ramp.graph import Interrupted
from optsched.optimize.ramp.jobs import Level, needed_clock, periods, ramp_leaf
from optsched.optimize.ramp.prove import prove_all
from optsched.optimize.ramp.relaxation import Relaxation
from optsched.optimize.ramp.second_thread import Helper
from optsched.optimize.ramp.tuning import Tuning
from optsched.optimize.search.orders import Annealing
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate

# Schedules are enumerated at any gap, and a graph of over three nodes has smaller ones before it.
ENUMERATING = Tuning(close_gap=1.0, first_nodes=3)
"""With coarse first graphs and a wide limit, most tiny proofs end by enumeration."""


def check_enumeration(
    seed: int, count: int, most: int, every: int, table_bytes: int = 2**30
) -> Counter[str]:
    """Enumerate with graphs, clocks and targets of all kinds; ``every`` so many use the twin."""
    size = 16 if table_bytes else 1  # the max entries of a group: without memory there is none
    rng = np.random.default_rng(seed)
    seen: Counter[str] = Counter()
    for turn in range(count):
        instance = tiny_instance(rng, turn, most)
        if turn % 4 == 1:  # tokens that do not fit into a byte
            instance = replace(
                instance,
                prompt_tokens=instance.prompt_tokens * 90,
                kv_capacity=instance.kv_capacity * 90,
            )
        for jobs in periods(instance):
            part = instance.subset(jobs.index)
            optimum, _ = brute_force_tel(part)
            horizon = int(rng.integers(0, needed_clock(jobs) + 1)) if turn % 3 == 0 else None
            target = max(1, optimum + int(rng.integers(-4, 6)))
            relaxation = Relaxation(jobs, target, horizon=horizon)
            period = relaxation.period
            period.limits = replace(period.limits, table_bytes=table_bytes)
            for floors in coarse_to_fine(relaxation)[: int(rng.integers(1, 4))]:
                if relaxation.graph is None or relaxation.closed:
                    break
                relaxation.use_floors(floors + int(rng.integers(0, 2)))
                relaxation.ascend(evaluations=int(rng.integers(0, 20)))
                if turn % 2:
                    relaxation.prune()
            if relaxation.graph is None or relaxation.closed or refusal(relaxation):
                seen["not needed or refused"] += 1
                continue
            upper = relaxation.upper  # a path may have been a better schedule
            shown = enumerate_below(relaxation, 10**6)
            assert shown is not None
            assert shown.bound == min(target, optimum), instance.to_dict()
            assert (shown.starts is None) == (upper <= optimum)
            if shown.starts is not None:
                assert jobs.feasible(shown.starts)
                assert jobs.total(shown.starts) == optimum
            if turn % every == 0:
                assert Readable(relaxation, size).finish() == (shown.bound, shown.labels)
                seen["as the twin"] += 1
            # It gives up where it expects too many labels, and with bad multipliers it expects far
            # more than there are.
            finish(relaxation, 10**12)
            assert relaxation.bound == shown.bound
            assert replayed(part, relaxation) == shown.bound
            seen["found" if upper > optimum else "proved"] += 1
            seen["short clocks"] += relaxation.clock < needed_clock(jobs)
    return seen


def test_the_optimum_or_the_target_is_proved_and_certified_for_tiny_instances() -> None:
    seen = check_enumeration(1, 100, 5, 3)
    # Each case that `check_enumeration` counts is met: the claims are not empty.
    assert min(seen["found"], seen["proved"], seen["as the twin"]) > 10
    assert seen["short clocks"] > 5


def test_the_optimum_or_the_target_is_proved_without_memory_for_tables() -> None:
    seen = check_enumeration(7, 80, 5, 2, table_bytes=0)
    assert seen["as the twin"] > 10  # of 80 / 2 instances that the twin may see


def test_groups_are_as_large_as_memory_allows() -> None:
    # Peaks 4, 7, 8, 11; two requests of the first. 3 x 2 x 2 entries, then 2 are left. Each of 100
    # rows takes a byte for an entry, and -1 is a kind in no group.
    peak, copies = np.array([4, 7, 8, 11]), np.array([2, 1, 1, 1])
    for max_bytes, of, entries in (
        (1400, [0, 0, 0, 1], 14),
        (1399, [0, 0, 1, 1], 10),  # at most 8 entries: 3 x 2, then 2 x 2
        (999, [0, 1, 1, 2], 9),  # at most 4: 3, 2 x 2, 2
        (899, [-1, 0, 1, 2], 6),  # at most 2: two equal requests are in none
        (599, [-1, -1, -1, -1], 0),
    ):
        found = groups(peak, copies, 100, max_bytes)
        assert (found.of.tolist(), int(found.first[-1])) == (of, entries)


def test_nodes_with_one_arc_that_places_nothing_share_a_row() -> None:
    # Such a node has the entries of the next one. Here some share the row of the last node, and
    # each of these leads to another of them or to it. Rows are numbered from 0 without gaps.
    relaxation = Relaxation(periods(Instance([0] * 2, [2, 3], [2, 1], kv_capacity=9))[0], 100)
    relaxation.use_floors(coarse_to_fine(relaxation)[0])
    relaxation.ascend()
    arcs, kind = relaxation.graph, relaxation.values(relaxation.pi)[1]
    row = rows_of(arcs, kind)
    last = len(row) - 1
    alike = [u for u in range(last) if row[u] == row[last]]
    assert alike
    assert all(arcs.target[arcs.first[u]] >= last - len(alike) for u in alike)
    assert sorted(set(row.tolist())) == list(range(row[last] + 1))


@pytest.mark.slow
def test_the_optimum_or_the_target_is_proved_for_5000_instances_up_to_six_requests() -> None:
    check_enumeration(2, 5000, 6, 20)


def test_proofs_end_by_enumeration_at_the_same_optimum() -> None:
    rng = np.random.default_rng(9)
    enumerated = 0
    for turn in range(80):
        instance = tiny_instance(rng, turn)
        optimum, _ = brute_force_tel(instance)
        proofs = prove_all(instance, seed=turn, tuning=ENUMERATING)
        assert sum(p.bound for p in proofs) == sum(p.value for p in proofs) == optimum
        enumerated += sum(len(p.levels) > 0 and p.levels[-1].multipliers is None for p in proofs)
    assert enumerated > 10  # in 80 instances: the claim is not empty


def ready(instance: Instance, target: int) -> Relaxation:
    """Return a relaxation with multipliers for one floor for all."""
    relaxation = Relaxation(periods(instance)[0], target)
    relaxation.use_floors(coarse_to_fine(relaxation)[0])
    relaxation.ascend()
    return relaxation


def test_a_better_schedule_becomes_the_known_one_and_its_value_the_bound() -> None:
    # The optimum is 659, so that there are schedules below 680.
    relaxation = ready(generate("jaillet-model-2", seed=2, n=8), 680)
    shown = enumerate_below(relaxation, 10**6)
    assert shown is not None
    assert shown.starts is not None
    assert shown.bound == relaxation.jobs.total(shown.starts) < relaxation.upper == 680
    # Then there is none below 659, so that it is the bound, too.
    finish(relaxation, 10**6)
    assert relaxation.bound == relaxation.upper == shown.bound
    assert relaxation.schedules[-1].tolist() == shown.starts.tolist()


def test_more_labels_than_allowed_prove_a_lower_target_or_nothing() -> None:
    instance = generate("jaillet-model-2", seed=2, n=8)
    # Here, too, the optimum is 659 and the target 680. Labels are counted by layer.
    relaxation = ready(instance, 680)
    shown = enumerate_below(relaxation, 10**6)
    assert shown is not None
    needed = sum(shown.labels)
    before = relaxation.bound
    finish(relaxation, 1)  # no label, but multipliers of the first target
    first = relaxation.bound
    assert before <= first < shown.bound
    assert replayed(instance, relaxation) == first
    finish(relaxation, needed - 1)
    assert first <= relaxation.bound <= shown.bound  # often lower targets suffice
    finish(relaxation, 100 * needed)
    assert relaxation.bound == shown.bound > before


def test_a_second_enumeration_goes_on_from_the_targets_of_the_first() -> None:
    # 302 is the optimum, so that no schedule is below it.
    relaxation = ready(generate("jaillet-model-1", seed=3, n=10), 302)
    finish(relaxation, 500)
    first = [target for target, _ in relaxation.shown]
    assert first
    assert first[-1] < relaxation.upper
    finish(relaxation, 10**6)
    targets = [target for target, _ in relaxation.shown]
    assert targets[: len(first)] == first
    assert targets == sorted(set(targets))
    assert relaxation.closed
    # The reach: 100 labels at 20 above the graph's bound, 1000 at 30, so 10,000 at 40.
    low = relaxation.graph_bound
    relaxation.shown = [(low + a, Finished(0, None, [b])) for a, b in ((20, 100), (30, 1000))]
    assert reach(relaxation, 10_000) == low + 40
    # Another graph has proved low + 50, and half of 40,000 labels reach low + 43: nothing is done.
    # Ten times the labels for 10 more: 20,000 labels reach 30 + 10 log10(20) = 43.
    relaxation.bound, relaxation.upper = low + 50, low + 100
    finish(relaxation, 40_000)
    assert len(relaxation.shown) == 2
    relaxation.shown = []
    assert reach(relaxation, 10_000) == low


def test_targets_that_better_multipliers_have_passed_since_say_nothing() -> None:
    # The graph's bound is 276 now, and the optimum 302. The next target after 276 was 276 again,
    # without an end.
    relaxation = ready(generate("jaillet-model-1", seed=3, n=10), 302)
    # As if the graph's bound had been a target, with 40 labels.
    relaxation.shown = [(relaxation.graph_bound, Finished(0, None, [40]))]
    finish(relaxation, 10**6)
    assert relaxation.closed
    targets = [target for target, _ in relaxation.shown]
    assert targets == sorted(set(targets))


def test_an_enumeration_ends_early_when_asked_or_when_too_many_labels_are_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relaxation = ready(generate("jaillet-model-2", seed=2, n=8), 680)
    assert enumerate_below(relaxation, 10**6, over=lambda: True) is None
    with monkeypatch.context() as patch:  # no graph is cut down, no multipliers are improved
        patch.setattr(Relaxation, "below", None)
        finish(relaxation, 10**6, over=lambda: True)
    shown = enumerate_below(relaxation, 10**6)
    assert shown is not None
    needed = sum(shown.labels)
    # A lower target that had as many labels in the last layer alone predicts more than allowed.
    # Eight requests are placed in eight layers.
    few = Finished(0, None, [1] * 7 + [10 * needed])
    assert enumerate_below(relaxation, needed, like=few) is None
    assert enumerate_below(relaxation, needed, like=shown) is not None


def test_a_share_of_the_labels_gives_a_feasible_schedule_or_none() -> None:
    # With room for all labels of each layer it is the optimum.
    rng = np.random.default_rng(3)
    found = 0
    for turn in range(60):
        instance = tiny_instance(rng, turn, 5)
        for jobs in periods(instance):
            optimum, _ = brute_force_tel(instance.subset(jobs.index))
            relaxation = Relaxation(jobs, optimum + 3)
            relaxation.use_floors(coarse_to_fine(relaxation)[0])
            relaxation.ascend()
            relaxation.prune()
            if relaxation.graph is None or relaxation.closed or refusal(relaxation):
                continue
            target = relaxation.upper
            for starts in samples(relaxation):  # 1, 3, ... labels in a layer
                if starts is not None:
                    assert jobs.feasible(starts)
                    assert jobs.total(starts) < target
                    found += 1
            assert (target > optimum) == (starts is not None)
            assert starts is None or jobs.total(starts) == optimum
    assert found > 20  # schedules were judged: the claim is not empty


def test_the_stop_flag_ends_the_enumeration() -> None:
    relaxation = ready(generate("jaillet-model-2", seed=2, n=8), 680)
    relaxation.stop[0] = 1
    with pytest.raises(Interrupted):
        enumerate_below(relaxation, 10**6)


def test_the_second_thread_enumerates_the_graph_that_it_is_given() -> None:
    # It works on a copy, whose bound, the annealing's value and what is told last are the optimum.
    relaxation = ready(generate("jaillet-model-2", seed=2, n=8), 680)
    shown = enumerate_below(relaxation, 10**6)
    assert shown is not None
    annealing = Annealing(relaxation.jobs, np.random.default_rng(0))
    told: list[tuple[int, int]] = []
    stop, deadline = np.zeros(1, dtype=np.int8), time.perf_counter() + 60
    with Helper(annealing, deadline, stop, lambda *found: told.append(found)) as helper:
        helper.post(relaxation)
        while not helper.halt[0]:
            time.sleep(0.01)
    assert helper.relaxation is not None
    assert helper.relaxation.bound == helper.annealing.value == shown.bound == told[-1][0]
    assert relaxation.bound < shown.bound  # it works on a copy


def test_what_the_second_thread_improves_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Multipliers are improved until the stop flag of their relaxation is set.
    relaxation = ready(generate("jaillet-model-2", seed=2, n=8), 680)
    annealing = Annealing(relaxation.jobs, np.random.default_rng(0))
    began, ended = threading.Event(), threading.Event()

    def improve(relaxation: Relaxation, most: float, over: Any) -> None:
        began.set()
        give_up = time.perf_counter() + 20
        while not relaxation.stop[0] and time.perf_counter() < give_up:
            time.sleep(0.01)
        if relaxation.stop[0]:
            ended.set()

    monkeypatch.setattr(second_thread, "finish", improve)
    stop, deadline = np.zeros(1, dtype=np.int8), time.perf_counter() + 60
    with Helper(annealing, deadline, stop, lambda *found: None) as helper:
        helper.post(relaxation)
        assert began.wait(20)  # patience, which it does not need
    assert ended.is_set()


def test_what_cannot_be_enumerated_is_refused_by_name() -> None:
    # Without a clock (horizon = 0) a late arrival is not known, and `finish` changes nothing.
    late = Relaxation(periods(Instance([0, 2], [1, 1], [3, 3], kv_capacity=9))[0], 99, horizon=0)
    assert "no clock" in refusal(late)
    late.use_floors(late.floor)
    late.ascend()
    bound = late.bound
    finish(late, 1000)
    assert late.bound == bound


def test_long_outputs_and_many_equal_requests_are_enumerated_too() -> None:
    # 300 equal requests of one round, four at a time: 4 (1 + ... + 75). Of two requests of 1100 and
    # 1101 rounds the second holds 1102 - k in the last round of the first, which holds 1101, if it
    # starts at k. With M = 2200 it has to wait 3 rounds. The other way round they wait for 5.
    equal = Instance([0] * 300, [1] * 300, [1] * 300, kv_capacity=9)
    long = Instance([0, 0], [1, 2], [1100, 1101], kv_capacity=2200)
    for instance, optimum in ((equal, 4 * 75 * 76 // 2), (long, 1100 + 3 + 1101)):
        relaxation = ready(instance, optimum + 3)
        assert not refusal(relaxation)
        finish(relaxation, 10**6)
        assert relaxation.bound == optimum
        assert replayed(instance, relaxation) == optimum


def test_a_certificate_that_enumerates_above_the_optimum_or_too_early_is_rejected() -> None:
    instance = Instance(
        [0, 3, 3, 3, 1, 1], [5, 5, 3, 1, 2, 3], [6, 2, 4, 3, 4, 4], kv_capacity=11
    )  # fmt: skip
    optimum, _ = brute_force_tel(instance)
    relaxation = ready(instance, optimum + 2)
    assert relaxation.bound < optimum
    finish(relaxation, 10**6)
    assert replayed(instance, relaxation) == relaxation.bound == optimum

    def rejected(change: Any, match: str) -> None:
        other = ready(instance, optimum + 2)
        finish(other, 10**6)
        change(other)
        with pytest.raises(Rejected, match=match):
            replayed(instance, other)

    last = Level(None, None)
    rejected(lambda r: setattr(r, "bound", r.bound + 1), "found a schedule below")
    rejected(lambda r: setattr(r, "levels", [last]), "found none; expected a list")
    rejected(lambda r: setattr(r, "levels", [last, *r.levels]), "found none; expected a list")
    rejected(lambda r: r.levels.append(r.levels[0]), "found none; expected a list")
    rejected(
        lambda r: setattr(r, "levels", [*r.levels[:-1], Level(r.jobs.first_kv, None)]),
        "found none; expected a list",
    )
    # Without a clock arrivals are not known: the schedules would not be those of the instance.
    rejected(lambda r: setattr(r, "clock", 0), "expected one to enumerate")


@pytest.mark.parametrize("memory", [Limits().table_bytes, 0])
def test_compiled_and_plain_checkers_agree_on_true_and_on_wrong_certificates(memory: int) -> None:
    # The claimed value is right, one too high or one too low; half of the chains enumerate.
    # Without memory for tables no group is made.
    limited = partial(Compiled, limits=Limits(table_bytes=memory))
    rng = np.random.default_rng(4)
    refusals = 0
    for turn in range(40):
        instance = tiny_instance(rng, turn, 5)
        proofs = prove_all(
            instance, seed=turn, tuning=Tuning(close_gap=float(turn % 2), first_nodes=3)
        )
        for change in (0, 1, -1):
            leaf = ramp_leaf(
                [(p.jobs, p.bound + change, p.denominator, p.clock, p.levels) for p in proofs]
            )
            found = []
            for replays in (limited, Plain):
                try:
                    found.append(str(check_ramp(columns_of(instance), leaf, replays=replays)))
                except Rejected as error:
                    found.append(str(error))
            assert found[0] == found[1]
            refusals += "found a schedule below" in found[0]
            if change == 0:
                assert found[0] == str(sum(p.value for p in proofs))
    assert refusals > 5  # of 40 claims that are one too high, an enumeration refutes some


def test_sixty_six_kinds_are_enumerated_one_after_another() -> None:
    # A label's kinds are bits of words of 64 bits, of which 66 kinds take two.
    # No two fit together, so that all orders cost the same, 1 + 2 + ... + 66; the graph before lets
    # all of them fit.
    n = 66
    instance = Instance([0] * n, range(100, 100 + n), [1] * n, kv_capacity=100 + n)
    optimum = n * (n + 1) // 2
    steps = [
        {"floors": [101 + n] * n, "counters": [], "multipliers": [0] * n},
        {"floors": None, "counters": [], "multipliers": None},
    ]
    period = {"value": optimum, "denominator": 1, "clock": 0, "levels": steps}
    leaf = {"relaxation": "ramp", "periods": [period]}
    assert check_ramp(columns_of(instance), leaf) == optimum
    period["value"] += 1
    with pytest.raises(Rejected, match="found a schedule below"):
        check_ramp(columns_of(instance), leaf)


def forged(n: int, output: int, capacity: int) -> tuple[Instance, dict[str, Any]]:
    """Return equal requests, and a leaf whose free multipliers delete nothing."""
    instance = Instance([0] * n, [1] * n, [output] * n, kv_capacity=capacity)
    steps = [
        {"floors": [2] * n, "counters": [], "multipliers": [0] * n},
        {"floors": None, "counters": [], "multipliers": None},
    ]
    period = {"value": 10**4, "denominator": 1, "clock": 0, "levels": steps}
    return instance, {"relaxation": "ramp", "periods": [period]}


def test_a_check_that_runs_out_of_steps_is_refused_wherever_it_stops() -> None:
    # The claims are one too high. A loop that ends early leaves labels undone: had they counted
    # rounded down, the rest of a layer would have been lost, and the claim accepted.
    rng = np.random.default_rng(4)
    stopped = ended = 0
    for turn in range(80):
        instance = tiny_instance(rng, turn, 6)
        proofs = prove_all(instance, seed=turn, tuning=ENUMERATING)
        leaf = ramp_leaf([(p.jobs, p.bound + 1, p.denominator, p.clock, p.levels) for p in proofs])
        if not all(p.levels and p.levels[-1].multipliers is None for p in proofs):
            continue  # without an enumeration, such a claim only proves less
        budget = Budget()
        with pytest.raises(Rejected, match="found a schedule below") as full:
            check_ramp(columns_of(instance), leaf, budget)
        taken = Budget().left - budget.left
        # The last steps, of which eight compiled ones count as one.
        for few in range(max(0, taken - 7), taken + 1):
            with pytest.raises(Rejected) as found:
                check_ramp(columns_of(instance), leaf, Budget(few))
            stopped += isinstance(found.value, TooLarge)
            ended += str(found.value) == str(full.value)
    # Up to eight budgets are tried for each of 80 instances. Both ways to end are met often: out of
    # steps, and with the refusal of a check that has enough of them.
    assert stopped > 100
    assert ended > 10


def test_labels_that_are_compared_count_as_steps() -> None:
    # Labels of equal requests have all placed the same. Up to 1,287 of them are in a layer here,
    # and each is compared with those before it: millions of times, though 47,000 labels are made.
    # Eight compiled steps count as one.
    instance, leaf = forged(13, 6, 40)
    # `forged` claims 10,000, which is not true: with enough steps that is what is found.
    with pytest.raises(Rejected, match="10000"):
        check_ramp(columns_of(instance), leaf, Budget(1_000_000))
    with pytest.raises(TooLarge, match="more than 1000000 steps"):
        check_ramp(columns_of(instance), leaf, Budget(1_000_000, per_step=1))
    with pytest.raises(TooLarge, match="more than 200000 steps"):
        check_ramp(columns_of(instance), leaf, Budget(200_000))


def test_ways_into_the_clock_and_labels_are_limited_apart() -> None:
    # A short stack of ways into the clock is made longer. A layer of too many labels is refused.
    instance = generate("jaillet-model-2", seed=7, n=8)
    relaxation = ready(instance, 680)
    finish(relaxation, 10**6)
    r = relaxation
    leaf = ramp_leaf([(r.jobs, r.bound, r.scale, r.clock, r.levels)])

    def checked(ways: tuple[int, int]) -> int:
        replays = partial(Compiled, limits=Limits(ways=ways))
        return check_ramp(columns_of(instance), leaf, replays=replays)

    # Room for one way at first, and for 1,000 or for one at most.
    assert checked((1, 1000)) == relaxation.bound
    with pytest.raises(TooLarge, match="more than 1 ways to join the clock"):
        checked((1, 1))
    equal, leaf = forged(13, 6, 40)
    few = partial(Compiled, limits=Limits(layer=100))
    with pytest.raises(TooLarge, match="more than 100 labels"):
        check_ramp(columns_of(equal), leaf, replays=few)


@pytest.mark.parametrize("turns", parts(25, 1000))
def test_corrupted_enumerations_never_prove_more_than_the_optimum(turns: range) -> None:
    # Chains that end by enumeration, one change each, in the leaf (sealed again, claiming more)
    # or in the file as it is. With ten changes per chain the
    # whole sweep has over 10,000 corrupted files and claims, of which none is accepted.
    rejected = chains = 0
    for turn in turns:
        rng = np.random.default_rng([5, turn])
        instance = tiny_instance(rng, turn, 5)
        proofs = prove_all(instance, seed=turn, tuning=ENUMERATING)
        leaf = ramp_leaf([(p.jobs, p.bound, p.denominator, p.clock, p.levels) for p in proofs])
        if not any(p.levels and p.levels[-1].multipliers is None for p in proofs):
            continue
        chains += 1
        optimum = sum(p.value for p in proofs)
        good = make_certificate(instance, leaf, value=optimum)
        assert check_certificate(instance, good) == optimum == brute_force_tel(instance)[0]
        for _ in range(10):
            bad = corrupted(rng, good)
            if bad != good:
                with pytest.raises(Rejected):
                    check_certificate(instance, bad)
                rejected += 1
            changed = corrupted(rng, leaf)
            for value in (None, 10**6):  # a forger claims more of each period at the same time
                listed = changed.get("periods") if value else None
                for period in listed if isinstance(listed, list) else ():
                    if isinstance(period, dict):
                        period["value"] = value
                for claimed in (optimum + 1, 10**6):
                    with pytest.raises(Rejected):
                        check_certificate(
                            instance, make_certificate(instance, changed, value=claimed)
                        )
                    rejected += 1
    # An eighth of the instances end by enumeration. Each chain has 10 x (1 + 2 x 2) = 50 changes,
    # of which a few change nothing and are not counted.
    assert chains > len(turns) / 8
    assert rejected > 40 * chains


@pytest.mark.parametrize(
    "turns", [range(60, 80), pytest.param(range(4000), marks=pytest.mark.slow)], ids=str
)
def test_deletion_leaves_one_of_the_best_schedules(turns: range) -> None:
    # Coarse graphs with any multipliers, so that schedules share nodes and labels delete others.
    # Both twins find one of the optimal schedules below optimum + 1, and none below the optimum.
    # In turn 69 the readable one finds none if a shorter output may delete a longer one.
    for turn in turns:
        rng = np.random.default_rng([9, turn])
        instance = tiny_instance(rng, turn, 6)
        for jobs in periods(instance):
            part = instance.subset(jobs.index)
            optimum, _ = brute_force_tel(part)
            relaxation = Relaxation(jobs, optimum + 50)
            pi = (relaxation.pi * rng.uniform(0, 1.5)).astype(int)[relaxation.kind_of]
            floors = jobs.first_kv + rng.integers(0, 5)
            levels = [Level(floors, pi), Level(None, None)]
            clock = int(rng.integers(relaxation.clock > 0, relaxation.clock + 1))
            for replays in (compiled, Plain):
                leaf = ramp_leaf([(jobs, optimum, relaxation.scale, clock, levels)])
                found = check_ramp(columns_of(part), leaf, replays=replays)
                assert found == optimum, instance.to_dict()
                leaf = ramp_leaf([(jobs, optimum + 1, relaxation.scale, clock, levels)])
                with pytest.raises(Rejected, match="found a schedule below"):
                    check_ramp(columns_of(part), leaf, replays=replays)


def test_what_is_placed_instead_of_a_request_is_larger_in_all_three_sizes() -> None:
    # Kind 0 has arrival 2, peak 5, output 3: arrival + output = 5.
    arrival = np.array([2, 2, 1, 3, 9, 2, 0])
    peak = np.array([5, 6, 9, 9, 9, 4, 9])
    output = np.array([3, 3, 3, 2, 4, 3, 5])
    # 1 is 1 larger in peak. 2 completes at 4 at the earliest, and 3 has an output of 2. 4 is larger
    # by 4 + 1 + 8, 5 has a peak of 4, and 6 is larger by 4 + 2 + 0.
    assert larger_kinds(arrival, peak, output)[0].tolist() == [1, 6, 4, -1, -1, -1, -1]


def graphs_met(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Return a list to which the compiled checker adds the columns of each graph that it makes."""
    graphs: list[list[list[int]]] = []
    refine_ = Period.refine

    def refined(self: Any, *args: Any) -> bool:
        found = refine_(self, *args)
        graphs.append([column.tolist() for column in self.graph])
        return found

    monkeypatch.setattr(Period, "refine", refined)
    return graphs


def test_a_level_with_more_nodes_than_arrays_hold_at_first_is_checked_up_to_the_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # M = 854 holds two of 13 requests of 300 to 427 tokens. After two placements 128 x 129 / 2 =
    # 8,256 multisets of two are met, each after 2 to 12 placements. Arrays have room for some
    # 33,000 nodes at first.
    instance = Instance([0] * 13, [299] * 13, [128] * 13, kv_capacity=854)
    level = {"floors": [300] * 13, "counters": [], "multipliers": [0] * 13}
    period = {"value": 10**6, "denominator": 1, "clock": 0, "levels": [level]}
    leaf = {"relaxation": "ramp", "periods": [period]}
    graphs = graphs_met(monkeypatch)
    # Two at a time: 13 x 128 + 11 x 128 + ... + 1 x 128 = 49 x 128 is the sum of completions.
    assert check_ramp(columns_of(instance), leaf) == 49 * 128
    into, _, label, _ = graphs[0]
    assert len(into) - 1 > 90_000  # 8,256 after each of 11 numbers of placements: 90,816
    for name, size in (("nodes", len(into) - 1), ("arcs", len(label))):
        enough, less = (partial(Compiled, limits=Limits(**{name: x})) for x in (size, size - 1))
        assert check_ramp(columns_of(instance), leaf, replays=enough) == 49 * 128
        with pytest.raises(TooLarge, match=f"a level of more than {size - 1} "):
            check_ramp(columns_of(instance), leaf, replays=less)


def test_a_capacity_beyond_the_compiled_integers_proves_no_more() -> None:
    # Thirteen requests of one round each fit together: the optimum is 13 x 1 at any capacity. A
    # multiset is kept as class x (capacity + 1) + tokens, which 32 bits do not hold here.
    floors = [2] * 12 + [5]
    levels = [
        {"floors": floors, "counters": [], "multipliers": [0] * 13},
        {"floors": None, "counters": [], "multipliers": [0] * 13},
    ]
    for capacity in (100, 2**31 - 1, 2**31, 2**31 + 20):
        instance = Instance([0] * 13, [1] * 12 + [5], [1] * 13, capacity, kv_accounting="cached")
        # Claims far more than 13.
        period = {"value": 10**6, "denominator": 1, "clock": 0, "levels": levels}
        leaf = {"relaxation": "ramp", "periods": [period]}
        with suppress(Rejected):
            assert check_ramp(columns_of(instance), leaf) <= 13


def narrowed(seed: int) -> tuple[Any, ...]:
    """Return what is left of a small graph of any arcs and labels below any cutoff."""
    rng, six = np.random.default_rng(seed), [(0, peak, 1) for peak in range(2, 8)]
    kinds = kinds_of(six, [1] * 6, 30)
    period = Period(kinds, np.zeros(1, int), Budget(), Limits())
    into, source, label = [0], [], []
    for v in range(12):
        for u in sorted(rng.choice(v, min(v, int(rng.integers(0, 6))), replace=False).tolist()):
            source.append(u)
            label.append(period._label_of(np.flatnonzero(rng.integers(1, 64) >> np.arange(6) & 1)))
        into.append(len(source))
    period.graph = Graph(
        np.array(into), np.array(source, np.int32), np.array(label, np.int32), np.full(12, -1, "i4")
    )
    pi = rng.integers(0, 9, 6)
    lowest = period.bound(pi, 1)
    is_left = lowest is not None and period.thin(pi, 1, lowest + int(rng.integers(0, 12)))
    masks = period.labels.mask[period.graph.label]
    return is_left, *(x.tolist() for x in (*period.graph[:2], masks, period.to_end))


def test_deletion_goes_on_at_the_arc_whose_label_had_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With no room for a further label at each call, what is left of graphs (`narrowed`) is the
    # same. What is kept is written over the arcs of before. So no arc may be read again.
    thin = checker_period.thin
    roomy = [narrowed(seed) for seed in range(200)]
    assert sum(graph[0] for graph in roomy) > 100  # over half of 200 graphs have something left

    def one_label_at_a_time(*args: Any) -> int:
        *others, count, _ = args
        return int(thin(*others, count, int(count[LABELS])))

    monkeypatch.setattr(checker_period, "thin", one_label_at_a_time)
    assert [narrowed(seed) for seed in range(200)] == roomy


@pytest.mark.parametrize("model", ["jaillet-model-1", "jaillet-model-2"])
def test_a_product_that_is_short_of_any_room_at_any_node_is_the_same(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `short` gives the product at each node hardly more room of one kind than is used. It stops
    # there, is called again, and the graphs are those of a product that never stops.
    product, graphs = checker_period.product, graphs_met(monkeypatch)
    rng, stops = np.random.default_rng(8), Counter()

    def short(v: int, level: Product, count: Any, room: Any) -> int:
        # More room is there than the product is told of, so it may go on where it stopped.
        while v < len(level.graph.loop):
            tried, few = v, room.copy()
            which = (NODES, ARCS, LABELS, PARTS, CELLS, STATES)[int(rng.integers(6))]
            nodes, made = level.fine.first[v], level.states.made
            used = [nodes, count[KEPT], count[LABELS], count[PARTS], 0, *made]
            few[which] = min(room[which], used[which] + int(rng.integers(0, 60)))
            v = product(v, level, count, few)
            stops[which] += v == tried
            if v == tried and rng.integers(4) == 0:
                break  # it may be short of what there is
        return v

    for seed in range(4):
        instance = generate(model, seed=seed, n=8)
        proofs = prove_all(instance, seed=seed)
        graphs.clear()
        for way in (product, short):
            monkeypatch.setattr(checker_period, "product", way)
            assert certified(instance, proofs) == sum(p.bound for p in proofs)
        half = len(graphs) // 2
        assert graphs[:half] == graphs[half:]
    # It was short of each kind of room several times.
    assert all(stops[which] > 3 for which in (NODES, ARCS, LABELS, PARTS, CELLS, STATES))


@pytest.mark.parametrize("n", [15, 16, 20, pytest.param(260, marks=pytest.mark.slow)])
def test_more_equal_requests_than_a_group_tells_apart_are_enumerated(n: int) -> None:
    # A kind with more than 15 requests is in no group.
    # 260 are more than a byte counts.
    instance, leaf = forged(n, 2, 6)
    optimum = sum(2 * (k // 2 + 1) for k in range(n))  # two at a time, two rounds each
    leaf["periods"][0]["value"] = optimum
    assert check_ramp(columns_of(instance), leaf) == optimum
    leaf["periods"][0]["value"] = optimum + 1
    with pytest.raises(Rejected, match="found a schedule below"):
        check_ramp(columns_of(instance), leaf)
