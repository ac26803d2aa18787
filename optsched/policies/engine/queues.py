"""Who waits, and in which order: all that the orders of `Rules` remember of requests and groups.

The loop calls `enter` when a request begins to wait, `sort` before each batch, and
`after_admission` when one is admitted. An order with a memory of its own is written here, and
nowhere else.
"""

import numpy as np
from numpy.random import Generator

from optsched.judge.life import Records
from optsched.policies.engine import common, ledger, prefills
from optsched.policies.engine.blocks import Store
from optsched.policies.engine.common import push
from optsched.policies.engine.prefills import IN_GROUPS, RANKED, Worker
from optsched.problem.kernel import njit

TIES = 2**31
"""Random numbers that break ties among waiting requests lie below this."""


@njit
def enter(requests: Records, s: np.record, w: Worker, i: int, random: Generator) -> None:
    """Let a request wait: at its rank, behind those that wait, or at random among its equals.

    The queue is sorted by ``band``, ``key`` and ``place``, the smallest first. ``counter`` numbers
    those that begin to wait.
    """
    r = requests[i]
    r.band, r.key = 0, 0.0
    if s.random_ties:
        r.key = float(r.estimate) if s.by_estimate else 0.0
        r.place = int(random.random() * TIES)
    elif s.requeue_back:
        r.place = s.counter
    else:
        r.key, r.place = r.order, r.seq

    s.counter += 1
    push(requests, w.heap, s, i)


@njit
def _pass_late(requests: Records, s: np.record, w: Worker) -> None:
    """Move requests at the head whose first token can no longer be in time behind all others."""
    while s.waiting > 0:
        i = w.heap[0]
        r = requests[i]
        # Nobody is taken before the head, so the others need not be looked at yet.
        if r.band > 0 or r.produced > 0 or s.now <= r.late_after:
            return

        common.pop(requests, w.heap, s)
        r.band = 1
        push(requests, w.heap, s, i)


@njit(allocates=False)
def _sort_anew(requests: Records, s: np.record, w: Worker) -> None:
    """Sort the queue by what has happened since requests began to wait.

    In groups: requests of groups with fewer than ``gather`` members stand behind all others, unless
    nothing runs. Else the largest response ratio goes first: the time since the release, with the
    time that earlier requests of the session took, over the work of all of them.
    """
    grouped = s.sorting == IN_GROUPS
    if grouped:
        # The first request of a group holds the count for all of it.
        for k in range(s.waiting):
            requests[requests[w.heap[k]].group].count = 0
        for k in range(s.waiting):
            requests[requests[w.heap[k]].group].count += 1

    # The heap is built anew in its own array: a push writes to no place that is still to be read.
    size, s.waiting = s.waiting, 0
    for k in range(size):
        r = requests[w.heap[k]]
        if grouped:
            r.band = requests[r.group].count < s.gather and s.running > 0
        else:
            # ``count`` is here the time of earlier requests, and ``order`` the work. The ratio has
            # its sign changed, since the smallest key goes first.
            r.key = (r.release - s.now - r.count) / r.order

        push(requests, w.heap, s, w.heap[k])


@njit(allocates=False)
def sort(requests: Records, s: np.record, w: Worker) -> None:
    """Bring the queue into the order in which the next batch takes from it."""
    if s.late_last:
        _pass_late(requests, s, w)
    if s.sorting != RANKED:
        _sort_anew(requests, s, w)


@njit(allocates=False)
def sort_by_cache(requests: Records, s: np.record, w: Worker, cache: Store) -> None:
    """Sort waiting requests by the work that the cache leaves them, if that may have changed."""
    if cache is None or not s.changed:
        return

    # The heap is built anew in its own array, as in `_sort_anew`.
    size, s.waiting, s.changed = s.waiting, 0, False
    for k in range(size):
        r = requests[w.heap[k]]
        ledger.look_up_prefix(r, w.heap[k], cache)
        # `later` is the work of its decodes where prefills are ordered by it, else 0.
        r.key = prefills.time_alone(r, w.cost) + r.later
        push(requests, w.heap, s, w.heap[k])


@njit(allocates=False)
def after_admission(requests: Records, s: np.record, w: Worker) -> None:
    """Find the next head of the queue, from which a request has just been admitted."""
    if s.late_last:
        _pass_late(requests, s, w)
