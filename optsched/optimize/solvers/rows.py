"""Rows of a linear model, collected one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from optsched.optimize.solvers.base import LinearModel


class Rows:
    """Rows of the form lower <= sum(value * column) <= upper.

    Attributes
    ----------
    column : list of int
        The column of every nonzero, row after row.
    value : list of float
        The coefficient of every nonzero.
    end : list of int
        Where each row's nonzeros end.
    lower, upper : list of float
        Bounds of the rows.
    """

    def __init__(self) -> None:
        self.column: list[int] = []
        self.value: list[float] = []
        self.end: list[int] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(
        self,
        entries: Iterable[tuple[int, float]],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> None:
        """Add a row."""
        for column, value in entries:
            if value:
                self.column.append(column)
                self.value.append(value)

        self.end.append(len(self.column))
        self.lower.append(lower)
        self.upper.append(upper)

    def model(
        self,
        *,
        cost: ArrayLike,
        lower: ArrayLike,
        upper: ArrayLike,
        integrality: ArrayLike,
        integral_objective: bool = False,
    ) -> LinearModel:
        """Return the model of these rows, given the columns."""
        costs = np.asarray(cost, dtype=np.float64)
        column, lengths = np.array(self.column, dtype=np.int64), np.diff([0, *self.end])
        order = np.argsort(column, kind="stable")
        start = np.zeros(len(costs) + 1, dtype=np.int32)
        np.cumsum(np.bincount(column, minlength=len(costs)), out=start[1:])

        return LinearModel(
            cost=costs,
            lower=np.asarray(lower, dtype=np.float64),
            upper=np.asarray(upper, dtype=np.float64),
            integrality=np.asarray(integrality, dtype=np.int32),
            start=start,
            index=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[order],
            value=np.array(self.value, dtype=np.float64)[order],
            row_lower=np.array(self.lower, dtype=np.float64),
            row_upper=np.array(self.upper, dtype=np.float64),
            integral_objective=integral_objective,
        )
