"""Which floors to give the kinds of the ramp relaxation: states against token-rounds lost.

Rounding floors up merges states and forgets the last token-rounds (in reverse time) of requests.
How many states floors lead to can be counted without a graph, and what the bound loses is roughly
what the token-rounds forgotten would have held up: the requests that are as large or larger,
though small requests, which find room between the others, count for less than that says: by the
square root of it. `Menu.choose` takes what loses least among the floors whose graph is small
enough. Import lazily: it loads numba.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.bounds.ramp import Relaxation, most_completed

Floors = NDArray[np.int64]

_SUBSETS = 6
"""Up to so many different floors, all sets of them are tried; beyond, the best of some sizes."""
_SPLITS = 6
"""Peaks up to which, or from which on, requests may get finer floors than the rest."""
CLOCKED_SHARE = 0.35
"""Share of (t, m) pairs times multisets that are nodes, as measured on Poisson arrivals."""

WORTH = 0.8
"""Part of the loss at most that a refinement may leave."""
_ELSEWHERE = 0.02
"""Weight of the token-rounds of requests that are mostly in the other part of the graph."""


@njit(cache=True, nogil=True)
def _of_class(most: Any, low: int, capacity: int, out: Any) -> None:
    """Count, by total weight, multisets of weights from ``low`` on, ``most[w]`` of at least w."""
    width = min(most[low], capacity // max(low, 1))
    table = np.zeros((width + 1, capacity + 1))
    table[0, 0] = 1.0
    for w in range(most.shape[0] - 1, low - 1, -1):
        for k in range(1, min(width, most[w]) + 1):
            for total in range(w, capacity + 1):
                table[k, total] += table[k - 1, total - w]
    for total in range(capacity + 1):
        for k in range(width + 1):
            out[total] += table[k, total]


def count_multisets(
    peak: Floors, floor: Floors, copies: Floors, capacity: int, classes: Floors | None = None
) -> float:
    """Return how many multisets of live items there are at most, the empty one included.

    Parameters
    ----------
    peak, floor, copies : ndarray of int64, shape (kinds,)
        A live item of a kind weighs from its peak down to its floor; one below it is not counted.
    capacity : int
        Largest total weight.
    classes : ndarray of int64, shape (kinds,), optional
        Kinds that a state tells apart although their floors are the same.

    Returns
    -------
    float
        The states of the tracker (`optsched.bounds.ramp_graph.multiset_tracker`) when every
        multiset can be reached.
    """
    counts = np.zeros(capacity + 1)
    counts[0] = 1.0
    pairs = np.stack([floor, floor if classes is None else classes])
    for f, c in np.unique(pairs, axis=1).T:
        mine = (pairs[0] == f) & (pairs[1] == c)
        most = np.zeros(max(int(peak[mine].max()), int(f)) + 1, dtype=np.int64)
        for p, number in zip(peak[mine], copies[mine], strict=True):
            most[: p + 1] += number
        own = np.zeros(capacity + 1)
        _of_class(most, int(f), capacity, own)
        counts = np.convolve(counts, own)[: capacity + 1]
    return float(counts.sum())


@dataclass(frozen=True, eq=False)
class Choice:
    """Floors per kind, without a clock and with one, and what they come to.

    Parameters
    ----------
    floors, clocked : ndarray of int64, shape (kinds,)
    states, clocked_states : float
        Multisets (`count_multisets`).
    classes, clocked_classes : ndarray of int64, shape (kinds,)
        Which kinds the states of the graph tell apart, by these floors and those before.
    loss : float
        Token-rounds forgotten, weighted by the requests that are held up.
    """

    floors: Floors
    clocked: Floors
    states: float
    clocked_states: float
    classes: Floors
    clocked_classes: Floors
    loss: float


@dataclass(eq=False)
class Menu:
    """All floors to choose from for one busy period and clock.

    Parameters
    ----------
    relaxation : Relaxation
        Only its kinds and its clock are used.
    """

    relaxation: Relaxation
    _counted: dict[bytes, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        r = self.relaxation
        self.pairs = sum(most_completed(r.jobs, t) + 1 for t in range(r.clock + 1) if r.clock)
        volume = (r.peak - r.floor + 1) * (r.peak + r.floor) / 2
        held_up = np.array([(r.copies * (volume >= v)).sum() for v in volume])
        self._weight = r.copies * np.sqrt(held_up)
        early = np.full(len(volume), _ELSEWHERE)
        if r.clock:
            able = np.flatnonzero(r.ready <= r.clock)
            able = able[np.argsort(volume[able], kind="stable")]
            before = np.cumsum(r.copies[able]) - r.copies[able]
            early[able[before < most_completed(r.jobs, r.clock)]] = 1 - _ELSEWHERE
        self._early = early if r.clock else np.zeros(len(volume))
        self._all = self._candidates()

    def _candidates(self) -> list[Floors]:
        """Return floors per kind: a set of values, for all or with a finer one for some peaks."""
        r = self.relaxation
        values = np.unique(r.floor).tolist()
        top = values[-1]
        sets = [(top,)]
        if len(values) <= _SUBSETS:
            lower = values[:-1]
            sets = [(*c, top) for k in range(len(values)) for c in combinations(lower, k)]
        else:
            chosen = sets[0]
            while len(chosen) < len(values):
                more = [tuple(sorted((*chosen, v))) for v in values if v not in chosen]
                chosen = min(more, key=lambda s: float(self._lost(self._rounded(s)).sum()))
                if len(chosen) in (2, 3, 5, 9, 17, 33, len(values)):
                    sets.append(chosen)
        sets += [(int(top * wide),) for wide in (1.25, 1.5, 2, 3) if int(top * wide) > top]
        peaks = np.unique(r.peak)
        marks = np.unique([top, *peaks[np.linspace(0, len(peaks) - 1, _SPLITS).astype(int)]])
        rounded = [self._rounded(s) for s in sets]
        rounded += [np.minimum(f, r.peak) for f in rounded]
        out = {f.tobytes(): f for f in rounded}
        for a, b in permutations(rounded, 2):
            if (b <= a).all():
                for mark in marks:
                    for finer in (r.peak <= mark, r.peak > mark)[: 2 if r.clock else 1]:
                        mixed = np.where(finer, b, a)
                        out[mixed.tobytes()] = mixed
        return list(out.values())

    def _rounded(self, values: tuple[int, ...]) -> Floors:
        ordered = np.array(values)
        return ordered[np.searchsorted(ordered, self.relaxation.floor)]

    def _lost(self, floors: Floors) -> Floors:
        """Return the token-rounds that each kind's floor forgets, weighted."""
        r = self.relaxation
        up = np.minimum(floors, r.peak + 1)
        return self._weight * (up - r.floor) * (up + r.floor - 1) / 2

    def _states(self, floors: Floors, classes: Floors) -> float:
        key = floors.tobytes() + classes.tobytes()
        if key not in self._counted:
            r = self.relaxation
            self._counted[key] = count_multisets(
                r.peak, floors, r.copies, r.jobs.capacity, classes
            )  # fmt: skip
        return self._counted[key]

    def _front(
        self, present: tuple[Floors, Floors] | None, share: NDArray[np.float64]
    ) -> list[tuple[float, float, Any]]:
        """Return (states, loss, floors) of what no other beats in both, by states."""
        rows = []
        for floors in self._all:
            if present is None or (floors <= present[0]).all():
                states = self._states(floors, _joint(present, floors))
                rows.append((states, float(self._lost(floors) @ share), floors))
        rows.sort(key=lambda row: row[:2])
        front: list[tuple[float, float, Any]] = []
        for row in rows:
            if not front or row[1] < front[-1][1]:
                front.append(row)
        return front

    def choose(
        self,
        room: float,
        present: Choice | None = None,
        nodes: tuple[int, int] = (0, 0),
    ) -> tuple[Choice | None, float]:
        """Return the floors that lose least among those of graphs with at most ``room`` nodes.

        Parameters
        ----------
        room : float
        present : Choice, optional
            Those of the graph at hand: only floors that are finer and lose clearly less are
            considered.
        nodes : (int, int)
            Its nodes without a clock and with one.
        Returns
        -------
        Choice or None
            The smallest where all are larger; None where none is finer.
        float
            Its nodes, as estimated.
        """
        r = self.relaxation
        if present is not None and present.loss == 0:
            return None, 0.0
        if present is None:
            per_state = float(r.jobs.n), CLOCKED_SHARE * self.pairs
            late = early = None
        else:
            per_state = nodes[0] / present.states, nodes[1] / present.clocked_states
            late = present.floors, present.classes
            early = present.clocked, present.clocked_classes
        best: tuple[tuple[bool, float, float], Choice] | None = None
        clocked_front = self._front(early, self._early) if self.pairs else []
        for states, loss, floors in self._front(late, 1 - self._early):
            seen = set()
            for _, _, wanted in clocked_front or [(0.0, 0.0, floors)]:
                clocked = _follow(floors, np.maximum(wanted, floors))
                if clocked.tobytes() in seen or (early and (clocked > early[0]).any()):
                    continue
                seen.add(clocked.tobytes())
                clocked_classes = _joint(early, clocked)
                clocked_states = self._states(clocked, clocked_classes)
                size = per_state[0] * states + per_state[1] * clocked_states
                total = loss + float(self._lost(clocked) @ self._early)
                if present is not None and total > WORTH * present.loss:
                    continue
                rank = (size > room, size if size > room else total, size)
                if best is None or rank < best[0]:
                    best = rank, Choice(
                        floors, clocked, states, clocked_states, _joint(late, floors),
                        clocked_classes, total
                    )  # fmt: skip
        return (None, 0.0) if best is None else (best[1], best[0][2])


def _joint(present: tuple[Floors, Floors] | None, floors: Floors) -> Floors:
    """Return which kinds are told apart by their class at present or by their new floors."""
    if present is None:
        return floors
    _, classes = np.unique(np.stack([present[1], floors]), axis=1, return_inverse=True)
    return classes.reshape(-1).astype(np.int64)


def _follow(floors: Floors, clocked: Floors) -> Floors:
    """Return the floors with a clock that the tracker gives: the largest of each class."""
    out = np.empty_like(clocked)
    for f in np.unique(floors):
        out[floors == f] = clocked[floors == f].max()
    return out
