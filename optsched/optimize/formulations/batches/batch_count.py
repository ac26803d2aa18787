"""How many batches infermax's requests need, from what a batch may hold.

A size has a weight such that whatever fits into a batch weighs at most some largest sum. Then
requests that weigh W in all their batches together need at least W / largest of them.
"""

import operator
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from optsched.optimize.formulations.batches.problem import BatchProblem

# The max number of sizes looked at for all dual feasible functions together, and how many functions
# are looked at nevertheless.
_STEPS, _MIN_THRESHOLDS = 10_000_000, 8


class Weight(NamedTuple):
    """The weight of a size, and the largest sum of weights in a batch."""

    of: Callable[[int], int]
    largest: int


def by_kv(prob: BatchProblem) -> list[Weight]:
    """Return weights of the KV after a batch that produces a request's token, the strongest first.

    They are dual feasible functions of the KV sizes (the bound L2 of Martello and Toth), and
    the limits on running requests and tokens. The ten strongest are kept.
    """
    capacity, sizes = prob.capacity, Counter[int]()
    for (s, o), number in Counter(prob.sizes).items():
        for z in kv_sizes(prob, s, o):
            sizes[z] += number

    # By a threshold t, sizes above capacity - t count as the whole room, and those below t as 0
    # (`_keep_or_drop`). Between two sizes all thresholds do the same. One of size z keeps z, one of
    # capacity - z + 1 raises it to the whole room. Each is valid alone: of too many some will do.
    thresholds = sorted({min(z, capacity - z + 1) for z in sizes})
    max_thresholds = max(_MIN_THRESHOLDS, _STEPS // (len(sizes) + sum(prob.output)))
    thresholds = thresholds[:: -(-len(thresholds) // max_thresholds)]

    weights = [Weight(lambda z: z, capacity)]
    # Who produces a token is running, and processes a token at least.
    weights += [Weight(lambda z: 1, min(prob.running, prob.batch_tokens, prob.n))]
    weights += [Weight(partial(_keep_or_drop, capacity, t), capacity) for t in thresholds]
    # Weights that agree on all sizes are the same.
    different = {(*map(weight.of, sizes), weight.largest): weight for weight in weights}

    def strength(values: tuple[int, ...]) -> float:
        """Return how many batches a weight's values and largest sum ask for."""
        *values_of, largest = values
        return sum(map(operator.mul, values_of, sizes.values())) / largest

    return [different[values] for values in sorted(different, key=strength, reverse=True)[:10]]


def by_input(prob: BatchProblem) -> list[Weight]:
    """Return weights of the tokens that a request without KV must prefill for its next token.

    Tokens and requests are limited in a batch. A whole prefill's KV is held with the offset, and no
    two prefills of more than half of the limit are in one batch. Chunks of one prefill may be in
    several batches, so for them only the tokens and the requests count.
    """
    offset, capacity = prob.offset, prob.capacity
    weights = [Weight(lambda z: z, min(prob.prefill_tokens, capacity))]
    weights += [Weight(lambda z: 1, min(prob.running, prob.n))]
    if not prob.chunked:
        largest = min(prob.prefill_tokens, capacity - offset)
        weights.append(Weight(lambda z: z + offset, capacity))
        weights.append(Weight(lambda z: int(2 * z > largest), 1))

    return weights


def batches_needed(prob: BatchProblem) -> tuple[int, int]:
    """Return the min number of batches, and the min number of batches with prefills.

    These are lower bounds, which need not be reached.
    """
    sizes = Counter(prob.sizes).items()

    # With the fewest prefills each request has one, of its prompt.
    def needed(weight: Weight, of_request: Callable[[int, int], list[int]]) -> int:
        total = sum(n * sum(map(weight.of, of_request(s, o))) for (s, o), n in sizes)
        return -(-total // weight.largest)

    prefills = max(needed(weight, lambda s, o: [s]) for weight in by_input(prob))
    # One batch for each token of the longest output, too.
    in_all = max(needed(weight, partial(kv_sizes, prob)) for weight in by_kv(prob))
    return max(in_all, prefills, *prob.output), prefills


def kv_sizes(prob: BatchProblem, s: int, o: int) -> list[int]:
    """Return a request's KV after each of the batches that produce its tokens."""
    return [s + k + prob.offset for k in range(o)]


def least_makespan(prob: BatchProblem) -> int:
    """Return a lower bound on the time from start to end, by own work and the batches needed."""
    c = prob.costs
    batches, prefills = batches_needed(prob)
    # Prefills are the cheaper batches. No more are needed, but all of them might be.
    if c.fixed(False, True) < c.fixed(True, False):
        prefills = batches

    decode_batches = batches - prefills
    fixed = prefills * c.fixed(False, True) + decode_batches * c.fixed(True, False)
    return prob.total_work + fixed


def _keep_or_drop(capacity: int, threshold: int, size: int) -> int:
    """Round sizes above room - threshold up to the room, and sizes below the threshold to 0."""
    return capacity if size > capacity - threshold else size * (size >= threshold)
