"""The batches that each worker ran, joined to one schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.policies.runner import Job
from optsched.problem.schedule import EvictMode, Schedule, from_batches


class Part(NamedTuple):
    """What one worker ran, batch by batch.

    Attributes
    ----------
    start : ndarray of float64, shape (batches,)
        Start of each batch, as a schedule holds it.
    entries, evicted_until : ndarray of int64, shape (batches,)
        Entries, and evictions, of each batch and of all before it.
    request, tokens, evicted : ndarray of int
        The columns of a `Schedule`.
    off_default : bool
        Whether some batch does not start as early as it can.
    """

    start: NDArray[np.float64]
    entries: NDArray[np.int64]
    request: NDArray[Any]
    tokens: NDArray[Any]
    evicted_until: NDArray[np.int64]
    evicted: NDArray[np.int64]
    off_default: bool


def joined(job: Job, mode: EvictMode, parts: Sequence[Part]) -> Schedule:
    """Return the schedule of workers: their batches sorted by start, ties by worker."""
    problem = job.problem
    start = np.concatenate([part.start for part in parts])
    worker = np.repeat(np.arange(len(parts)), [len(part.start) for part in parts])
    order = np.argsort(start, kind="stable") if len(parts) > 1 else np.arange(len(start))

    def flat(ends: str, *columns: str) -> list[NDArray[Any]]:
        """Return the offsets of the sorted batches, and the columns in their order."""
        sizes = [np.diff(getattr(part, ends), prepend=0) for part in parts]
        size = np.concatenate(sizes)
        offsets = np.append(0, np.cumsum(size[order]))
        values = [np.concatenate([getattr(part, name) for part in parts]) for name in columns]
        if len(parts) == 1:
            return [offsets, *values]

        first = (np.cumsum(size) - size)[order]
        pick = np.repeat(first - offsets[:-1], size[order]) + np.arange(offsets[-1])
        return [offsets, *(column[pick] for column in values)]

    offsets, request, tokens = flat("entries", "request", "tokens")
    evicted_offsets, evicted = flat("evicted_until", "evicted")
    late = any(part.off_default for part in parts)
    return from_batches(
        offsets,
        request,
        tokens,
        instance=problem,
        evicted_offsets=evicted_offsets,
        evicted=evicted,
        start=None if not late else problem.at(start[order]) if problem.in_rounds else start[order],
        worker=worker[order] if len(parts) > 1 else None,
        evict_mode=mode,
        cost_model_sha256=job.cost.sha256,
    )
