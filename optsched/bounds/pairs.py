"""A bound in rounds from pairs of requests that are too large to end close to each other.

`optsched.bounds.checker.pairs` has the proof, and computes what a threshold proves on its own.
"""

import numpy as np

from optsched.bounds.base import IN_ROUNDS, Bound, BoundTask, Proof
from optsched.bounds.certificate import make_certificate
from optsched.bounds.checker.requests import srpt_completions
from optsched.bounds.leaves import pairs_leaf
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance

# Thresholds that are tried take at most so many completions together, and one always is.
_WORK = 200_000


def paired(instance: Instance, threshold: int) -> int:
    """Return the total latency that pairs of peaks of the threshold or more prove.

    Parameters
    ----------
    instance : Instance
        An instance in rounds.
    threshold : int
        More than half of the KV capacity.
    """
    output, arrival = instance.output_tokens, instance.release_times.astype(np.int64)
    large = instance.peak_tokens >= threshold
    apart = np.minimum(output, instance.peak_tokens + threshold - instance.kv_capacity)[large]
    release = (arrival + output)[large] - apart
    ends = sum(srpt_completions(release.tolist(), apart.tolist()))
    return ends - int(arrival[large].sum()) + int(output[~large].sum())


def prove_by_pairs(task: BoundTask, budget: Budget) -> Proof:
    """Return the largest value of some thresholds (`optsched.bounds.checker.pairs`)."""
    instance = task.instance
    half = instance.kv_capacity // 2
    peaks = np.unique(np.maximum(instance.peak_tokens, half + 1))
    every = -(-len(peaks) // max(1, _WORK // instance.n))
    value, threshold = max((paired(instance, h), h) for h in peaks[::every].tolist())
    return Proof(value, make_certificate(instance, pairs_leaf(threshold), value=value))


_WORDS = "large requests end apart, as on one machine"
PAIRS = Bound("pairs", _WORDS, "round", ("tel",), prove_by_pairs, IN_ROUNDS, certifies=True)
