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

    An eviction has the batch before which it is, the phase `EVICTED` and 0 tokens. ``cached`` are
    the request's tokens with KV before the event.
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
    """Return the events of a schedule.

    `columns`: batch_offsets, request, tokens, evicted_offsets and evicted. `recorded`:
    `optsched.judge.replay.Replayed.cached`, by entry what was cached before it, c, or -1 - c for a
    prefill.
    """
    offsets, request, tokens, evicted_offsets, evicted = columns
    batches, none = np.arange(len(offsets) - 1), np.zeros_like(evicted)
    batch = np.concatenate(
        [np.repeat(batches, np.diff(evicted_offsets)), np.repeat(batches, np.diff(offsets))]
    )
    who = np.concatenate([evicted, request])
    prefill = np.where(recorded < 0, PREFILL, DECODE)
    phase = np.concatenate([none + EVICTED, prefill])
    held = np.concatenate([none, np.where(recorded < 0, -1 - recorded, recorded)])
    processed = np.concatenate([none, tokens])

    # Evictions stand before the entries of their batch, and the sort is stable.
    order = np.lexsort((batch, who))
    events = Events(who[order], batch[order], phase[order], processed[order], held[order])
    evictions = events.phase == EVICTED
    # An eviction finds cached what the event before it has left. There is one, of the same request,
    # since only a request that holds KV is evicted.
    events.cached[evictions] = (events.cached + events.tokens)[np.flatnonzero(evictions) - 1]

    # A prefill is a refill if its request has been evicted: if more evictions have been counted by
    # then, over all requests, than before the request's first event.
    so_far = np.cumsum(evictions)
    sizes = np.diff(np.flatnonzero(np.append(events.first, True)))  # events of each request
    before = np.repeat((so_far - evictions)[events.first], sizes)
    events.phase[(events.phase == PREFILL) & (so_far > before)] = REFILL
    return events


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

    `begin`, `end`, `worker`: of each batch; `release`: of each request. Times count from the first
    arrival. Events of a phase that follow each other without a break are one span.
    """
    evictions = events.phase == EVICTED
    start = begin[events.batch]
    stop = np.where(evictions, start, end[events.batch])  # an eviction takes no time
    # The end of the event before, or the release. From then on to its start a request does nothing.
    free_at = np.where(events.first, release[events.request], np.roll(stop, 1))
    apart = start > free_at

    # A request between two of its batches is paused if it holds KV, and waits or is evicted if not.
    after_eviction = np.append(False, evictions[:-1]) & ~events.first
    away = np.where(after_eviction, EVICTED, np.where(events.first, WAITING, PAUSED))
    place = np.where(away == PAUSED, worker[events.batch], -1)
    nothing = np.zeros_like(place)  # tokens that it processes
    between = (events.request, away, free_at, start, nothing, place)

    # An event goes on with the span before it, or opens one. Evictions are in no span.
    same = np.append(False, np.diff(events.phase) == 0) & ~events.first & ~apart
    opens = np.flatnonzero(~same & ~evictions)
    closes = np.flatnonzero(np.append(~same[1:], True) & ~evictions)
    # The tokens of a span: those up to its last event, less those before its first one.
    total = np.cumsum(events.tokens)
    tokens = total[closes] - (total - events.tokens)[opens]
    place = worker[events.batch[opens]]
    times = start[opens], stop[closes]
    processing = (events.request[opens], events.phase[opens], *times, tokens, place)

    # Both are columns in the order of `Spans`: first the spans in which nothing is processed, then
    # those of phases. All of them are sorted by request (0) and start (2).
    both = [np.concatenate([a[apart], b]) for a, b in zip(between, processing, strict=True)]
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
        """Return the KV of so many cached tokens. Without any there is no offset either."""
        return np.where(tokens > 0, instance.kv_of(tokens), 0)

    before, after = kv_of(events.cached), kv_of(events.cached + events.tokens)
    starts_over = events.first | np.append(False, events.phase[:-1] == EVICTED)
    before[starts_over] = 0  # what it claims was not its own
    change = np.where(events.phase == EVICTED, -before, after - before)
    last = events.last
    # Each event changes the KV at its batch j, at moment 2 j, and the last of a request frees it
    # after the batch, at moment 2 j + 1.
    return Changes(
        np.concatenate([2 * events.batch, 2 * events.batch[last] + 1]),
        np.concatenate([events.request, events.request[last]]),
        np.concatenate([change, -after[last]]),
    )
