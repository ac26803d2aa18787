"""Steps of most policies with ``batch(view)``: decode all, evict until the batch fits, admit.

Tokens are as in `Batch`: the tokens to process, by request. No function changes its arguments. The
policy ``fcfs`` in seconds is::

    def batch(self, view: View) -> Batch:
        tokens, evicted = evict_until_fits(view, decode_all(view))
        line = sorted(view.waiting, key=lambda i: (view.arrival[i], i))
        return Batch(admit(view, tokens, line, evicted), evicted)
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from optsched.policies.base import View


def decode_all(view: View, *, last: bool = False) -> dict[int, int]:
    """Return one token for every running request that decodes, in the order of ``view.running``.

    Where more requests decode than ``max_batch_tokens`` allows, the last ones pause. A request
    whose prefill is not complete is left out; only a policy that splits prefills has such
    requests.

    Parameters
    ----------
    view : View
    last : bool
        Whether requests with one prompt token left take it, too. Where KV moves between machines,
        a link may have the last one computed again. If phases are kept apart, only where nobody
        decodes.
    """
    decoding = [i for i in view.running if view.decoding[i]]
    if last and (view.hybrid or not decoding):
        decoding = [i for i in view.running if view.decoding[i] or view.rest(i) == 1]

    return dict.fromkeys(decoding[: view.limits.max_batch_tokens], 1)


def kv_after(view: View, tokens: Mapping[int, int], evicted: Sequence[int] = ()) -> int:
    """Return the KV tokens that are held at the end of a batch, before any of it is freed.

    A running request holds its KV whether the batch processes it or not, unless it is evicted. So
    does a waiting one that is admitted and whose KV comes from another machine.

    Parameters
    ----------
    view : View
    tokens : mapping of int to int
        Tokens to process, by request.
    evicted : sequence of int
        Running requests that are evicted before.
    """
    stay = set(view.running).difference(evicted)
    kv = view.held(list(stay))
    # Of requests that stay, only what the batch adds; what they hold counts already.
    for i, c in tokens.items():
        cached = 0 if i in evicted else int(view.cached[i])
        kv += view.kv_of(cached + c) - (view.kv_of(cached) if i in stay and cached else 0)

    return kv


def fits(view: View, tokens: Mapping[int, int], evicted: Sequence[int] = ()) -> bool:
    """Return whether a batch fits: KV capacity, the instance's limits, and phases kept apart.

    Parameters
    ----------
    view : View
    tokens : mapping of int to int
        Tokens to process, by request.
    evicted : sequence of int
        Running requests that are evicted before.
    """
    limits = view.limits
    # Whoever is evicted before the batch is prefilled in it. A decode has one token.
    decodes = [i for i in tokens if view.decoding[i] and i not in evicted]
    prefilled = sum(tokens.values()) - len(decodes)
    return (
        kv_after(view, tokens, evicted) <= view.kv_capacity
        and sum(tokens.values()) <= (limits.max_batch_tokens or math.inf)
        and prefilled <= (limits.max_prefill_tokens or math.inf)
        and _holding(view, tokens, evicted) <= (limits.max_running or math.inf)
        and (view.hybrid or not decodes or not prefilled)
    )


def _holding(view: View, tokens: Mapping[int, int], evicted: Sequence[int]) -> int:
    """Return how many requests hold KV after a batch."""
    return len({*view.running, *tokens}.difference(set(evicted).difference(tokens)))


def evict_until_fits(
    view: View, tokens: Mapping[int, int], order: Iterable[int] | None = None
) -> tuple[dict[int, int], list[int]]:
    """Evict running requests until the batch's KV fits.

    Parameters
    ----------
    view : View
    tokens : mapping of int to int
        Tokens to process, by request.
    order : iterable of int, optional
        Running requests that may be evicted, the last one first. Default: ``view.running``, so
        that the latest arrival is evicted first.

    Returns
    -------
    tokens : dict of int to int
        The batch without the evicted requests.
    evicted : list of int
        The evicted requests, in the order of eviction.
    """
    candidates = list(view.running if order is None else order)
    kept, evicted = dict(tokens), list[int]()
    while candidates and kv_after(view, kept, evicted) > view.kv_capacity:
        evicted.append(candidates.pop())
        kept.pop(evicted[-1], None)

    return kept, evicted


def admit(
    view: View,
    tokens: Mapping[int, int],
    line: Iterable[int],
    evicted: Sequence[int] = (),
    *,
    max_running: int | None = None,
) -> dict[int, int]:
    """Add whole prefills of waiting requests to a batch, up to the first that does not fit.

    Parameters
    ----------
    view : View
    tokens : mapping of int to int
        Tokens to process, by request.
    line : iterable of int
        Waiting requests in the order of admission: ``view.waiting``, or a sorted copy.
    evicted : sequence of int
        Running requests that are evicted before.
    max_running : int, optional
        The policy's own limit on requests that hold KV, beside the instance's.

    Returns
    -------
    dict of int to int
        Tokens to process, by request.
    """
    joined, seats = dict(tokens), math.inf if max_running is None else max_running
    for i in line:
        wider = {**joined, i: view.rest(i)}
        if _holding(view, wider, evicted) > seats or not fits(view, wider, evicted):
            break

        joined = wider

    return joined


def fits_to_the_end(view: View, requests: Iterable[int]) -> bool:
    """Return whether KV stays within capacity until all of some requests are done.

    Every request is assumed to run from this batch on and to produce one token per batch. KV is
    largest in the batches in which a request produces its last token, as ``view.remaining``
    predicts it. Only these batches are checked (Jaillet et al. 2025, inequality (5)).

    Parameters
    ----------
    view : View
    requests : iterable of int
        The requests that would run, whether they run or wait now.
    """
    left = {i: math.ceil(view.remaining[i]) for i in requests}  # tokens, and so batches
    # In the k-th batch from now a request comes to ``size + k`` cached tokens.
    size = {i: view.rest(i) + int(view.cached[i]) - 1 for i in left}
    return all(
        sum(view.kv_of(size[i] + batch) for i in left if left[i] >= batch) <= view.kv_capacity
        for batch in set(left.values())
    )
