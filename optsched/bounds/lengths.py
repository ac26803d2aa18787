"""Lengths of requests on one machine that no set of requests can beat, found by linear programs.

`optsched.bounds.checker.lengths` has the proof and the exact value. Lengths are valid if the states
of walks have potentials: a step costs one, a placement gains a length. These are linear conditions.
The end of the k-th request on a machine that is never idle is the sum of the k smallest lengths
since it began, so the lengths for which it is largest are a linear program, too. There is one for
each of several k; arrivals are taken from the machine of the lengths before.
"""

from typing import Any

import numpy as np

from optsched.bounds.base import IN_ROUNDS, Bound, BoundTask, Proof
from optsched.bounds.certificate import make_certificate
from optsched.bounds.checker.lengths import (
    MAX_LISTS,
    Graph,
    Ints,
    Walks,
    least_ends,
    lengths_total,
    walks_of,
)
from optsched.bounds.checker.parts import Columns, Unlimited, columns_of
from optsched.bounds.leaves import lengths_leaf
from optsched.problem.budget import Budget

# Marks are so far apart that the KV capacity is about so many of them.
_ROOM = 50
# States of walks: as many as take a tenth of a second, then more.
_STATES = (1_200, 3_000)
# How many k there are, and how often lengths are looked for for each.
_ENDS, _TRIES = 16, 3
# Lengths are multiples of 1 / _UNIT marks, less by this share so that they pass the check.
_UNIT, _LESS = 1_000_000, 1e-7


class Plan:
    """The linear program over the lengths of so many kinds, of which only the goal changes.

    ``graph`` has the states of walks (the checker's `Graph`).
    """

    def __init__(self, graph: Graph, kinds: int) -> None:
        import highspy

        self.kinds, self.states = kinds, len(graph.step)
        self.model, free = highspy.Highs(), highspy.kHighsInf
        self.model.setOptionValue("output_flag", False)
        self.model.setOptionValue("threads", 1)
        # With thousands of states it is faster than simplex, also from the solution before.
        self.model.setOptionValue("solver", "ipm")
        # Columns: lengths by kind, how far they are below the goal's limit, that limit, and
        # potentials by state.
        first_state = 2 * kinds + 1
        columns = first_state + self.states
        lower, upper = np.zeros(columns), np.full(columns, free)
        # Potentials have any sign, but that of no requests is 0.
        lower[first_state + 1 :], upper[first_state] = -free, 0.0
        self.model.addCols(columns, np.zeros(columns), lower, upper, 0, [], [], [])

        # A step from a state to that at the mark before, ``graph.step``, costs one: the potential
        # there is at most one more. A placement, from ``source`` to ``target``, gains its kind's
        # length.
        k, state = np.arange(kinds), first_state + np.arange(self.states)
        self._add_rows([[first_state + graph.step[1:], 1], [state[1:], -1]], 1.0)
        source, target = first_state + graph.source, first_state + graph.target
        self._add_rows([[target, 1], [source, -1], [graph.kind, 1]], 0.0)
        # The limit is at most a length and how far that is below it.
        limit = np.full(kinds, 2 * kinds)
        self._add_rows([[limit, 1], [k, -1], [kinds + k, -1]], 0.0)
        self.model.changeObjectiveSense(highspy.ObjSense.kMaximize)

    def _add_rows(self, terms: list[list[Any]], upper: float) -> None:
        """Add rows, which are sums of columns by factors, all at most the same."""
        index = np.stack([column for column, _ in terms], axis=1).astype(np.int32)
        value = np.tile([float(factor) for _, factor in terms], len(index))
        begin = np.arange(len(index), dtype=np.int32) * len(terms)
        lower, high = np.full(len(index), -np.inf), np.full(len(index), upper)
        self.model.addRows(len(index), lower, high, index.size, begin, index.ravel(), value)

    def best(self, count: Ints, first: int) -> list[int]:
        """Return the lengths for which the sum of the ``first`` smallest is largest.

        There are ``count`` requests of each kind. For any limit x, this sum is first x less what
        all lengths below x lack; the largest is at the first-th smallest.
        """
        # In the order of columns: lengths, what each kind's length is below x, and x.
        goal = np.concatenate([np.zeros(self.kinds), -count, [first]])
        self.model.changeColsCost(len(goal), np.arange(len(goal), dtype=np.int32), goal)
        self.model.run()
        length = np.array(self.model.getSolution().col_value[: self.kinds])
        whole = np.floor(np.maximum(length, 0) * _UNIT * (1 - _LESS))
        return whole.astype(np.int64).tolist()


