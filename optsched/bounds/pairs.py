"""A bound in rounds from pairs of requests that are too large to end close to each other.

`optsched.bounds.checker.pairs` has the proof, and computes what a threshold proves on its own.
"""

import numpy as np

from optsched.bounds.base import IN_ROUNDS, Bound, BoundTask, Proof
from optsched.bounds.certificate import make_certificate
from optsched.bounds.checker.pairs import pairs_total
from optsched.bounds.checker.parts import Unlimited, columns_of
from optsched.bounds.leaves import pairs_leaf
from optsched.problem.budget import Budget

# Thresholds that are tried take at most so many completions together, and one always is.
_WORK = 200_000


def prove_by_pairs(task: BoundTask, budget: Budget) -> Proof:
    """Return the largest value of some thresholds (`optsched.bounds.checker.pairs`)."""
    instance, columns = task.instance, columns_of(task.instance)
    # Only at peaks does another request become large, and only more than half of the KV will do.
    half = instance.kv_capacity // 2
    peaks = np.unique(np.maximum(instance.peak_tokens, half + 1))
    # Of so many peaks one is tried.
    every = -(-len(peaks) // max(1, _WORK // instance.n))
    value, threshold = max(
        (pairs_total(columns, pairs_leaf(h), Unlimited()), h) for h in peaks[::every].tolist()
    )
    return Proof(value, make_certificate(instance, pairs_leaf(threshold), value=value))


_WORDS = "large requests end apart, as on one machine"
PAIRS = Bound("pairs", _WORDS, "round", ("tel",), prove_by_pairs, IN_ROUNDS, certifies=True)
