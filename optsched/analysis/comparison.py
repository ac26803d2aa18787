"""A comparison of policies: a row for each, with the best known value and a bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from optsched.costs.cost import CostModel
from optsched.costs.fleet import Fleet
from optsched.files.results import NOT_HERE, cost_model_reference, head, predictor_of
from optsched.optimize.bounded import Bounded
from optsched.problem.markup import number, table
from optsched.problem.metrics import METRICS, TABLE, compared, time_words
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd


BEST = "best known"
"""What tables and pictures call the best known schedule."""


Column = tuple[str, str, Callable[[dict[str, Any]], Any]]
"""A column of a table: words, unit, and the value of a row, an object of a file."""


def policy_columns(
    rows: Sequence[dict[str, Any]], time_unit: str | None, goal: str = TOTAL_LATENCY.name
) -> list[Column]:
    """Return the columns of every table of policies, from its name to its seconds.

    Parameters
    ----------
    rows : sequence of dict
        Objects of a comparison file.
    time_unit : str or None
    goal : str
        The metric of the objective.
    """
    all_metrics = [row.get("metrics") or {} for row in rows]

    def metric(name: str) -> Column:
        unit = TABLE[name].unit_words(time_unit)
        return TABLE[name].words, unit, lambda row: (row.get("metrics") or {}).get(name)

    def attainment(row: dict[str, Any]) -> float | None:
        share = (row.get("metrics") or {}).get("slo_attainment")
        return None if share is None else 100 * share

    def kind(row: dict[str, Any]) -> str:
        return next((name for name in ("measured", "clairvoyant") if row.get(name)), "")

    def wall(row: dict[str, Any]) -> float | None:
        return None if row.get("wall_s") is None else 1000 * row["wall_s"]

    has_slos = any(metrics.get("slo_attainment") is not None for metrics in all_metrics)
    return [
        ("policy", "", itemgetter("policy")),
        ("kind", "", kind),
        metric(goal),
        ("/ best known", "", lambda row: row.get("ratio_to_best_known")),
        ("/ bound", "", lambda row: row.get("ratio_to_bound")),
        *([("SLO attainment", "%", attainment)] if has_slos else []),
        *(metric(name) for name in compared(all_metrics) if name != goal),
        ("decisions", "ms", wall),
    ]


MEANING: Column = ("in words", "", lambda row: row.get("meaning"))
"""The column of what ratios mean."""


@dataclass(frozen=True, eq=False)
class PolicyRow:
    """One policy of a comparison.

    Parameters
    ----------
    policy : str
    clairvoyant : bool
        Whether it sees true output lengths, because the instance has no predictions.
    metrics : dict or None
        `Evaluation.metrics`, or None when there is no schedule.
    value : float or None
        The objective, if the schedule is inside the bound's model.
    inside : bool
        Whether the best known value and the bound apply to the schedule. Only then do ratios mean
        something.
    ratio_to_best_known, ratio_to_bound : float or None
        The objective over the best known value and over the bound, or the inverse where more is
        better. None where one of the two is unknown, or the schedule is outside the bound's model.
    wall_s : float or None
        Seconds that the decisions took, without their evaluation.
    notes : tuple of str
        Which features the instance switches off, and why there is no ratio.
    error : str or None
        Why there is no schedule: the policy loops, or needs features that the instance forbids, or
        its schedule is not valid.
    schedule : Schedule or None
    measured : bool
        Whether the row holds times measured on a real server instead of a policy's.
    rule : str or None
        The constraint that the policy's schedule breaks, as `ViolationError` calls it.
    """

    policy: str
    clairvoyant: bool = False
    metrics: Mapping[str, float | int | None] | None = None
    value: float | None = None
    inside: bool = False
    ratio_to_best_known: float | None = None
    ratio_to_bound: float | None = None
    wall_s: float | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None
    schedule: Schedule | None = None
    measured: bool = False
    rule: str | None = None

    @property
    def meaning(self) -> str | None:
        """What the ratios say, in words: ``at least 1.22 and at most 1.40 times the optimum``.

        None where there is no ratio, or where a measured server beats the bound. Digits are rounded
        outwards, so that the words hold.
        """
        low, high = self.ratio_to_best_known, self.ratio_to_bound
        beats_bound = high is not None and high < 1
        if low is None or beats_bound:
            return None
        if low == high:
            return f"{number(low)} times the optimum"

        upper = "" if high is None else f" and at most {outwards(high, ceil)}"
        return f"at least {outwards(low, floor)}{upper} times the optimum"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as an object of the comparison file."""
        names = ["policy", "clairvoyant", "measured", "metrics", "ratio_to_best_known"]
        names += ["ratio_to_bound", "meaning", "wall_s", "notes", "error"]
        return {name: getattr(self, name) for name in names} | {"notes": list(self.notes)}


