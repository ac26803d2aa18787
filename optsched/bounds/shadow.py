"""Shadow prices: what one more KV token would save in each round, and the bound they prove."""

import numpy as np

from optsched.bounds.ascent import raise_dual
from optsched.bounds.base import IN_ROUNDS, Bound, BoundTask, Proof
from optsched.bounds.certificate import make_certificate
from optsched.bounds.dual import Prices, dual_value
from optsched.bounds.leaves import prices_leaf
from optsched.bounds.timeline import model_of
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance


def best_prices(instance: Instance, *, time_limit_s: float = 20.0) -> tuple[Prices, int]:
    """Return the best prices found and the bound that they prove."""
    if not instance.in_rounds:
        raise UsageError("shadow prices: found an instance in seconds; expected one in rounds")

    return _prices_within(instance, Budget(time_limit_s))


def _prices_within(instance: Instance, budget: Budget) -> tuple[Prices, int]:
    found: list[tuple[int, Prices]] = []

    def report(prices: Prices) -> None:
        found.append((dual_value(instance, prices), prices))
        budget.tell(bound=max(value for value, _ in found))

    report(Prices(np.array([1]), np.array([0]), 1))  # the sum of outputs, which takes no time
    raise_dual(model_of(instance), over=lambda: budget.over, report=report)
    # The dual only rises. Among values that are equal after rounding up, the last is the largest.
    value = max(value for value, _ in found)
    return next(prices for reached, prices in reversed(found) if reached == value), value


def prove_by_prices(task: BoundTask, budget: Budget) -> Proof:
    """Return the largest dual value found, with its certificate (`optsched.bounds.dual`)."""
    prices, value = _prices_within(task.instance, budget)
    certificate = make_certificate(
        task.instance, prices_leaf(prices), value=value, denominator=prices.denominator
    )
    return Proof(value, certificate)


_DUAL = "prices of KV memory: the Lagrangian dual of the memory rows"
DUAL = Bound(
    "dual", _DUAL, "round", ("tel",), prove_by_prices, IN_ROUNDS, searches=True, certifies=True
)
