"""The ratios of policies over many instances: rows, means, pairs, and tables of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.columns import check_choice
from optsched.problem.errors import InputError
from optsched.problem.markup import latex, table
from optsched.problem.objective import TOTAL_LATENCY, Objective
from optsched.problem.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame

# How many samples of the instances a confidence interval is taken from.
_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """The ratio of one policy on one instance: its value of the objective over the reference.

    Where more is better it is the reference over the value, so that no ratio is below 1 either way.

    Parameters
    ----------
    policy : str
    instance : int
        Position of the instance in the study, from 0.
    name : str
    value : float or None
        The objective in the instance's time unit, as the mean over seeds. None if the policy
        failed.
    low, high : float or None
        The ratio lies in [low, high]. The two are equal if the reference is known exactly, and
        ``high`` is None without a bound.
    error : str or None
        Why there is no latency or no ratio. There is no ratio for a schedule outside the model of
        the reference (`optsched.optimize.strategies.outside_reason`), such as one of several
        workers.
    rule : str or None
        The constraint that the policy's schedule breaks, as `ViolationError` calls it.
    bound, best_known : float or None
        The reference lies between these two, which are equal if it is known exactly.
    """

    policy: str
    instance: int
    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    error: str | None = None
    rule: str | None = None
    bound: float | None = None
    best_known: float | None = None

    def between(self, goal: Objective, bound: float | None, best_known: float | None) -> Ratio:
        """Return the ratio to a reference that lies between two values.

        Parameters
        ----------
        goal : Objective
        bound, best_known : float or None
        """
        assert self.value is not None
        low = 1.0 if best_known is None else goal.quotient(self.value, best_known)
        high = None if not bound else goal.quotient(self.value, bound)
        return replace(self, low=low, high=high, bound=bound, best_known=best_known)

    @property
    def exact(self) -> bool:
        """Whether the ratio is known exactly."""
        return self.low is not None and self.low == self.high


@dataclass(frozen=True)
class Mean:
    """The mean ratio of a policy over instances, which lies in [low, high].

    Parameters
    ----------
    low, high : float
        Means of the ratios' lower and upper ends. ``high`` is infinite if a bound is missing.
    interval : tuple of float
        Confidence interval of the mean over instances. Its lower limit is that of ``low``, and its
        upper limit that of ``high``.
    count, failed : int
        Number of instances with a ratio, and of those without.
    exact : bool
        Whether every ratio is known exactly.
    """

    low: float
    high: float
    interval: tuple[float, float]
    count: int
    failed: int
    exact: bool

    def __repr__(self) -> str:
        middle = f"{self.low:.4f}" if self.exact else f"{self.low:.4f} to {self.high:.4f}"
        bottom, top = self.interval
        return f"<Mean {middle} ({bottom:.4f} to {top:.4f}) of {self.count}>"


@dataclass(frozen=True)
class Paired:
    """Two policies on the same instances, compared by the quotient of their values.

    Parameters
    ----------
    first, second : str
    quotient : float
        Geometric mean over instances of first / second. No optimum is needed.
    interval : tuple of float
        Confidence interval of the quotient.
    wins, ties, losses : int
        Number of instances on which the first policy is better, equal and worse.
    objective : str
    """

    first: str
    second: str
    quotient: float
    interval: tuple[float, float]
    wins: int
    ties: int
    losses: int
    objective: str = TOTAL_LATENCY.name

    def __str__(self) -> str:
        low, high = self.interval
        between = f" ({low:.4f} to {high:.4f})" if low < high else ""
        return (
            f"{self.first} has {self.quotient:.4f} times the {self.objective} of {self.second}"
            f"{between}: better on {self.wins}, equal on {self.ties}, worse on {self.losses}"
        )


@dataclass(frozen=True, eq=False)
class Study:
    """The ratios of policies over instances, as `ratios` returns them.

    Parameters
    ----------
    policies : tuple of str
    reference : str
        The reference of the ratios.
    rows : tuple of Ratio
        The ratios by instance, and for each instance in the order of the policies.
    confidence : float
        Confidence of the intervals, such as 0.95.
    seed : int
        Seed of the policies' runs, and of the resampling for the intervals.
    unfinished : int
        Number of instances without rows, because the work was stopped before they had run.
    uncertified : tuple of str
        The instances without a certificate of the optimum, if these were asked for, and which
        method solved each.
    objective : Objective
    """

    policies: tuple[str, ...]
    reference: str
    rows: tuple[Ratio, ...]
    confidence: float
    seed: int
    unfinished: int = 0
    uncertified: tuple[str, ...] = ()
    objective: Objective = TOTAL_LATENCY

    def of(self, policy: str) -> list[Ratio]:
        """Return a policy's ratios, one per instance.

        Parameters
        ----------
        policy : str
            One of ``policies``.
        """
        check_choice(policy, "policy", self.policies)
        return [row for row in self.rows if row.policy == policy]

    def mean(self, policy: str) -> Mean:
        """Return a policy's mean ratio with its confidence interval, by bootstrap over instances.

        Parameters
        ----------
        policy : str
            One of ``policies``.
        """
        rows = self._with_ratio(policy)
        low = np.array([row.low for row in rows], dtype=np.float64)
        high = np.array([np.inf if row.high is None else row.high for row in rows])
        return Mean(
            low=float(low.mean()),
            high=float(high.mean()),
            interval=(self._interval(low)[0], self._interval(high)[1]),
            count=len(rows),
            failed=len(self.of(policy)) - len(rows),
            exact=all(row.exact for row in rows),
        )

    def worst(self, policy: str) -> Ratio:
        """Return the policy's row with the largest certain ratio, which is its lower end.

        The largest ratio of all is at least its ``low``, and at most the largest ``high``.

        Parameters
        ----------
        policy : str
            One of ``policies``.
        """
        return max(self._with_ratio(policy), key=lambda row: row.low or 0.0)

    def paired(self, first: str, second: str) -> Paired:
        """Compare two policies on the instances that both finished.

        Parameters
        ----------
        first, second : str
            Two of ``policies``.

        Returns
        -------
        Paired
        """
        rows = zip(self.of(first), self.of(second), strict=True)
        # Without a value a policy has failed, and 0 has no logarithm.
        values = [(one.value, other.value) for one, other in rows if one.value and other.value]
        if not values:
            raise InputError(
                f"policies {first!r} and {second!r}: found no instance that both finished; "
                "expected at least one"
            )

        ours, theirs = np.array(values, dtype=np.float64).T
        # A geometric mean, so that swapping the policies inverts the quotient.
        logs = np.log(ours / theirs)
        low, high = np.exp(self._interval(logs)).tolist()
        smaller, larger = int((ours < theirs).sum()), int((ours > theirs).sum())
        wins, losses = (larger, smaller) if self.objective.maximized else (smaller, larger)
        return Paired(
            first=first,
            second=second,
            quotient=float(np.exp(logs.mean())),
            interval=(low, high),
            wins=wins,
            ties=int((ours == theirs).sum()),
            losses=losses,
            objective=str(self.objective),
        )

    def pairs(self) -> list[Paired]:
        """Return the first policy beside each other one with which it finished an instance."""
        first, *others = self.policies
        pairs = []
        for other in others:
            with suppress(InputError):  # there is no instance that both finished
                pairs.append(self.paired(first, other))

        return pairs

    def labelled(self, labels: Sequence[str]) -> Study:
        """Return the study with other names of its policies, in their order.

        Parameters
        ----------
        labels : sequence of str
        """
        if len(set(labels)) != len(self.policies) or len(labels) != len(self.policies):
            raise InputError(
                f"labels: found {', '.join(labels)}; expected {len(self.policies)} that differ"
            )

        names = dict(zip(self.policies, labels, strict=True))
        rows = tuple(replace(row, policy=names[row.policy]) for row in self.rows)
        return replace(self, policies=tuple(labels), rows=rows)

    def __repr__(self) -> str:
        return f"<Study of {len(self.rows)} ratios to {self.reference}>"

    def _repr_html_(self) -> str:
        summary = self.summary()
        return table(repr(self), list(map(str, summary)), summary.to_numpy().tolist())

    def to_frame(self) -> DataFrame:
        """Return the ratios, a row for each instance and policy; values are under the metric."""
        from pandas import DataFrame

        rows = DataFrame([vars(row) for row in self.rows])
        return rows.rename(columns={"value": self.objective.name})

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``ratios --json``."""
        columns = self.to_frame().astype(object)
        return {
            "format": "optsched-ratios",
            "version": 1,
            "optsched": __version__,
            "objective_name": str(self.objective),
            "reference": self.reference,
            "unfinished": self.unfinished,
            "uncertified": self.uncertified,
            "summary": self.summary().to_dict("records"),
            "paired": [vars(pair) for pair in self.pairs()],
            "ratios": columns.where(columns.notna(), None).to_dict("list"),
        }

    def summary(self) -> DataFrame:
        """Return a row of texts for each policy, as in a paper's table.

        Columns are the mean ratio, its confidence interval, the largest ratio (an interval where an
        optimum is not proved), the instance of it, and the number of instances. A dash stands for
        an interval over one instance, and for the ratios of a policy that has none.
        """
        from pandas import DataFrame

        interval, mean_words = f"{self.confidence:.0%} interval", f"mean ratio to {self.reference}"
        columns = ["policy", mean_words, interval, "worst", "on", "instances"]
        return DataFrame([self._summary_row(policy) for policy in self.policies], columns=columns)

    def _summary_row(self, policy: str) -> tuple[str, ...]:
        """Return a policy's row of `summary`."""
        try:
            mean, worst = self.mean(policy), self.worst(policy)
        except InputError:  # it has no ratio on any instance
            return policy, "-", "-", "-", "-", f"0 ({len(self.of(policy))} failed)"

        def between(low: float, high: float) -> str:
            return f"{low:.4f}" if low == high else f"{low:.4f} to {high:.4f}"

        # The worst ratio lies between the largest lower end and the largest upper end (`worst`).
        highs = [math.inf if row.high is None else row.high for row in self._with_ratio(policy)]
        return (
            policy,
            between(mean.low, mean.high),
            "-" if mean.count == 1 else between(*mean.interval),
            between(worst.low or 0.0, max(highs)),
            worst.name or f"instance {worst.instance}",
            f"{mean.count} ({mean.failed} failed)" if mean.failed else str(mean.count),
        )

    def to_latex(self) -> str:
        """Return `summary` as a LaTeX table with numbers in mathematics, which needs jinja2."""
        return latex(self.summary(), "lrrrlr")

    def errors(self) -> list[str]:
        """Return why policies have no ratio on some instances, or these no proof or certificate.

        It is a line for each policy, with the first instance, one for proofs and one for
        certificates.
        """
        lines = []
        for policy in self.policies:
            rows = self.of(policy)
            failed = [row for row in rows if row.error is not None]
            if failed:
                why = str(failed[0].error).removeprefix(f"policy {policy!r}: ")
                share = f"{len(failed)} of {len(rows)} instances, the first {failed[0].name}"
                lines.append(f"{policy}: failed on {share}: {why}")

        # Of each instance one row, since all its policies have the same reference.
        unproved = {row.instance: row for row in self.rows if row.low is not None and not row.exact}
        if unproved and self.reference == "optimum":
            count = len({row.instance for row in self.rows})
            first = next(iter(unproved.values())).name
            lines.append(f"optimum: not proved on {len(unproved)} of {count}, the first {first}")
        if self.uncertified:
            share = f"{len(self.uncertified)} instances, the first {self.uncertified[0]}"
            lines.append(f"certificates of the optimum: none for {share}")

        return lines

    def to_markdown(self) -> str:
        """Return `summary` as a Markdown table."""
        summary = self.summary()
        columns = list(summary.columns)
        rows = [columns, ["---"] * len(columns), *summary.to_numpy().tolist()]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", *self.errors()] if self.errors() else []
        if self.unfinished:
            lines += ["", f"stopped early: {self.unfinished} instances have not run"]

        return "\n".join(lines)

    def _with_ratio(self, policy: str) -> list[Ratio]:
        """Return a policy's rows that have a ratio. If there is none, an error is raised."""
        rows = self.of(policy)
        complete = [row for row in rows if row.low is not None]
        if not complete:
            raise InputError(f"policy {policy!r}: found no ratio on any instance: {rows[0].error}")

        return complete

    def _interval(self, values: NDArray[np.float64]) -> tuple[float, float]:
        """Return the confidence interval of a mean, by the means of resampled instances."""
        if not np.isfinite(values).all():
            return math.inf, math.inf  # a bound is missing, and with it the end of a ratio

        rng = np.random.default_rng(self.seed)
        means = values[rng.integers(0, len(values), size=(_RESAMPLES, len(values)))].mean(axis=1)
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(means, [tail, 1 - tail]).tolist()
        return low, high
