"""Large requests end apart: what pairs of them prove, against everything tried, and wrong rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from brute_force import brute_force_tel
from test_bounds import tiny_instance
from test_certificate import sealed

from optsched import Problem, bound, verify
from optsched.bounds import lower_bound
from optsched.bounds.checker.pairs import pairs_total
from optsched.bounds.checker.parts import Budget, columns_of
from optsched.bounds.leaves import pairs_leaf
from optsched.problem.errors import UsageError, ViolationError
from optsched.problem.instance import Instance


def by_rounds(instance: Instance, threshold: int, more: int = 0) -> int:
    """What pairs prove, round by round; with ``more`` rounds between ends it is a wrong rule.

    A request of a peak p of the threshold h or more keeps others away for p + h - M rounds before
    its end, or all of its o. One machine serves these, the shortest rest first.
    """
    jobs, total = [], 0
    for a, p, o in zip(instance.arrival, instance.peak_tokens, instance.output_tokens, strict=True):
        apart = min(int(o), int(p) + threshold - instance.kv_capacity) + more
        if p < threshold:
            total += int(o)
        elif apart > 0:
            jobs.append([apart, int(a + o) - apart, int(a)])

    now = min((release for _, release, _ in jobs), default=0)
    while jobs:
        ready = [job for job in jobs if job[1] <= now]
        now += 1
        if ready:
            job = min(ready)
            job[0] -= 1
            if job[0] == 0:
                total += now - job[2]
                jobs.remove(job)

    return total


def drawn(rng: np.random.Generator) -> Instance:
    return tiny_instance(rng, str(rng.choice(["generated", "cached"])))


def test_two_requests_that_end_apart() -> None:
    # M = 10, and two requests with s = 3, o = 5, which hold 8 tokens in their last round. With
    # h = 8 their ends are min(5, 8 + 8 - 10) = 5 rounds apart: one after the other, 5 + 10.
    instance = Instance([0, 0], [3, 3], [5, 5], kv_capacity=10)
    assert (
        lower_bound(instance, method="pairs")
        == (15, "pairs")
        == (brute_force_tel(instance)[0], "pairs")
    )
    # With M = 13 they are 3 rounds apart: the second holds 5 when the first holds 8. So 5 + 8,
    # where the dual of memory alone has less.
    instance = Instance([0, 0], [3, 3], [5, 5], kv_capacity=13)
    assert (
        lower_bound(instance, method="pairs")
        == (13, "pairs")
        == (brute_force_tel(instance)[0], "pairs")
    )


@pytest.mark.parametrize("draws", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_threshold_exceeds_the_optimum_and_many_reach_it(draws: int) -> None:
    # Each threshold above M / 2, by the package's rule and by rounds, against exhaustive search.
    rng, reached = np.random.default_rng(51), 0
    for _ in range(draws):
        instance = drawn(rng)
        optimum, half = brute_force_tel(instance)[0], instance.kv_capacity // 2
        columns, thresholds = columns_of(instance), range(half + 1, instance.kv_capacity + 2)
        found = [pairs_total(columns, pairs_leaf(h), Budget()) for h in thresholds]
        assert found == [by_rounds(instance, h) for h in thresholds]
        best = lower_bound(instance, method="pairs")[0]
        assert best == max(found) <= optimum
        reached += best == optimum

    assert reached > 0.3 * draws  # "many": three of ten


def test_a_round_more_between_ends_is_wrong_also_from_half_the_memory_on() -> None:
    # With 2h = M two requests of h tokens can end together: d_j = p_j + h - M = 0, so such a
    # threshold proves nothing of them, and a round apart is wrong.
    rng, later, half = np.random.default_rng(52), 0, 0
    for _ in range(300):
        instance = drawn(rng)
        optimum, middle = brute_force_tel(instance)[0], -(-instance.kv_capacity // 2)
        later += by_rounds(instance, middle + 1, 1) > optimum
        half += 2 * middle == instance.kv_capacity and by_rounds(instance, middle, 1) > optimum

    assert min(later, half) > 10  # of 300: each wrong rule is found out


def certificate_of(instance: Instance) -> dict[str, Any]:
    """Return the certificate by pairs, without any search."""
    return dict(bound(instance, method="pairs", time_limit_s=0).certificate)


def test_its_certificate_is_checked_and_another_threshold_or_value_is_refused() -> None:
    instance = Instance([0, 0, 1], [3, 3, 1], [5, 5, 2], kv_capacity=14)
    # Both large ones hold 8 at their ends, which are 8 + 8 - 14 = 2 rounds apart: 5 + 7. The small
    # one takes 2 rounds: 14 in all.
    certificate = certificate_of(instance)
    assert verify(instance, certificate) == 14
    half = {"relaxation": "pairs", "threshold": 7}
    for change, reason in (
        ({"value": certificate["value"] + 1}, "expected 14, which is proved"),
        ({"tree": half}, "threshold: found 7; expected more than half of 14"),
        ({"tree": {**half, "price": 1}}, "found other fields; expected relaxation and threshold"),
    ):
        with pytest.raises(ViolationError, match=reason):
            verify(instance, sealed({**certificate, **change}))


def test_weights_and_shared_prefixes_are_refused_by_name() -> None:
    weighted = Instance([0], [3], [5], kv_capacity=10, weight=[2])
    with pytest.raises(UsageError, match="weighted_latency"):
        lower_bound(Problem(weighted, objective="weighted_latency"), method="pairs")

    shared = Instance(
        [0, 0],
        [3, 3],
        [5, 5],
        kv_capacity=10,
        prefix_parent=[-1, 0],
        prefix_tokens=[0, 2],
        prefix_block_tokens=1,
    )
    with pytest.raises(UsageError, match=r"pairs.* not proved for prefix"):
        lower_bound(shared, method="pairs")
