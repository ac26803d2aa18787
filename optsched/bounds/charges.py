"""Charges by batch length: what tokens pay of a batch, found by cutting planes.

docs/formulations.md, "Charges by batch length", has the lemma. A minorant (phi, a, b, k, g, d) over
the batches that fit a machine gives charges (a, ..., d) hi / (hi - phi) for all batches that last
at most hi. Which of the minorants is best depends on who shares the batch. So there are several per
class, each the best for another *target*, a mix of tokens.

Linear programs find them. With nu = hi / (hi - phi) the charges c of a class are those with
c x + nu (hi - T) <= hi for every batch of content x and time T. A batch is a row, the same for all
classes; rows come from `optsched.bounds.checker.charges`, which also has the last word.
"""

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
# How far charges may be below the best ones, relatively, and what scans begin with.
_NEAR, _COARSE = 2e-4, 1e-2


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
    fixed : ndarray of float64, shape (classes, vertices)
        The base phi of the minorants, in seconds.
    """

    lo: Floats
    hi: Floats
    vectors: Floats
    fixed: Floats

    @property
    def minorants(self) -> Floats:
        """The minorants from which the charges come, shape (classes, vertices, 6), phi first."""
        less = 1 - self.fixed / self.hi[:, None]
        return np.dstack([self.fixed, self.vectors * less[:, :, None]])


def charges_of(lo: Floats, hi: Floats, minorants: Floats) -> Charges:
    """Return the charges of classes from minorants.

    Parameters
    ----------
    lo, hi : ndarray of float64, shape (classes,)
    minorants : ndarray of float64, shape (classes, vertices, 6)
        Each is at most the time of every batch, and its first number phi is below ``hi``.
    """
    fixed = minorants[:, :, 0]
    more = (1 / (1 - fixed / hi[:, None]))[:, :, None]
    return Charges(lo, hi, more * minorants[:, :, 1:] * (1 - 1e-12), fixed)


def class_charges(
    task: BoundTask,
    targets: ArrayLike | None = None,
    edges: ArrayLike | None = None,
    budget: Budget | None = None,
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
    edges : array_like, shape (classes - 1,), optional
        Ascending lengths in seconds that end the classes but the last. By default they are chosen
        so that charges and lengths change by as much from each to the next.
    budget : Budget, optional
        After a part of it, what is found so far is returned.

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
    ratio, found = witnesses(batches, np.eye(1, TERMS), check=partial(budget.check, _DOING))
    if not np.isfinite(ratio[0]):
        raise Rejected("cost table: found a batch of no time by the tables; expected times > 0")

    shortest, plan = 1 / float(ratio[0]), _Plan(batches, found, budget)
    ends = _edges(plan, mixes.mean(axis=0), shortest) if edges is None else np.asarray(edges, float)
    if not (np.diff(ends, prepend=_SHORTEST * shortest) > 0).all():
        raise UsageError(
            f"edges: found others; expected ascending seconds above {_SHORTEST * shortest:.6g}"
        )

    hi = np.append(ends, np.inf)
    minorants = plan.vertices(hi, mixes)
    return charges_of(np.append(shortest, ends), hi, minorants)


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
    """The linear program over charges, whose rows are batches, and which only its ends change."""

    def __init__(self, batches: Batches, shortest: Floats, budget: Budget) -> None:
        self.batches, self.contents = batches, shortest
        self.rounds, self.check = budget.part(_ROUNDS_SHARE), partial(budget.check, _DOING)
        # The batches that alone charges, and pairs of them, would make too short, to begin with.
        alone = np.eye(TERMS)
        pairs = [alone[i] + alone[j] for i in range(TERMS) for j in range(i)]
        charges = np.array([*alone, *pairs])
        self._add(witnesses(batches, charges, within=_COARSE, check=self.check)[1])

    def _add(self, found: Floats) -> None:
        """Add batches: their contents and times."""
        self.contents = np.concatenate([self.contents, found[found[:, -1] > 0]])

    def best(self, end: float, mixes: Floats) -> Floats:
        """Return the best minorants for a class by the rows at hand, shape (mixes, 6)."""
        import highspy

        finite = np.isfinite(end)
        contents, times = self.contents[:, :-1], self.contents[:, -1]
        scale = np.maximum((contents / times[:, None]).max(axis=0), 1e-12)
        longer = np.maximum(times, end) if finite else times
        rows = np.empty((len(times), TERMS))
        rows[:, :-1] = contents / scale / longer[:, None]
        rows[:, -1] = (end - times) / longer if finite else 0.0
        upper = end / longer if finite else np.ones(len(times))
        model, count = highspy.Highs(), TERMS
        model.setOptionValue("output_flag", False)
        model.setOptionValue("threads", 1)
        model.setOptionValue("primal_feasibility_tolerance", 1e-9)
        lower = np.array([0.0] * (count - 1) + [1.0])
        free = np.array([highspy.kHighsInf] * (count - 1) + [highspy.kHighsInf if finite else 1.0])
        model.addCols(count, np.zeros(count), lower, free, 0, [], [], [])
        begins = np.arange(len(rows), dtype=np.int32) * count
        columns = np.tile(np.arange(count, dtype=np.int32), len(rows))
        unbounded = np.full(len(rows), -highspy.kHighsInf)
        model.addRows(len(rows), unbounded, upper, rows.size, begins, columns, rows.ravel())
        model.changeObjectiveSense(highspy.ObjSense.kMaximize)
        found = np.empty((len(mixes), TERMS))

        for row, mix in enumerate(mixes):
            self.check()
            goal = np.append(mix / scale, 0.0)
            goal /= goal.max()
            model.changeColsCost(count, np.arange(count, dtype=np.int32), goal)
            model.run()
            *charges, more = np.maximum(0.0, model.getSolution().col_value)
            more = max(1.0, more)
            found[row, 0] = end * (1 - 1 / more) if finite else 0.0
            found[row, 1:] = np.array(charges) / scale / more

        return found

    def vertices(self, ends: Floats, mixes: Floats, near: float = _NEAR) -> Floats:
        """Return minorants that are proved, shape (ends, mixes, 6), nearly the best ones."""
        proved: Floats | None = None
        for turn in range(_ROUNDS):
            within = max(near / 4, _COARSE / 4**turn)
            try:
                found = np.array([self.best(end, mixes) for end in ends])
                flat, back = np.unique(found.reshape(-1, TERMS), axis=0, return_inverse=True)
                ratio, worst = witnesses(self.batches, flat, within=within, check=self.check)
            except OutOfTimeError:
                if proved is None:
                    raise

                break

            proved = np.asarray((flat / ratio[:, None])[back].reshape(found.shape))
            if ratio.max() <= 1 + near or self.rounds.over:
                break

            self._add(np.unique(worst[ratio > 1 + near / 2], axis=0))

        assert proved is not None
        return proved


def _edges(plan: _Plan, mix: Floats, shortest: float) -> Floats:
    """Return lengths between which work per second and lengths change by as much.

    The longest is that beyond which the charges hardly change.
    """
    last = plan.vertices(np.array([np.inf]), mix[None], _COARSE)[0, 0, 1:] @ mix
    longest = shortest
    while longest < 1e4 * shortest:
        longest *= 1.5
        found = plan.best(longest, mix[None])[0]
        if found[1:] @ mix / (1 - found[0] / longest) <= 1.02 * last:
            break

    lengths = np.geomspace(2 * _SHORTEST * shortest - shortest, longest, _LENGTHS)
    found = plan.vertices(lengths, mix[None], _COARSE)[:, 0]
    paid = found[:, 1:] @ mix / (1 - found[:, 0] / lengths)
    paid = np.maximum.accumulate(paid[::-1])[::-1]  # what is valid for longer batches is for all
    change = np.diff(last / np.maximum(paid, last)) + np.diff(np.log(lengths)) / 4
    along = np.append(0.0, np.cumsum(change))
    return np.interp(np.linspace(0, along[-1], CLASSES)[1:], along, lengths)
