"""Charges by batch length: what tokens pay of a batch, found by cutting planes.

docs/formulations.md, "Charges by batch length", has the lemma. The charges of a class are vectors
that sum to at most the time of every batch that lasts no longer than the class. Which of them is
best depends on who shares the batch. So there are several per class, each the best for another
*target*, a mix of tokens.

Linear programs find them: charges c with c x <= T for every batch of content x and time T <= hi.
Batches are rows, from `optsched.bounds.checker.charges`, which also has the last word.

Five quantities of a batch are charged: decodes, tokens that they have cached, tokens that they
hold, prefill tokens, and positions of these. A row of a batch has them and its time, and a vector
for `witnesses` has a charge per batch (0 in what is found) and then theirs: `TERMS` numbers each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.bounds.base import BoundTask
from optsched.bounds.checker.batches import Batches, batches_of
from optsched.bounds.checker.charges import TERMS, witnesses
from optsched.bounds.checker.parts import Rejected
from optsched.problem.budget import Budget
from optsched.problem.errors import OutOfTimeError, UsageError
from optsched.problem.instance import Instance

Floats = NDArray[np.float64]
CLASSES, TARGETS = 24, 9
"""Classes and targets by default."""
# Lengths at which charges are found to choose the edges.
_LENGTHS = 40
# The shortest end of a class, over the shortest batch.
_SHORTEST = 1.001
# Max rounds of cutting planes, and the share of the time after which no further one begins.
_ROUNDS, _ROUNDS_SHARE = 12, 0.5
_DOING = "looking for charges by batch length"
# Lengths up to which batches are looked for at first.
_BEGUN = 8
# How far charges may be below the best ones, relatively, and what scans begin with.
_NEAR, _COARSE = 1e-3, 1e-2
# How near the first batches come to the most that there is, relatively. They only start the cuts,
# and a finer scan for one charge alone may take a minute where its best batches are many.
_BEGUN_WITHIN = 0.1


@dataclass(frozen=True, eq=False)
class Charges:
    """What tokens pay of a batch that lasts more than ``lo`` and at most ``hi`` seconds.

    The charges of all tokens of such a batch, by any one vertex of its class or a mixture, sum to
    at most its time. Every batch that fits the machine is in a class.

    Parameters
    ----------
    lo, hi : ndarray of float64, shape (classes,)
        Ends of the classes in seconds; the last one is infinite. No batch is shorter than the first
        ``lo``.
    vectors : ndarray of float64, shape (classes, vertices, 5)
        The charges of each vertex: seconds per decode, per token that it has cached before the
        batch, and per token of KV that it holds after it, in whole blocks; per prefill token, and
        per token before it in its request.
    """

    lo: Floats
    hi: Floats
    vectors: Floats


def class_charges(
    task: BoundTask,
    targets: ArrayLike | None = None,
    edges: ArrayLike | Callable[[float], ArrayLike] | None = None,
    budget: Budget | None = None,
    near: float = _NEAR,
    refills: ArrayLike = (),
    count: int = CLASSES,
) -> Charges:
    """Return charges for the batches of a task's machine.

    Parameters
    ----------
    task : BoundTask
        Its instance and its cost model, which may be tabulated, are used.
    targets : array_like, shape (targets, 5), optional
        Mixes of tokens, each with a vertex per class that charges it most: decodes, tokens that
        they have cached, tokens that they hold, prefill tokens, and positions of these. By default
        `targets_of` the instance.
    edges : array_like, shape (classes - 1,), or callable, optional
        Ascending lengths in seconds that end the classes but the last, or what returns them for
        the length of the shortest batch. By default they are chosen
        so that charges and lengths change by as much from each to the next.
    budget : Budget, optional
        After a part of it, what is found so far is returned.
    near : float
        How far charges may be below the best ones, relatively.
    refills : array_like, optional
        Numbers of cached tokens over which a decode is charged no more than a refill of as many
        and one. A class with one vertex needs them, lest refills be free there.
    count : int
        The number of classes where edges are chosen.

    Raises
    ------
    OutOfTimeError
        The budget was used up before anything was proved.
    Rejected
        Nothing is proved for the instance or its cost model.
    UsageError
        The edges do not ascend, or one is not clearly longer than the shortest batch.
    """
    budget = budget or Budget()
    batches = batches_of(task.instance, task.cost_model)
    mixes = np.asarray(targets_of(task.instance) if targets is None else targets, np.float64)
    # A charge of 1 second per batch, and none per token, finds the shortest batch.
    ratio, found = witnesses(batches, np.eye(1, TERMS), check=partial(budget.check, _DOING))
    if not np.isfinite(ratio[0]):
        raise Rejected("cost table: found a batch of no time by the tables; expected times > 0")

    shortest = 1 / float(ratio[0])
    plan = _Plan(batches, found, budget, np.asarray(refills, np.float64))
    if edges is None:
        ends = _edges(plan, mixes.mean(axis=0), shortest, count)
    else:
        ends = np.asarray(edges(shortest) if callable(edges) else edges, float)
    if not (np.diff(ends, prepend=_SHORTEST * shortest) > 0).all():
        raise UsageError(
            f"edges: found others; expected ascending seconds above {_SHORTEST * shortest:.6g}"
        )

    # Charges are quotients, which may have been rounded up.
    hi = np.append(ends, np.inf)
    return Charges(np.append(shortest, ends), hi, plan.vertices(hi, mixes, near) * (1 - 1e-12))


def targets_of(instance: Instance, count: int = TARGETS) -> Floats:
    """Return mixes of tokens: those of all requests, and these with decodes of one length.

    Parameters
    ----------
    instance : Instance
    count : int
        Number of targets, 2 or more. The lengths grow by a factor from the least to the longest.

    Returns
    -------
    ndarray, shape (count, 5)
        Decodes, tokens that they have cached, tokens that they hold, prefill tokens, and positions.
    """
    s, o = instance.prompt_tokens.astype(np.float64), instance.output_tokens.astype(np.float64)
    # What a decode holds beyond its cached tokens: in the mean, the last block is half empty.
    steps, more = o - 1, 1 + instance.kv_offset + (instance.kv_block_tokens - 1) / 2
    cached = s * steps + steps * (steps - 1) / 2
    tokens = np.stack([steps, cached, cached + more * steps, s, s * (s - 1) / 2], axis=1)
    total = tokens.sum(axis=0)

    length = np.geomspace(s.min(), (s + steps).max(), count - 1)
    mixes = np.tile(total, (count, 1))
    mixes[1:, 1] = total[0] * length
    mixes[1:, 2] = total[0] * (length + more)
    return mixes


class _Plan:
    """The linear program over charges, whose rows are batches.

    A class has the rows of the batches that last no longer than its end. ``contents`` has a batch
    by row: decodes, tokens that they have cached and hold, prefill tokens, positions, and time.
    ``shortest`` is such a row, of the shortest batch. ``refills`` is that of `class_charges`.
    """

    def __init__(self, batches: Batches, shortest: Floats, budget: Budget, refills: Floats) -> None:
        self.batches, self.contents, self.refills = batches, shortest, refills
        self.rounds, self.check = budget.part(_ROUNDS_SHARE), partial(budget.check, _DOING)
        # Begin with the batches that limit each charge alone, and two equal ones, up to some
        # lengths from about that of the shortest batch on.
        alone = np.eye(TERMS)
        pairs = [alone[i] + alone[j] for i in range(TERMS) for j in range(i)]
        ends = np.append(np.geomspace(1.01, 1000, _BEGUN) * shortest[0, -1], np.inf)
        charges = np.tile([*alone, *pairs], (len(ends), 1))
        until = np.repeat(ends, len(charges) // len(ends))
        self._add(witnesses(batches, charges, until, within=_BEGUN_WITHIN, check=self.check)[1])

    def _add(self, found: Floats) -> None:
        """Add batches: their contents and times. A time of 0 says that none was looked at."""
        self.contents = np.concatenate([self.contents, found[found[:, -1] > 0]])

    def best(self, end: float, mixes: Floats) -> Floats:
        """Return the best charges of a class by the rows at hand, shape (mixes, 5).

        ``end`` is that of the class in seconds, or infinite. Row by row, a mix is charged most.
        """
        import highspy

        # Charges of a batch sum to at most its time. Rows are over their times, and columns over
        # their largest entries, so that numbers are near 1.
        # Of a class of shorter batches than any at hand, the shortest of these stands in.
        some = self.contents[self.contents[:, -1] <= max(end, self.contents[:, -1].min())]
        rows = some[:, :-1] / some[:, -1:]
        scale = rows.max(axis=0)
        scale[scale == 0] = 1 / some[:, -1].max()  # no batch at hand has any
        model, count = highspy.Highs(), TERMS - 1
        model.setOptionValue("output_flag", False)
        model.setOptionValue("threads", 1)
        model.setOptionValue("primal_feasibility_tolerance", 1e-9)
        # A token pays for a batch at most, even if no batch at hand has one.
        most = some[:, -1].max() * scale
        model.addCols(count, np.zeros(count), np.zeros(count), most, 0, [], [], [])
        begins = np.arange(len(rows), dtype=np.int32) * count
        columns = np.tile(np.arange(count, dtype=np.int32), len(rows))
        unbounded = np.full(len(rows), -highspy.kHighsInf)
        values = (rows / scale).ravel()
        model.addRows(len(rows), unbounded, np.ones(len(rows)), rows.size, begins, columns, values)
        # Of m cached tokens, what a decode is charged less what a refill of m + 1 is.
        for m in self.refills.tolist():
            row = np.array([1, m, m + 1, -(m + 1), 0]) / scale
            model.addRow(-highspy.kHighsInf, 0.0, count, columns[:count], row / np.abs(row).max())

        model.changeObjectiveSense(highspy.ObjSense.kMaximize)
        found = np.empty((len(mixes), count))

        for row, mix in enumerate(mixes):
            self.check()
            goal = mix / scale
            model.changeColsCost(count, np.arange(count, dtype=np.int32), goal / goal.max())
            model.run()
            found[row] = np.maximum(0.0, model.getSolution().col_value) / scale

        return found

    def vertices(self, ends: Floats, mixes: Floats, near: float = _NEAR) -> Floats:
        """Return charges that are proved, shape (ends, mixes, 5), nearly the best ones.

        Each turn takes the best charges by the rows at hand, divides them by what proves them, and
        adds the batches that they charged too much. Early turns scan batches coarsely.
        """
        proved = np.zeros((len(ends), len(mixes), TERMS - 1))
        rest = np.ones(proved.shape[:2], bool)  # by class and mix, whether it is not near yet
        for turn in range(_ROUNDS):
            within = max(near / 4, _COARSE / 4**turn)
            try:
                open_ends = np.flatnonzero(rest.any(axis=1))
                found = [self.best(ends[b], mixes[rest[b]]) for b in open_ends]
                until = np.repeat(ends, rest.sum(axis=1))
                # Vectors that are alike are scanned once: ``back`` says which of those each is. The
                # first place, which has the end meanwhile, is that of a charge per batch: none.
                rows = np.insert(np.concatenate(found), 0, until, axis=1)
                once, back = np.unique(rows, axis=0, return_inverse=True)
                until = once[:, 0].copy()
                once[:, 0] = 0.0
                ratio, worst = witnesses(self.batches, once, until, within=within, check=self.check)
            except OutOfTimeError:
                # What earlier turns have proved stands.
                if turn == 0:
                    raise

                break

            # A ratio above 1 says that some batch, its row of ``worst``, is charged more than it
            # lasts (`witnesses`).
            proved[rest] = rows[:, 1:] / np.maximum(ratio[back.ravel(), None], 1)
            # No charges are above the best under the batches at hand, so those that are near these
            # are near the best of all.
            rest[rest] = ratio[back.ravel()] > 1 + near
            if not rest.any() or self.rounds.over:
                break

            # The batches of vectors that are only just near become rows, too.
            self._add(np.unique(worst[ratio > 1 + near / 2], axis=0))

        return proved


def _edges(plan: _Plan, mix: Floats, shortest: float, count: int) -> Floats:
    """Return lengths between which work per second and lengths change by as much.

    They are the ends of so many classes (``count``) but the last. ``mix`` has the tokens that are
    charged, and ``shortest`` the seconds of the shortest batch. The longest length is that beyond
    which the charges hardly change: what they say of the mix is within 2 percent of what those of
    the last class say.
    """
    last = plan.vertices(np.array([np.inf]), mix[None], _COARSE)[0, 0] @ mix
    longest = shortest
    while longest < 1e4 * shortest:
        longest *= 1.5
        if plan.best(longest, mix[None])[0] @ mix <= 1.02 * last:
            break

    # The first length is above the shortest end that is allowed, by as much as that is above the
    # shortest batch.
    lengths = np.geomspace(2 * _SHORTEST * shortest - shortest, longest, _LENGTHS)
    paid = plan.vertices(lengths, mix[None], _COARSE)[:, 0] @ mix
    paid = np.maximum.accumulate(paid[::-1])[::-1]  # what is valid for longer batches is for all
    # ``last / paid`` rises up to 1, and lengths that grow by a factor of e count for a quarter.
    change = np.diff(last / np.maximum(paid, last)) + np.diff(np.log(lengths)) / 4
    along = np.append(0.0, np.cumsum(change))
    return np.interp(np.linspace(0, along[-1], count)[1:], along, lengths)