def prove_by_lengths(task: BoundTask, budget: Budget) -> Proof:
    """Return the largest value found, with its certificate (`optsched.bounds.checker.lengths`)."""
    columns, best = columns_of(task.instance), (-1, dict[str, Any]())
    # u of the checker's text: the rounds from mark to mark, and the tokens of a unit of KV.
    every = max(1, columns.capacity // _ROOM)
    for max_states in _STATES:
        floor, walks = _walks(columns, every, max_states)
        leaf = lengths_leaf(every, floor, _lists(columns, walks, budget))
        value = lengths_total(columns, leaf, _UNIT, Unlimited())
        best = max(best, (value, leaf), key=lambda pair: pair[0])
        budget.tell(bound=best[0])
        # With floors of 1 nothing is forgotten too early, and more states change nothing.
        if budget.over or floor == 1:
            break

    value, leaf = best
    return Proof(value, make_certificate(task.instance, leaf, value=value, denominator=_UNIT))


def _walks(columns: Columns, every: int, max_states: int) -> tuple[int, Walks]:
    """Return the lowest floor whose walks have at most so many states, and these.

    Walks with a lower floor forget requests later, and so have more states. The search goes down
    from a floor at which they forget all.
    """
    floor = columns.capacity // every
    walks = walks_of(columns, every, floor)
    assert walks is not None  # they forget all requests
    while floor > 1 and (lower := walks_of(columns, every, floor - 1, max_states)):
        floor, walks = floor - 1, lower

    return floor, walks


def _lists(columns: Columns, walks: Walks, budget: Budget) -> list[list[int]]:
    """Return lists of lengths by kind, each of which raises the ends that those before have.

    ``ends`` ascend: the k-th is a bound on the k-th smallest end, in rounds. For each of some k,
    lengths are looked for that make it largest.
    """
    kinds, ends = len(walks.kinds), np.array(least_ends(columns))
    lists = [[0] * kinds]  # with which each request ends alone
    if not kinds:
        return lists

    arrival, kind, plan = np.array(columns.arrival), np.array(walks.kind), Plan(walks.graph, kinds)
    is_late = False
    for k in np.unique(np.linspace(0, len(ends), _ENDS + 1).astype(int)[1:]).tolist():
        for _ in range(_TRIES):
            # Those that may be among the first k have arrived. Walks forget some, whose kind is -1,
            # and these take no time.
            arrived = kind[arrival < ends[k - 1]]
            count = np.bincount(arrived[arrived >= 0], minlength=kinds)
            first = k - int((arrived < 0).sum())  # how many of the k take time
            if is_late or not 0 < first <= count.sum() or len(lists) == MAX_LISTS:
                break

            is_late = budget.over  # there is time for one list, always
            length = plan.best(count, first)
            higher = np.maximum(ends, walks.ends(length, _UNIT))
            # The linear program is solved in floating point, so the checker's test has the last
            # word.
            allowed = walks.graph.allow(np.array(length), _UNIT, Unlimited())
            if not allowed or (higher == ends).all():
                break

            # With later ends more requests may be among the first k, for which it tries again.
            lists.append(length)
            ends = higher

    return lists


_WORDS = "lengths on one machine that no set of requests can beat"
LENGTHS = Bound(
    "lengths", _WORDS, "round", ("tel",), prove_by_lengths, IN_ROUNDS, searches=True,
    certifies=True, weight=0.5,
)  # fmt: skip
