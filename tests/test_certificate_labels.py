"""Certificates of exact values in seconds: proved by the checker's own search, and nothing more."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from exhaustive_batches import Exhaustive
from sweeps import parts
from test_certificate import sealed
from test_labels import A100, KINDS, drawn, instance_of, run, spread

from optsched import Problem, solve, verify
from optsched.bounds.certificate import certified_value, certify
from optsched.bounds.checker import check_certificate
from optsched.bounds.checker.parts import Budget, Rejected, TooLarge
from optsched.bounds.checker.seconds import proved_ticks
from optsched.costs.cost import BatchCost
from optsched.problem.errors import UsageError, ViolationError
from optsched.problem.instance import Limits

GOALS = ("tel", "makespan", "mean_ttft")
TICK = 1e-12


def whole(instance):
    """Return an instance whose prefills may not be split."""
    return replace(instance, chunked_prefill=False)


def tree_and_fields(instance, cost, goal):
    """Return the tree of labels' value, and the fields that the checker reads of a certificate."""
    tree = run(instance, cost, goal=goal).tree
    made = certify(instance, cost, goal, tree)
    return tree, {**made, "tree": tree}


def refuted(instance, fields, tree):
    """Return why the checker refuses a tree, or None if it proves something."""
    try:
        proved_ticks(instance, {**fields, "tree": tree}, Budget())
    except Rejected as error:
        return str(error)

    return None


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "kept"])
@pytest.mark.parametrize("draws", parts(4, 60))
def test_the_checker_proves_the_least_value_and_no_unit_more(goal, kind, draws):
    """The first arrival and the sum are each rounded down to a tick: at most two are lost."""
    # All kinds but `kept`, which is about schedules without evictions: certificates are of all.
    for seed in draws:
        rng = np.random.default_rng([52, KINDS.index(kind), GOALS.index(goal), seed])
        instance, cost, _ = drawn(rng, kind)
        instance = whole(instance)
        what = f"{goal} {kind} {seed}: {instance.to_dict()} {dict(cost.coefficients)}"
        (best,) = Exhaustive(instance, cost, split=False).best(goal)
        tree, fields = tree_and_fields(instance, cost, goal)
        value = certified_value(instance, fields)
        assert value <= best * (1 + 1e-15), what
        # Two ticks, and a tenth for floats.
        assert value == pytest.approx(best, rel=1e-13, abs=2.1 * TICK), what
        above = {**tree, "value": tree["value"] + 1}
        assert "found a schedule" in (refuted(instance, fields, above) or "nothing"), what


@pytest.mark.parametrize(("kind", "seed"), [("limits", 13), ("apart", 16)])
def test_after_all_first_tokens_there_must_be_a_rest(kind, seed):
    # Here an evicted request may have too many tokens to be prefilled again under the limits.
    test_the_checker_proves_the_least_value_and_no_unit_more("mean_ttft", kind, [seed])


def forged(data, rng):
    """Return a certificate that claims more than it did: of all, or of the requests from one on."""
    new, tree = copy.deepcopy(data), data["tree"]
    by = int(10 ** (rng.random() * 12))
    if not tree["least"] or rng.random() < 0.5:
        new["value"] += by
        new["tree"]["value"] += by * int(rng.integers(0, 2)) * 10**3
        return sealed(new)

    k = int(rng.integers(len(tree["least"])))
    new["tree"]["least"][k] += by
    return sealed(new)


@pytest.mark.parametrize("draws", parts(1, 12))
def test_forged_certificates_are_refused(draws):
    """60 a draw, but for claims from a request on that are true: labels did not search to the end.

    Then the value is still the certificate's own, so nothing false is proved.
    """
    for seed in draws:
        instance, cost, _ = drawn(np.random.default_rng([53, seed]), KINDS[seed % 5])
        instance, rng = whole(instance), np.random.default_rng([54, seed])
        data = certify(instance, cost, "tel", run(instance, cost).tree)
        assert check_certificate(instance, data) == data["value"]
        for _ in range(60):
            new = forged(data, rng)
            try:
                check_certificate(instance, new)
            except Rejected:
                continue

            assert new["value"] == data["value"]
            assert new["tree"]["value"] == data["tree"]["value"]