def outwards(value: float, rounded: Callable[[float], int], decimals: int = 2) -> str:
    """Return a ratio rounded to some decimals, or to three where it is close to 1.

    Parameters
    ----------
    value : float
    rounded : callable
        `math.floor` for a lower end, `math.ceil` for an upper one.
    decimals : int
    """
    digits = 3 if value < 1.1 else decimals
    # A value that has these digits is not moved by the noise of its float.
    near = round(value * 10**digits, 6)
    return f"{rounded(near) / 10**digits:.{digits}f}"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Comparison(Bounded):
    """Policies evaluated on one instance. Ratios compare their values of the objective.

    ``value`` is the best known one: the best in the bound's model, of the solver's schedule, a
    search's or a policy's.

    Parameters
    ----------
    rows : tuple of PolicyRow
        One row for each policy, in the order asked for.
    cost_model : CostModel
    interrupted : bool
        Whether Ctrl-C came before everything had run.
    notes : tuple of str
        Why no optimum was found, where none can be.
    best : PolicyRow or None
        The best known schedule with the metrics that policies have.
    bounds : dict of str to float
        What no schedule on one worker, or on the pools, beats, by the name of the metric, where
        that is known.
    pools : Fleet, optional
        The machines that the policies ran on.
    """

    rows: tuple[PolicyRow, ...]
    cost_model: CostModel
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    best: PolicyRow | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    pools: Fleet | None = None

    @property
    def shown(self) -> list[PolicyRow]:
        """The rows of tables: those of policies that have metrics, and the best known schedule.

        What has ratios comes first; then by attainment where there are SLOs, and by the objective.
        """
        rows = [row for row in self.rows if row.metrics is not None]
        if self.best is not None and self.found_by not in [row.policy for row in rows]:
            rows.append(self.best)

        def rank(row: PolicyRow) -> tuple[bool, float, float]:
            metrics = row.metrics or {}
            attained = metrics.get("slo_attainment") or 0.0
            value = metrics.get(self._metric.name) or 0.0
            return not row.inside, -attained, -value if self.maximized else value

        return sorted(rows, key=rank)

    @property
    def predictor(self) -> str:
        """The source of the policies' output lengths: the instance's predictions, or the oracle."""
        return predictor_of(self.instance)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a comparison file."""
        return {
            **head("optsched-comparison", "compare", self.instance),
            "cost_model": cost_model_reference(self.instance, self.cost_model),
            "objective_name": self.objective_name,
            "status": self.status,
            "bound": self.bound,
            "bound_origin": self.method,
            "scope": self.scope.to_dict(),
            "certificate": None,
            "certificate_missing": NOT_HERE,
            "best_known": self.value,
            "best_known_origin": self.found_by,
            "gap": self.gap,
            "gap_definition": self.gap_definition.replace("objective", "best_known"),
            "predictor": self.predictor,
            "seed": self.seed,
            "interrupted": self.interrupted,
            "notes": list(self.notes),
            "best": None if self.best is None else self.best.to_dict(),
            "bounds": dict(self.bounds),
            "policies": [row.to_dict() for row in self.rows],
            **({} if self.pools is None else {"pools": self.pools.to_dict()}),
        }

    def _repr_html_(self) -> str:
        unit = time_words(self.instance.time_unit)
        shown = [row.to_dict() for row in self.shown]
        gap = "unknown" if self.gap is None else f"{self.gap:.2%}"
        below = (
            f"times in {unit}; best known {number(self.value)} ({self.found_by}), "
            f"bound {number(self.bound)} ({self.method}), gap {gap}"
        )
        if self.bound is not None:
            below += f"; the bound holds for {self.scope}"

        columns = policy_columns(shown, self.instance.time_unit, self._metric.name)
        columns += [MEANING] if any(row["meaning"] for row in shown) else []
        heads = [f"{words} [%]" if unit == "%" else words for words, unit, _ in columns]
        cells = [[value(row) for *_, value in columns] for row in shown]
        return table(f"Comparison on {self.instance.name}", heads, cells, below)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per policy: both ratios, every metric, the wall time and the error.

        Unknown values are NaN or None.
        """
        import pandas as pd

        rows = [
            {
                "policy": row.policy,
                "clairvoyant": row.clairvoyant,
                "ratio_to_best_known": row.ratio_to_best_known,
                "ratio_to_bound": row.ratio_to_bound,
                **{name: (row.metrics or {}).get(name) for name in METRICS},
                "wall_s": row.wall_s,
                "error": row.error,
            }
            for row in self.rows
        ]
        table = pd.DataFrame(rows)
        numbers = ["ratio_to_best_known", "ratio_to_bound", *METRICS, "wall_s"]
        return table.astype(dict.fromkeys(numbers, float))
