"""The phases of every request, from what a replay recorded of each entry."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.problem.instance import Instance

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PHASES = ("waiting", "prefill", "decode", "paused", "evicted", "refill")
"""Names of the phases by number; see `optsched.judge.timeline.Timeline`."""

WAITING, PREFILL, DECODE, PAUSED, EVICTED, REFILL = range(len(PHASES))


class Events(NamedTuple):
    """The entries and evictions of a schedule, in the order of requests and then of time.

    An eviction has the batch before which it is, the phase `EVICTED` and 0 tokens.
    """

    request: Ints
    batch: Ints
    phase: Ints
    tokens: Ints
    cached: Ints

    @property
    def first(self) -> NDArray[np.bool_]:
        """Whether it is the first of its request."""
        return np.append(True, np.diff(self.request) > 0)

    @property
    def last(self) -> NDArray[np.bool_]:
        """Whether it is the last of its request, which is its last token."""
        return np.append(np.diff(self.request) > 0, True)


def events_of(columns: tuple[Ints, ...], recorded: Ints) -> Events:
    """Return the events of a schedule. `recorded`: `optsched.judge.replay.Replayed.cached`."""
    offsets, request, tokens, evicted_offsets, evicted = columns
    batches, none = np.arange(len(offsets) - 1), np.zeros_like(evicted)
    batch = np.concatenate(
        [np.repeat(batches, np.diff(evicted_offsets)), np.repeat(batches, np.diff(offsets))]
    )
    everyone = np.concatenate([evicted, request])
    prefill = np.where(recorded < 0, PREFILL, DECODE)
    phase = np.concatenate([none + EVICTED, prefill])
    held = np.concatenate([none, np.where(recorded < 0, -1 - recorded, recorded)])
    amount = np.concatenate([none, tokens])

    # Evictions stand before the entries of their batch, and the sort is stable.
    order = np.lexsort((batch, everyone))
    sort = Events(everyone[order], batch[order], phase[order], amount[order], held[order])
    gone = sort.phase == EVICTED
    sort.cached[gone] = (sort.cached + sort.tokens)[np.flatnonzero(gone) - 1]

    lost = np.cumsum(gone)  # evictions so far, of which those of earlier requests do not count
    before = np.repeat(
        (lost - gone)[sort.first], np.diff(np.flatnonzero(np.append(sort.first, True)))
    )
    sort.phase[(sort.phase == PREFILL) & (lost > before)] = REFILL
    return sort


class Spans(NamedTuple):
    """What each request does from when to when, and on which worker: -1 where none holds it."""

    request: Ints
    phase: Ints
    start: Floats
    end: Floats
    tokens: Ints
    worker: Ints


def spans_of(events: Events, release: Floats, begin: Floats, end: Floats, worker: Ints) -> Spans:
    """Return the spans of all requests, sorted by request and start.

    `begin`, `end`, `worker`: of each batch.
    """
    gone = events.phase == EVICTED
    start = begin[events.batch]
    stop = np.where(gone, start, end[events.batch])
    free_at = np.where(events.first, release[events.request], np.roll(stop, 1))
    apart = start > free_at

    # A request between two of its batches is paused if it holds KV, and waits or is evicted if not.
    lost = np.append(False, gone[:-1]) & ~events.first
    away = np.where(lost, EVICTED, np.where(events.first, WAITING, PAUSED))
    place = np.where(away == PAUSED, worker[events.batch], -1)
    nothing = np.zeros_like(place)
    between = (events.request, away, free_at, start, nothing, place)

    same = np.append(False, np.diff(events.phase) == 0) & ~events.first & ~apart
    opens = np.flatnonzero(~same & ~gone)
    closes = np.flatnonzero(np.append(~same[1:], True) & ~gone)
    total = np.cumsum(events.tokens)
    tokens = total[closes] - (total - events.tokens)[opens]
    place = worker[events.batch[opens]]
    times = start[opens], stop[closes]
    work = (events.request[opens], events.phase[opens], *times, tokens, place)

    both = [np.concatenate([a[apart], b]) for a, b in zip(between, work, strict=True)]
    order = np.lexsort((both[2], both[0]))
    return Spans(*(column[order] for column in both))


class Changes(NamedTuple):
    """How the KV that each request holds changes, in whole blocks.

    `moment`: 2 j in batch j, and 2 j + 1 after it, when the KV of those that finish in it is freed.
    """

    moment: Ints
    request: Ints
    kv: Ints


def changes_of(events: Events, instance: Instance) -> Changes:
    """Return the changes of the KV that a schedule's requests hold."""

    def kv_of(tokens: Ints) -> Ints:
        return np.where(tokens > 0, instance.kv_of(tokens), 0)

    before, after = kv_of(events.cached), kv_of(events.cached + events.tokens)
    anew = events.first | np.append(False, events.phase[:-1] == EVICTED)
    before[anew] = 0  # what it claims was not its own
    grown = np.where(events.phase == EVICTED, -before, after - before)
    last = events.last
    return Changes(
        np.concatenate([2 * events.batch, 2 * events.batch[last] + 1]),
        np.concatenate([events.request, events.request[last]]),
        np.concatenate([grown, -after[last]]),
    )
