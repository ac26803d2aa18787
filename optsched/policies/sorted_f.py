"""Sorted-F of Wang, Ye and Zhou 2025: batches of small output per squared size go first.

F of a set is the sum of its requests' outputs over the square of their number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from optsched.policies import policy
from optsched.policies.base import Batch, View
from optsched.policies.helpers import admit, decode_all, evict_until_fits, fits_to_the_end

EXACT_STEPS = 20_000_000
"""Waiting requests squared, times KV capacity, up to which the set of smallest F is exact."""


@policy(
    "sorted-f",
    "batches with the smallest total output over squared size first",
    clairvoyant=True,
    paper="Wang, Ye and Zhou 2025, abstract and metric F",
)
def sorted_f() -> SortedF:
    """Return the policy that orders requests by batches of smallest F, the metric of the paper.

    docs/policies/lookahead.md says what F is, and what is ours. The set of smallest F comes from a
    dynamic program over the number of requests and the sum of their prompts. Where that is too
    large (`EXACT_STEPS`), only the prefixes of the orders by output, by peak and by KV volume are
    tried.
    """
    return SortedF()


class SortedF:
    """The policy object of `sorted_f`."""

    clairvoyant = True
    evict_mode = "restart"
    hybrid = True

    def __init__(self) -> None:
        self._asked: set[int] = set()  # the requests that have a place in the order
        self._ranked: dict[int, int] = {}  # the places that are known
        self._order: Iterator[int] = iter(())  # the requests of the places after these

    def batch(self, view: View) -> Batch:
        """See `Policy.batch`."""
        # `last`: also requests with one prompt token left, whose KV came from another machine.
        tokens, evicted = evict_until_fits(view, decode_all(view, last=True))
        # Requests that came or were evicted since the order was made want a new one.
        if not self._asked >= set(view.waiting):
            self._asked = set(view.waiting)
            self._ranked, self._order = {}, _order(view)

        admitted: list[int] = []
        staying = [i for i in view.running if i not in evicted]
        for i in self._waiting(view):
            others = [*staying, *admitted]
            if others and not fits_to_the_end(view, [*others, i]):
                break

            admitted.append(i)

        return Batch(admit(view, tokens, admitted, evicted), evicted)

    def _waiting(self, view: View) -> Iterator[int]:
        """Yield the waiting requests in order. The order is made only as far as it is asked for."""
        waiting = set(view.waiting)
        yield from sorted(waiting & self._ranked.keys(), key=self._ranked.__getitem__)
        for i in self._order:
            self._ranked[i] = len(self._ranked)
            if i in waiting:
                yield i


def _order(view: View) -> Iterator[int]:
    """Yield the waiting requests by sets of smallest F, each set in ascending output."""
    waiting = np.array(sorted(view.waiting, key=lambda i: (view.arrival[i], i)), dtype=np.int64)
    output = np.ceil(view.remaining).astype(np.int64)[waiting]
    # While a request produces its k-th token, its input and k - 1 tokens more are cached. With the
    # offset it holds size + k, as in `_smallest_f`.
    size = view.prompt_tokens[waiting] + view.generated[waiting] + view.kv_offset - 1
    capacity = view.kv_capacity - view.kv_capacity % view.kv_block_tokens  # in whole blocks

    while waiting.size:
        chosen = _smallest_f(size, output, capacity)
        chosen = chosen[np.argsort(output[chosen], kind="stable")]
        yield from waiting[chosen].tolist()
        waiting, size, output = (np.delete(column, chosen) for column in (waiting, size, output))


def _smallest_f(
    size: NDArray[np.int64], output: NDArray[np.int64], capacity: int
) -> NDArray[np.int64]:
    """Return the requests of a set that fits and has the smallest F.

    A request holds ``size + k`` tokens while it produces its k-th one. Requests that start
    together hold most when one of them produces its last token. In descending order of output,
    those that still run when the j-th ends are the first j, so a set fits iff
    ``sum(size[:k]) + k * output[k - 1] <= capacity`` for each of its prefixes of k requests.
    """
    # A request with a forecast that is too long runs alone, once all others have been chosen.
    alone = size + output > capacity
    if alone.all():
        return np.array([0])

    descending = np.argsort(-output, kind="stable")
    descending = descending[~alone[descending]]
    if descending.size**2 * capacity <= EXACT_STEPS:
        return _by_dynamic_program(size, output, capacity, descending)

    return _by_prefixes(size, output, capacity, descending)


def _by_dynamic_program(
    size: NDArray[np.int64], output: NDArray[np.int64], capacity: int, items: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the set of smallest F. `items`: the requests, in descending output.

    ``best[k, s]`` is the min sum of outputs of k requests of total size s, of those so far in
    descending output, such that each prefix fits; infinite: no set. ``takes[step, k, s]``: whether
    the set that the step found for (k, s) contains the step's request.
    """
    n = items.size
    best = np.full((n + 1, capacity + 1), np.inf)
    best[0, 0] = 0.0
    takes = np.zeros((n, n + 1, capacity + 1), dtype=np.bool_)
    count = np.arange(1, n + 1)[:, None]

    for step, i in enumerate(items.tolist()):
        own_size, own_output = int(size[i]), int(output[i])
        # Of k - 1 requests of size s - own_size; in the arrays below k counts from 1.
        with_it = best[:-1, : capacity + 1 - own_size] + own_output
        # As the k-th one it has the least output so far: it ends a prefix, whose sum must fit.
        fits = np.arange(own_size, capacity + 1)[None, :] + count * own_output <= capacity
        better = fits & (with_it < best[1:, own_size:])
        takes[step, 1:, own_size:] = better
        best[1:, own_size:][better] = with_it[better]

    # Of sets of equal F, the one with the most requests.
    metric = best[1:] / count**2
    smallest = np.flatnonzero(metric.min(axis=1) == metric.min())[-1]
    k, total = int(smallest) + 1, int(metric[smallest].argmin())
    chosen: list[int] = []

    # Back from the last step: what is taken out leaves a set of one request less.
    for step in reversed(range(n)):
        if takes[step, k, total]:
            chosen.append(int(items[step]))
            k, total = k - 1, total - int(size[chosen[-1]])

    return np.array(chosen, dtype=np.int64)


