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

# The max number of sizes looked at for all dual feasible functions, and how many there are.
_STEPS, _FEW = 10_000_000, 8


class Weight(NamedTuple):
    """The weight of a size, and the largest sum of weights in a batch."""

    of: Callable[[int], int]
    largest: int


def by_kv(prob: BatchProblem) -> list[Weight]:
    """Return weights of the KV after a batch that produces a request's token, the strongest first.

    They are dual feasible functions of the KV sizes (the bound L2 of Martello and Toth), and
    the limits on running requests and tokens.
    """
    room, sizes = prob.capacity, Counter[int]()
    for (s, o), number in Counter(prob.sizes).items():
        for z in kv_sizes(prob, s, o):
            sizes[z] += number

    # Each threshold is valid alone, so of too many some are enough.
    thresholds = sorted({min(z, room - z + 1) for z in sizes})
    many = max(_FEW, _STEPS // (len(sizes) + sum(prob.output)))
    thresholds = thresholds[:: -(-len(thresholds) // many)]

    found = [Weight(lambda z: z, room)]
    found += [Weight(lambda z: 1, min(prob.running, prob.batch_tokens, prob.n))]
    found += [Weight(partial(_keep_or_drop, room, t), room) for t in thresholds]
    different = {(*map(one.of, sizes), one.largest): one for one in found}

    def strength(values: tuple[int, ...]) -> float:
        *weights, largest = values
        return sum(map(operator.mul, weights, sizes.values())) / largest

    return [different[values] for values in sorted(different, key=strength, reverse=True)[:10]]


def by_input(prob: BatchProblem) -> list[Weight]:
    """Return weights of the tokens that a request without KV must prefill for its next token."""
    off, room = prob.offset, prob.capacity
    found = [Weight(lambda z: z, min(prob.prefill_tokens, room))]
    found += [Weight(lambda z: 1, min(prob.running, prob.n))]
    if not prob.chunked:
        largest = min(prob.prefill_tokens, room - off)
        found += [Weight(lambda z: z + off, room), Weight(lambda z: int(2 * z > largest), 1)]

    return found


def batches_needed(prob: BatchProblem) -> tuple[int, int]:
    """Return the min number of batches, and the min number of batches with prefills."""
    sizes = Counter(prob.sizes).items()

    def needed(weight: Weight, of_request: Callable[[int, int], list[int]]) -> int:
        total = sum(n * sum(map(weight.of, of_request(s, o))) for (s, o), n in sizes)
        return -(-total // weight.largest)

    prefills = max(needed(weight, lambda s, o: [s]) for weight in by_input(prob))
    in_all = max(needed(weight, partial(kv_sizes, prob)) for weight in by_kv(prob))
    return max(in_all, prefills, *prob.output), prefills


def kv_sizes(prob: BatchProblem, s: int, o: int) -> list[int]:
    """Return a request's KV after each of the batches that produce its tokens."""
    return [s + k + prob.offset for k in range(o)]


def least_makespan(prob: BatchProblem) -> int:
    """Return a lower bound on the time from start to end, by own work and the batches needed."""
    c = prob.costs
    batches, prefills = batches_needed(prob)
    if c.fixed(False, True) < c.fixed(True, False):
        prefills = batches

    decode_batches = batches - prefills
    fixed = prefills * c.fixed(False, True) + decode_batches * c.fixed(True, False)
    return prob.total_work + fixed


def _keep_or_drop(room: int, threshold: int, size: int) -> int:
    """Round sizes above room - threshold up to the room, and sizes below the threshold to 0."""
    return room if size > room - threshold else size * (size >= threshold)
