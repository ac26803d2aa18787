"""Shadow prices: what one more KV token would save in each round, and the bound they prove."""

from contextlib import suppress
from typing import Any

import numpy as np

from optsched.bounds.ascent import raise_dual
from optsched.bounds.base import IN_ROUNDS, Bound, BoundTask, Proof
from optsched.bounds.certificate import Steps, make_certificate
from optsched.bounds.checker.parts import TooLarge
from optsched.bounds.checker.prices import NEVER
from optsched.bounds.checker.starts import lowest_value, starts_of
from optsched.bounds.dual import Prices, dual_value, prices_in_rounds, runs_of
from optsched.bounds.leaves import prices_leaf, starts_leaf
from optsched.bounds.timeline import Ints, busy_prices, model_of
from optsched.problem.budget import Budget
from optsched.problem.errors import OutOfTimeError, UsageError
from optsched.problem.instance import Instance

# The part of the value, 1 / 200, by which a search for starts raises its limit at first, and its
# max steps.
_PARTS, _MAX_STEPS = 200, 30_000_000
# Multiples of the prices by Smith's rule that are tried, and no prices.
_SHARES, _FREE = (0.8, 0.9, 1.0, 1.1, 1.2), Prices(np.array([1]), np.array([0]), 1)


def best_prices(instance: Instance, *, time_limit_s: float = 20.0) -> tuple[Prices, int]:
    """Return the best prices found and the bound that they prove."""
    if not instance.in_rounds:
        raise UsageError("shadow prices: found an instance in seconds; expected one in rounds")

    return _prices_within(instance, Budget(time_limit_s))


def _prices_within(
    instance: Instance, budget: Budget, weight: Ints | None = None
) -> tuple[Prices, int]:
    """Return the best prices found within a budget and the bound that they prove.

    With weights the bound is one on the weighted latency.
    """
    tried: list[tuple[int, Prices]] = []
    weight_f = None if weight is None else weight.astype(np.float64)

    def report(prices: Prices) -> None:
        tried.append((dual_value(instance, prices, weight), prices))
        budget.tell(bound=max(value for value, _ in tried))

    report(_FREE)  # the sum of outputs, which takes no time
    raise_dual(model_of(instance), over=lambda: budget.over, report=report, weight=weight_f)
    # Later prices are mostly better: of values that are equal after rounding up the last is taken.
    best = max(value for value, _ in tried)
    return next(prices for value, prices in reversed(tried) if value == best), best


def prove_by_prices(task: BoundTask, budget: Budget) -> Proof:
    """Return the largest dual value found, with its certificate (`optsched.bounds.dual`)."""
    prices, value = _prices_within(task.instance, budget)
    certificate = make_certificate(
        task.instance, prices_leaf(prices), value=value, denominator=prices.denominator
    )
    return Proof(value, certificate)


def prove_by_smith(task: BoundTask, budget: Budget) -> Proof:
    """Return the largest dual value that some multiples of the prices by Smith's rule have.

    It is the same dual (`optsched.bounds.checker.prices`), whose prices are not raised further.
    """
    instance, weight = task.instance, task.instance.weights
    model = model_of(instance)
    dense = busy_prices(model, weight.astype(np.float64))
    tried = [_FREE, *(prices_in_rounds(model, share * dense) for share in _SHARES)]
    value, prices = max(
        ((dual_value(instance, p, weight), p) for p in tried), key=lambda pair: pair[0]
    )
    return _proof_of_weights(task, value, prices_leaf(prices), prices.denominator)


def prove_by_starts(task: BoundTask, budget: Budget) -> Proof:
    """Return the lowest weighted value, or what the raised dual and the search for it proved.

    `optsched.bounds.checker.starts` has the proof. It looks below one limit after another, each
    further above what is proved, up to the value of a schedule that is known. ``unit`` is the
    denominator of the prices, and values are in rounds.
    """
    instance, weight = task.instance, task.instance.weights
    prices, value = _prices_within(instance, budget, weight)
    leaf, unit = prices_leaf(prices), prices.denominator
    step, lowest = max(1, value // _PARTS), None
    # What was proved before the time is over, or a search too large, stays.
    with suppress(OutOfTimeError, TooLarge):
        rows = prices.from_round.tolist(), prices.price.tolist()
        starts = starts_of(runs_of(instance, weight), instance.kv_capacity, *rows, unit)
        known = _known_latency(task)
        while lowest is None and value < known:
            limit = min(value + step, known)
            lowest = lowest_value(starts, limit, Steps(lambda: budget.over, _MAX_STEPS))
            # If no schedule is below the limit, that is proved; else the lowest one is found.
            value = limit if lowest is None else lowest
            leaf = starts_leaf(prices, value)
            step *= 2

    return _proof_of_weights(task, value, leaf, unit)


def _known_latency(task: BoundTask) -> int:
    """Return the weighted latency of the schedule that is known, or more than any."""
    instance, known = task.instance, task.known
    if known is None or known.starts is None:
        return NEVER

    waits = known.starts + instance.output_tokens - instance.release_times.astype(np.int64)
    return int((instance.weights * waits).sum())


def _proof_of_weights(task: BoundTask, value: int, leaf: dict[str, Any], unit: int) -> Proof:
    """Return the proof of weighted latency, or of completions, which adds weights at arrivals."""
    instance, name = task.instance, task.goal.name
    if name == "weighted_completion":
        value += int((instance.weights * instance.release_times).sum())

    made = make_certificate(instance, leaf, value=value, denominator=unit, objective=name)
    return Proof(value, made)


_DUAL = "prices of KV memory: the Lagrangian dual of the memory rows"
DUAL = Bound(
    "dual", _DUAL, "round", ("tel",), prove_by_prices, IN_ROUNDS, searches=True, certifies=True
)
_SMITH = "prices of KV memory by Smith's rule"
_GOALS = ("weighted_latency", "weighted_completion")
SMITH = Bound("smith", _SMITH, "round", _GOALS, prove_by_smith, IN_ROUNDS, certifies=True)
_STARTS = "the few starts that raised prices of KV memory leave"
STARTS = Bound(
    "starts", _STARTS, "round", _GOALS, prove_by_starts, IN_ROUNDS, searches=True, certifies=True
)