def _by_prefixes(
    size: NDArray[np.int64], output: NDArray[np.int64], capacity: int, items: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the prefix of smallest F of three orders: by output, by peak and by KV volume.

    `items`: the requests that fit alone.
    """
    best, chosen = np.inf, items[:0]
    volume = size * output + output * (output + 1) // 2
    for key in (output, size + output, volume):
        in_order = items[np.argsort(key[items], kind="stable")]
        # A part of a set that fits fits, too, so the longest prefix that fits is found by halves.
        # One request fits by itself (`_smallest_f`), and each holds a token at least. The key is 1,
        # which is looked for, where a prefix does not fit.
        sizes = range(2, min(in_order.size, capacity) + 1)
        largest = 1 + bisect_left(
            sizes, 1, key=lambda k: not _fits(in_order[:k], size, output, capacity)
        )
        # Of prefixes of equal F, the longest.
        metric = np.cumsum(output[in_order[:largest]]) / np.arange(1, largest + 1) ** 2
        k = int(metric.size - 1 - metric[::-1].argmin())
        if metric[k] < best:
            best, chosen = float(metric[k]), in_order[: k + 1]

    return chosen


def _fits(
    requests: NDArray[np.int64], size: NDArray[np.int64], output: NDArray[np.int64], capacity: int
) -> bool:
    """Return whether requests that start together fit, see `_smallest_f`."""
    descending = requests[np.argsort(-output[requests], kind="stable")]
    held = np.cumsum(size[descending]) + np.arange(1, descending.size + 1) * output[descending]
    return bool((held <= capacity).all())
