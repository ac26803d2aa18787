"""Rules of the label-setting method taken out change no optimum; wrong ones put in are caught.

A mutant is `labels_kernel` with a line of its text changed, compiled again for some 20 s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from test_labels import DEAR, FULL, KINDS, PLAIN, drawn, instance_of, run

from optsched.costs.cost import BatchCost
from optsched.optimize.formulations import batches
from optsched.optimize.formulations.batches import labels_kernel
from optsched.optimize.solvers.base import Status
from optsched.problem.instance import Limits

pytestmark = pytest.mark.slow
TEXT = Path(labels_kernel.__file__).read_text()
# By the rule: (a text of the kernel, what stands there instead). These are rules taken out.
OUT = {
    "1: evictions without which a batch fits": [
        ("        if act == EVICT:\n            if (\n", "        if False:\n            if (\n"),
        ("evicts and not peaks_fit:", "evicts:"),
    ],
    "2: refills in place that are dearer": [
        ("if evicts and (dearer or not hybrid):", "if evicts:"),
    ],
    "3: batches without a resident": [
        ("    saved = rules[BASE] + rules[DECODE_BASE]\n", "    return False\n"),
    ],
    "4: to wait for an arrival": [
        ("quiet and now[FIRST_END] <= after and counted != LATEST", "False"),
    ],
    "5: prefills after the batch before": [
        ("== sums[LATE] and sums[EARLY] > 0:", "< 0:"),
        ("since = np.int64(start)", "since = np.int64(-1)"),
        ("since = np.int64(-1) if ended else begin", "since = np.int64(-1)"),
    ],
    "the order of equal requests": [("take[d] = take[d - 1] - 1", "take[d] = -1")],
    "labels of a state": [("    known = search.table[place]\n", "    known = -1\n")],
    "batches that are followed at once": [
        ("while quiet and _may_only_decode", "while False and _may_only_decode"),
    ],
    "the bound by what is shared": [("rules[SHARED] and late < 0", "False")],
    "the bound of a batch in the making": [("prunes = slack >= 0 and", "prunes = False and")],
}  # fmt: skip
# The same of wrong rules.
WRONG = {
    "prefills are merged into the batch before": [
        ("and sums[EARLY] > 0:", "and sums[LATE] > 0:"),
        ("scratch.there[i] = quiet and", "scratch.there[i] ="),
        ("if quiet and ended == 0 and rules[COUNTED]", "if rules[COUNTED]"),
    ],
    "prefills that could stand in the batch before are merged, whatever ended": [
        ("and sums[EARLY] > 0:", "and sums[LATE] > 0:"),
        ("if quiet and ended == 0 and rules[COUNTED]", "if quiet and rules[COUNTED]"),
    ],
    "a refill in place never pays": [("if evicts and (dearer or not hybrid):", "if False:")],
    "a resident is never left out": [
        ("    saved = rules[BASE] + rules[DECODE_BASE]\n", "    return True\n"),
    ],
    "too sharp a test of who is left out": [
        ("    need = -(-saved //", "    need = 2 - (-2 * saved //"),
    ],
    "a machine never waits": [("quiet and now[FIRST_END] <=", "now[FIRST_END] <=")],
    "S does not count": [
        ("if search.done[known] + unfinished * max(0, delay) <= done", "if delay <= 0")
    ],
    "a moment later costs nothing": [("done, max(1, unfinished), search", "done, 0, search")],
}  # fmt: skip


def cases() -> Iterator[tuple[Any, BatchCost, dict[str, Any]]]:
    """Yield instances on which some wrong rule loses, and random ones."""
    yield instance_of([0, 0.518916, 0.518916], [12, 5, 5], [8, 4, 3], 100), DEAR, {}
    refill = BatchCost("dear decodes", 1, {"token": "1", "base": "1", "decode_base": "50"})
    yield instance_of([0, 0], [1, 1], [3, 2], 100), refill, {}
    yield FULL, PLAIN, {"eviction_free": True}
    dear = {"token": "5", "base": "300", "decode_base": "40", "prefill_base": "90"}
    for accounting in ("cached", "generated"):
        for late in (0.3, 0.6, 1.051905):
            for limits in (Limits(), Limits(max_prefill_tokens=7)):
                yield (
                    instance_of(
                        [0, 0, late, late], [3, 3, 4, 1], [3, 3, 1, 1], 7, accounting, limits=limits
                    ),
                    BatchCost("dear batches", 1, dear),
                    {},
                )

    for kind in KINDS:
        for seed in range(25):
            yield drawn(np.random.default_rng([55, KINDS.index(kind), seed]), kind)


@pytest.fixture(scope="module")
def optima():
    """The instances with their optima, which other tests hold against exhaustive search."""
    found = []
    for instance, cost, extras in cases():
        answer = run(instance, cost, **extras)
        assert answer.status == Status.OPTIMAL
        found.append((instance, cost, extras, answer.bound))

    return found


def mutant(changes, monkeypatch):
    """Let `labels` use its compiled core with other lines."""
    text = TEXT
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in labels_kernel"
        text = text.replace(old, new)

    # Code kept on disk may have the number, and so the symbols, of a new function of its name.
    made = ModuleType(f"{labels_kernel.__name__}_mutant")
    monkeypatch.setitem(sys.modules, labels_kernel.__name__, made)
    exec(compile(text, "<mutant>", "exec"), made.__dict__)  # no file: nothing is kept of it
    monkeypatch.setattr(batches, "labels_kernel", made)


@pytest.mark.parametrize("name", OUT)
def test_a_rule_taken_out_changes_no_optimum(name, optima, monkeypatch):
    mutant(OUT[name], monkeypatch)
    for instance, cost, extras, best in optima:
        answer = run(instance, cost, **extras)
        assert (answer.status, answer.bound) == (Status.OPTIMAL, best), instance.to_dict()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_loses_some_optimum(name, optima, monkeypatch):
    """With a wrong rule the method ends above the optimum of at least one instance."""
    mutant(WRONG[name], monkeypatch)
    found = [run(instance, cost, **extras).objective for instance, cost, extras, _ in optima]
    lost = sum(value > best * (1 + 1e-9) for value, (*_, best) in zip(found, optima, strict=True))
    print(f"{name}: {lost} of {len(optima)} lost")
    assert lost > 0