BROKEN = {
    "value": [-1, 2**60, "1", 1.0, None],
    "first": [[0, 1], [9], [-1], [True], None, "12"],
    "begin": [[0, 1], [2**60], [-1], None],
    "least": [[0, 1], [2**60], [-1], [0.5], {}],
    "other": [1],
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_leaves_are_refused(name):
    # BROKEN has wrong values for each field. One field at a time has them, in a good leaf with a
    # claim from request 1 on.
    instance, cost, _ = drawn(np.random.default_rng(9), "ample")
    instance = whole(instance)
    tree, fields = tree_and_fields(instance, cost, "tel")
    assert refuted(instance, fields, tree) is None
    one = {**tree, "first": [1], "begin": [0], "least": [0]}
    assert refuted(instance, fields, one) is None
    for value in BROKEN[name]:
        assert refuted(instance, fields, {**one, name: value}), value


def test_what_the_proof_does_not_allow_for_is_refused_by_name():
    """A100's cross term is twice the square one: chunks cost no less. Without one they do."""
    # A limit of tokens a batch, too, leaves chunks that may be better; without it A100 is proved.
    instance = spread(4)
    square = BatchCost("square", 1, {"token": "1", "base": "50", "prefill_square": "0.01"})
    for cost, limits, known in (
        (square, Limits(), "found chunks that may be better"),
        (A100, Limits(max_batch_tokens=2000), "found chunks that may be better"),
        (A100, Limits(), None),
    ):
        limited = replace(instance, limits=limits)
        tree, fields = tree_and_fields(limited, cost, "tel")
        for chunked in (None, True):
            found = refuted(replace(limited, chunked_prefill=chunked), fields, tree)
            assert (known in found) if known else found is None

    half = {"sum": [{"first": 0, "last": 1, "tree": tree}]}
    assert "found 2 requests; expected all 4" in refuted(instance, fields, half)
    with pytest.raises(UsageError, match="out of range; expected 0 to 3"):
        certify(instance, A100, "tel", {**tree, "first": [9], "begin": [0], "least": [0]})


def test_a_search_beyond_the_limit_of_labels_is_said_to_be_too_large(monkeypatch):
    from optsched.bounds.checker import labels

    instance = spread(6)
    tree, fields = tree_and_fields(instance, A100, "tel")
    # Arrays for 4 labels grow as they have to; 16 labels, or 10 steps, are too few.
    monkeypatch.setattr(labels, "_ROOM", 4)
    assert refuted(instance, fields, tree) is None
    monkeypatch.setattr(labels, "MAX_LABELS", 16)
    alone = {**tree, "first": [], "begin": [], "least": []}
    with pytest.raises(TooLarge, match="found more than 16 labels; too large to check"):
        proved_ticks(instance, {**fields, "tree": alone}, Budget())
    with pytest.raises(TooLarge, match="steps; too large to check"):
        proved_ticks(instance, {**fields, "tree": tree}, Budget(10))


def test_python_certifies_an_optimum():
    """The shipped six requests, of which the optimum is known."""
    problem = Problem("tiny-seconds", A100)
    found = solve(problem, time_limit_s=60, certify=True)
    assert found.status == "optimal"
    assert found.certified == pytest.approx(found.value, abs=TICK)
    assert verify(problem, found.certificate) == found.certified
    more = sealed({**found.certificate, "value": found.certificate["value"] + 1})
    with pytest.raises(ViolationError, match="value: found"):
        verify(problem, more)

    plain = solve(problem, time_limit_s=60)
    assert plain.certificate is None
    assert plain.certificate_missing.startswith("none was asked for")


def test_costs_that_the_checker_does_not_read_have_no_tree():
    """It reads exponents of two digits."""
    fine = BatchCost("fine", 1, {"token": "1", "base": "10", "decode_kv": "1e-120"})
    answer = run(instance_of([0, 0], [3, 4], [2, 2], 20), fine)
    assert answer.tree is None
    assert answer.bound > 0


def test_rounded_arrivals_keep_all_but_a_few_ticks():
    """Of 17 digits: the search and the checker round them down to a tick, each on its own."""
    rng = np.random.default_rng(1)
    instance = instance_of(rng.random(4) * 5e-6, [5, 40, 9, 30], [3, 9, 5, 4], 60)
    answer = run(instance, A100)
    value = certified_value(instance, certify(instance, A100, "tel", answer.tree))
    # 20 ticks are a few for each of four requests.
    assert answer.objective - 20 * TICK <= value <= answer.objective
