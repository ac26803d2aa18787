"""Lengths that no set of requests can beat: against everything tried, and lists that are wrong.

Exhaustive search tells the least rounds and the least total latency of a few requests.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from brute_force import brute_force, brute_force_tel
from test_certificate import sealed
from test_pairs import drawn

import optsched
from optsched import verify
from optsched.bounds.base import BoundTask
from optsched.bounds.checker import check_certificate
from optsched.bounds.checker.lengths import walks_of
from optsched.bounds.checker.parts import Budget as Steps, Rejected, TooLarge, columns_of
from optsched.bounds.lengths import prove_by_lengths
from optsched.problem.budget import Budget
from optsched.problem.errors import ViolationError
from optsched.problem.instance import Instance
from optsched.workloads.problem import as_problem

TWO = Instance([0, 0], [3, 3], [5, 5], kv_capacity=13)  # each holds 8 at its peak


def certificate_of(instance: Instance) -> dict[str, Any]:
    """Return the certificate that the prover makes; its tree has lists of lengths, one by kind."""
    proof = prove_by_lengths(BoundTask.of(as_problem(instance)), Budget(60))
    assert proof.certificate is not None
    return dict(proof.certificate)


def with_lengths(certificate: dict[str, Any], lists: Any, **others: Any) -> dict[str, Any]:
    """Return the certificate with other lists of lengths, sealed as a forger would."""
    tree = {**certificate["tree"], "lengths": lists, **others}
    return sealed({**certificate, "tree": tree})


def test_two_requests_by_hand() -> None:
    # Both hold up to 8 of 13 tokens. When one ends with 8 the other has 5 or less, and 3 rounds to
    # go. So one ends every 3 rounds, and 3 is the largest length. The first ends after 5 rounds,
    # the second after 6 by its length.
    certificate = certificate_of(TWO)
    walks = walks_of(columns_of(TWO), 1, certificate["tree"]["floor"])
    assert walks is not None
    assert walks.kinds == [(8, 3)]  # 8 tokens at the end, forgotten at 3, 5 rounds before
    assert check_certificate(TWO, certificate) == 5 + 6
    assert walks.graph.allow(np.array([3]), 1, Steps())
    # Lengths of a list are in millionths of a round, so this is a little more than 3.
    with pytest.raises(Rejected, match="list 0"):
        check_certificate(TWO, with_lengths(certificate, [[3_000_001]]))


@pytest.mark.parametrize("draws", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_what_they_prove_never_exceeds_the_optimum(draws: int) -> None:
    """The independent check proves the value, which exhaustive search reaches or exceeds."""
    rng, reached = np.random.default_rng(53), 0
    for _ in range(draws):
        instance = drawn(rng)
        certificate, optimum = certificate_of(instance), brute_force_tel(instance)[0]
        assert check_certificate(instance, certificate) == certificate["value"] <= optimum
        reached += certificate["value"] == optimum

    assert reached > 0.1 * draws  # for over a tenth it is the optimum itself


def test_no_set_of_requests_is_served_in_fewer_rounds_than_its_lengths() -> None:
    # Every subset, all there at 0, by exhaustive search. `kind` is the place of a request's length
    # in a list (-1: it has none), and lengths are in 1 / denominator rounds.
    rng = np.random.default_rng(54)
    for _ in range(20):
        instance = drawn(rng)
        certificate = certificate_of(instance)
        walks = walks_of(columns_of(instance), 1, certificate["tree"]["floor"])
        assert walks is not None
        for size in range(1, instance.n + 1):
            for some in combinations(range(instance.n), size):
                part = Instance(
                    [0] * size,
                    instance.prompt_tokens[list(some)],
                    instance.output_tokens[list(some)],
                    kv_capacity=instance.kv_capacity,
                    kv_accounting=instance.kv_accounting,
                )
                rounds = brute_force(part, "makespan")[0]
                for lengths in certificate["tree"]["lengths"]:
                    total = sum(lengths[walks.kind[i]] for i in some if walks.kind[i] >= 0)
                    assert total <= rounds * certificate["denominator"]


def test_marks_that_lie_apart_never_prove_too_much() -> None:
    """Random lists that `allow`, the checker's test, lets pass prove no more than the optimum.

    KV is looked at in every second or third round only, the marks (`every`). Lengths are in
    quarters of a mark (`unit`). `ends` are the ends of all requests that a list proves, so their
    sum less the arrivals is a bound on total latency.
    """
    rng, allowed = np.random.default_rng(55), 0
    for _ in range(200):
        instance, every = drawn(rng), int(rng.integers(2, 4))
        walks = walks_of(columns_of(instance), every, 1)
        if walks is None or not walks.kinds:
            continue

        unit = 4
        length = rng.integers(0, 2 * unit, len(walks.kinds)).tolist()
        if not walks.graph.allow(np.array(length), unit, Steps()):
            continue

        allowed += sum(length) > 0
        ends = walks.ends(length, unit)
        assert sum(ends) - int(instance.arrival.sum()) <= brute_force_tel(instance)[0]

    assert allowed > 30  # of 200: lists with a length over 0 are met


def test_lists_longer_or_otherwise_wrong_are_refused_with_the_place() -> None:
    # TWO has requests of one kind, so a list has one length. A value of one more is not proved.
    certificate = certificate_of(TWO)
    for changed, reason in (
        (with_lengths(certificate, []), "found others; expected 1 to 64 lists"),
        (with_lengths(certificate, [[1, 2]]), "lengths: list 0: found 2 integers; expected 1"),
        (with_lengths(certificate, [[-1]]), "lengths: list 0: found an integer out of range"),
        (with_lengths(certificate, [[1]], floor=0), "found 1 and 0; expected integers >= 1"),
        (sealed({**certificate, "value": certificate["value"] + 1}), "which is proved"),
    ):
        with pytest.raises(ViolationError, match=reason):
            verify(TWO, changed)


def test_more_states_than_the_checker_makes_are_refused_as_too_large() -> None:
    # Sixty kinds, of outputs of 1 to 60, in 100 tokens; the checker makes 20,000 states.
    many = Instance([0] * 60, [1] * 60, range(1, 61), kv_capacity=100)
    certificate = {**certificate_of(TWO), "instance_sha256": many.sha256}
    with pytest.raises(TooLarge, match="more than 20000 states"):
        check_certificate(many, with_lengths(certificate, [[0] * 60], floor=1))


def test_a_library_instance_is_bounded_far_above_the_prices_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The smaller of the two sizes that the prover tries, and so a bound that comes soon.
    monkeypatch.setattr("optsched.bounds.lengths._STATES", (1_200,))
    instance = optsched.library.load("jaillet-2-n100")
    certificate = certificate_of(instance)
    # The dual of memory has 4,069, pairs of requests 4,481, and the best known is 10,005: 7,500 is
    # far above the one and not above the other.
    assert 7_500 <= verify(instance, certificate) <= 10_005
