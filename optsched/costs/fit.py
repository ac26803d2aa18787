"""Cost models from profiles, fitted by relative least squares and tested on held-out rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import COEFFICIENTS
from optsched.costs.cost import BatchCost
from optsched.costs.devices import Device
from optsched.costs.hardware import kv_capacity
from optsched.costs.linear import non_negative
from optsched.costs.model_file import to_toml
from optsched.costs.profiles import read_profile
from optsched.costs.profiles.tables import COLUMN, Profile, Rejected, Table
from optsched.costs.table import no_skew
from optsched.costs.tabulate import interpolated, left_out, tabulate
from optsched.problem.errors import InputError

TARGET = 0.08
"""Mean relative error up to which `fit` accepts a range of validity."""
FOLDS = 5
MIN_SHAPES_PER_TERM = 3
"""Minimum number of different shapes per coefficient, including the held-out ones."""
MIN_SHARE = 0.25
"""Minimum share of the rows that a restricted range of validity must keep."""


@dataclass(frozen=True, eq=False)
class OperatorFit:
    """How well the fitted model predicts the rows of one operator in the range of validity.

    An error is |predicted / measured - 1|.

    Parameters
    ----------
    operator : str
    rows, held_out, outside : int
        Numbers of rows used to fit, rows held out to test, and rows outside the range of
        validity.
    mean, median, p95 : float
        Mean, median and 95th percentile of the errors on held-out rows; NaN without any row.
    r2 : float
        Coefficient of determination over all rows in the range.
    mean_outside : float
        Mean error on the rows outside the range; NaN without any.
    measured_ms, predicted_ms : ndarray of float64, shape (rows + held_out,)
        Times of all rows in the range, in milliseconds.
    tested : ndarray of bool, shape (rows + held_out,)
        Which of these rows were held out.
    reached : bool
        Whether the mean error is within the target.
    """

    operator: str
    rows: int
    held_out: int
    outside: int
    mean: float
    median: float
    p95: float
    r2: float
    mean_outside: float
    measured_ms: NDArray[np.float64]
    predicted_ms: NDArray[np.float64]
    tested: NDArray[np.bool_]
    reached: bool


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted cost model and the evidence for it.

    Parameters
    ----------
    cost_model : BatchCost
    operators : tuple of OperatorFit
        Errors of the model, one entry per operator.
    rejected : tuple of Rejected
        Rows that are faster than the device can be.
    profile : Profile
        What the model was fitted to.
    seed : int
        Seed of the split into training and held-out shapes.
    target : float
        Mean relative error that was asked for.
    held_out : float
        Share of the shapes that were held out for testing.
    """

    cost_model: BatchCost
    operators: tuple[OperatorFit, ...]
    rejected: tuple[Rejected, ...]
    profile: Profile
    seed: int
    target: float
    held_out: float

    def rows(self) -> list[dict[str, Any]]:
        """Return the report as one dict per operator.

        Returns
        -------
        list of dict
            ``operator``, ``rows``, ``held_out``, ``outside``, ``mean_error``, ``median_error``,
            ``p95_error``, ``r2`` and ``reached``; see `OperatorFit`. None where a value is
            unknown.
        """
        errors = {"mean_error": "mean", "median_error": "median", "p95_error": "p95", "r2": "r2"}
        return [
            {name: getattr(o, name) for name in ("operator", "rows", "held_out", "outside")}
            | {name: _known(getattr(o, own)) for name, own in errors.items()}
            | {"reached": o.reached}
            for o in self.operators
        ]

    def to_toml(self) -> str:
        """Return the text of the cost model's TOML file.

        Returns
        -------
        str
            The errors of the fit stand as comments at its top.
        """
        lacks = [f"MISSING: {part} costs nothing" for part in self.profile.missing]
        return to_toml(self.cost_model, [*lacks, *(self._summary(o) for o in self.operators)])

    def _summary(self, o: OperatorFit) -> str:
        if np.isnan(o.mean):
            return f"{o.operator}: none of its {o.outside} rows is within the range of validity"

        verdict = "" if o.reached else f", MORE than the target of {self.target:.0%}"
        return (
            f"{o.operator}: {o.rows} rows; {o.held_out} held out: mean error {o.mean:.1%}, median "
            f"{o.median:.1%}, p95 {o.p95:.1%}; R2 {o.r2:.4f}{verdict}"
        )


def fit(
    profiles: str | Path | Profile,
    *,
    model: str | None = None,
    tensor_parallel: int | None = None,
    hardware: str | Device | None = None,
    link_gb_s: float | None = None,
    only: Mapping[str, str] | None = None,
    partial: bool = False,
    name: str | None = None,
    held_out: float = 0.2,
    target: float = TARGET,
    seed: int = 0,
) -> Fit:
    """Fit a cost model to a folder of profiles.

    Coefficients are non-negative and minimize the squared relative error, so that a batch of a
    microsecond counts as much as one of a second. A share of the shapes is held out, with all
    repetitions of a shape, and the reported errors are those of the held-out rows.

    Small chunks or batches may not follow a linear model, since a kernel works in tiles and
    leaves processors idle. The range of validity then starts at the first power of two at which
    cross-validation on the training rows meets the target. The report says how many rows were
    left out, and the judge warns about schedules outside the range.

    The profile of LLMServingSim becomes a tabulated model (`optsched.costs.table`). Its errors are
    those of interpolation: every inner value of a grid is predicted from its two neighbours on each
    axis, and rows that are not on the grid from the grid.

    Parameters
    ----------
    profiles : str, path or Profile
        A folder, or what `optsched.costs.profiles.read_profile` returned for one.
    model : str, optional
        See `read_profile`.
    tensor_parallel : int, optional
        See `read_profile`.
    hardware : str or Device, optional
        See `read_profile`.
    link_gb_s : float, optional
        See `read_profile`.
    only : mapping of str to str, optional
        See `read_profile`.
    partial : bool
        Whether a profile may lack attention, which then costs nothing. The model's name and file
        say so.
    name : str, optional
        Name of the cost model. By default it is made of the model, the degree, the device and
        "fit".
    held_out : float
        Share of the shapes that are held out for testing, between 0 and 1.
    target : float
        Mean relative error to reach, > 0.
    seed : int
        Seed of the split.

    Returns
    -------
    Fit

    Raises
    ------
    InputError
        As for `read_profile`; ``held_out`` or ``target`` out of range; a table with too few
        different shapes; or a profile without dense operators, or without attention unless
        ``partial``.
    """
    if not 0 < held_out < 1:
        raise InputError(f"held_out: found {held_out!r}; expected a share between 0 and 1")
    if not target > 0:
        raise InputError(f"target: found {target!r}; expected a relative error > 0")

    profile = (
        profiles
        if isinstance(profiles, Profile)
        else read_profile(
            profiles,
            model=model,
            tensor_parallel=tensor_parallel,
            hardware=hardware,
            link_gb_s=link_gb_s,
            only=only,
        )
    )
    _check_whole(profile, partial)
    if profile.grids:
        return _tabulated(profile, name, target)

    generator = np.random.default_rng(seed)
    values = np.zeros(len(COEFFICIENTS))
    valid: dict[str, float] = {}
    parts = []

    for table in profile.tables:
        found, limits, operators = _fit_table(table, held_out, target, generator)
        values += found
        parts += operators

        for limit, value in limits.items():
            # A chunk, batch or context that is outside one table is outside the range.
            narrow = max if limit.startswith("min_") else min
            valid[limit] = narrow(value, valid[limit]) if limit in valid else value

    names = {c for table in profile.tables for c in table.terms}
    if "prefill_square" in names and "prefill_cross" not in names and values.any():
        values[COLUMN["prefill_cross"]] = 2 * values[COLUMN["prefill_square"]]
        names.add("prefill_cross")

    whole = any(table.whole_batch for table in profile.tables)
    cost_model = BatchCost(
        name=name or _name(profile),
        layers=1 if whole else profile.shape.layers,
        coefficients={
            key: f"{values[COLUMN[key]]:.6g}" for key in COEFFICIENTS if key in names
        },
        kv_capacity_tokens=_capacity(profile),
        provenance=_provenance(profile, seed, held_out),
        valid=valid,
    )  # fmt: skip
    return Fit(cost_model, tuple(parts), profile.rejected, profile, seed, target, held_out)


def _name(profile: Profile) -> str:
    lacks = [part.replace(" ", "-") for part in profile.missing]
    lacking = "-without-attention" if len(lacks) > 1 else "".join(f"-without-{p}" for p in lacks)
    return f"{profile.shape.name}-tp{profile.tensor_parallel}-{profile.hardware.name}-fit{lacking}"


def _check_whole(profile: Profile, partial: bool) -> None:
    """Raise InputError if a profile lacks a part, unless it is attention and that is wanted."""
    lacks = [part for part in profile.missing if part == "layers" or not partial]
    if lacks:
        where = " and ".join(dict.fromkeys(profile.files.get(part, "rows") for part in lacks))
        way = ", or --partial, which takes it for nothing" if "layers" not in lacks else ""
        raise InputError(
            f"profile of {profile.shape.name} ({profile.source}): found no {' and no '.join(lacks)}"
            f"; expected {where}{way}"
        )


def _tabulated(profile: Profile, name: str | None, target: float) -> Fit:
    """Return the tabulated model of a profile's grids, and the errors of interpolation."""
    dense, request, attention = profile.grids
    table, linear = tabulate(dense, request, attention, profile.skew or no_skew())
    checked = {"per token": dense, "per request": request, "attention": attention}
    reports = []

    for operator, grid in checked.items():
        measured, predicted = left_out(grid)
        reports.append(_interpolated(operator, grid.values.size, measured, predicted, target))

    if profile.apart is not None and len(profile.apart[1]):
        points, measured = profile.apart
        predicted = interpolated(attention, points)
        reports.append(_interpolated("attention, apart", 0, measured, predicted, target))

    axes = attention.axes
    cost_model = BatchCost(
        name=name or _name(profile),
        layers=profile.shape.layers,
        coefficients={
            key: f"{value:.6g}" for key, value in zip(COEFFICIENTS, linear, strict=True) if value
        },
        kv_capacity_tokens=_capacity(profile),
        provenance="; ".join([
            f"tabulated by optsched from profiles in {profile.source} of {profile.shape.name} on "
            f"{profile.hardware.name}, tensor parallel {profile.tensor_parallel}; the coefficients "
            "are a linear approximation, and price single requests alone",
            *profile.notes,
        ]),
        valid={
            "max_batch_tokens": float(dense.axes["tokens"][-1]),
            "max_prefill_chunk_tokens": float(axes["prefill_tokens"][-1]),
            "max_decode_requests": float(axes["decode_requests"][-1]),
            "max_request_kv_tokens": float(axes["decode_kv"][-1]),
        },
        table=table,
    )  # fmt: skip
    return Fit(cost_model, tuple(reports), profile.rejected, profile, 0, target, 0.0)


def _interpolated(
    operator: str,
    cells: int,
    measured: NDArray[np.float64],
    predicted: NDArray[np.float64],
    target: float,
) -> OperatorFit:
    every = np.ones(len(measured), dtype=bool)
    report = _report(operator, every, every, every, measured, predicted, target)
    return replace(report, rows=cells)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _capacity(profile: Profile) -> int | None:
    shape, peak, degree = profile.shape, profile.hardware, profile.tensor_parallel
    try:
        return kv_capacity(
            peak.memory_gib, shape.weight_bytes, shape.kv_bytes_on(degree), devices=degree
        )
    except InputError:
        return None  # the weights do not fit into the device's memory


def _provenance(profile: Profile, seed: int, held_out: float) -> str:
    text = (
        f"fitted by optsched to profiles in {profile.source} of {profile.shape.name} on "
        f"{profile.hardware.name}, tensor parallel {profile.tensor_parallel}: non-negative "
        f"relative least squares, {held_out:.0%} of the shapes held out (seed {seed}), "
        f"{len(profile.rejected)} rows rejected for beating the device; KV capacity derived from "
        "90% of the memory less the weights"
    )
    lacks = [f"{part} is missing and costs nothing" for part in profile.missing]
    return "; ".join([text, *lacks, *profile.notes])


def _fit_table(
    table: Table, held_out: float, target: float, generator: np.random.Generator
) -> tuple[NDArray[np.float64], dict[str, float], list[OperatorFit]]:
    """Return the coefficients, the range of validity and one report per operator of a table."""
    columns = [COLUMN[term] for term in table.terms]
    matrix = table.features[:, columns]
    if not len(matrix):
        raise InputError(f"profile of {table.name}: found no usable rows; expected some")

    tested, fold, shapes = _split(table, held_out, generator)
    count = int(shapes.max()) + 1
    needed = MIN_SHAPES_PER_TERM * len(columns)

    if count < needed:
        raise InputError(
            f"profile of {table.name}: found {count} usable rows of different shape; expected at "
            f"least {needed} for {len(columns)} coefficients"
        )

    inside = np.ones(len(matrix), dtype=bool)
    limits: dict[str, float] = {}
    data = _Data(matrix, table.measured_ms, shapes, 1 / np.bincount(shapes)[shapes], table.operator)

    if not data.error(~tested, fold) <= target:
        rungs = {
            key: rung
            for key, sizes in table.ladders.items()
            if (rung := _first_rung(data, sizes, ~tested, fold, target)) is not None
        }
        if rungs:
            key = max(rungs, key=lambda key: int((table.ladders[key] >= rungs[key]).sum()))
            inside = table.ladders[key] >= rungs[key]
            limits[key] = rungs[key]

    x = data.fit(inside & ~tested)
    predicted = matrix @ x
    for key, sizes in table.limits.items():
        if (sizes > 0).any():
            limits[key] = float(sizes[inside].max())

    values = np.zeros(len(COEFFICIENTS))
    values[columns] = x
    reports = [
        _report(str(o), table.operator == o, inside, tested, table.measured_ms, predicted, target)
        for o in sorted(set(table.operator.tolist()))
    ]
    return values, limits, reports


def _split(
    table: Table, held_out: float, generator: np.random.Generator
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """Return for every row whether it is held out, its fold and its shape."""
    shapes = np.unique(table.features, axis=0, return_inverse=True)[1].ravel()
    count = int(shapes.max()) + 1
    order = generator.permutation(count)
    tested = (order < max(1, round(held_out * count)))[shapes]

    return tested, (order % FOLDS)[shapes], shapes


@dataclass(frozen=True, eq=False)
class _Data:
    """Rows to fit. Every shape has the same weight, however often it was measured."""

    matrix: NDArray[np.float64]
    measured: NDArray[np.float64]
    shapes: NDArray[np.int64]
    weights: NDArray[np.float64]
    operator: NDArray[np.str_]

    def fit(self, rows: NDArray[np.bool_]) -> NDArray[np.float64]:
        count, columns = self.matrix[rows].shape
        if count < columns:
            raise InputError(
                f"profile: found {count} rows; expected at least {columns}, one per coefficient"
            )

        root = np.sqrt(self.weights[rows])
        # Dividing every row by its measured time makes the error relative.
        return non_negative(self.matrix[rows] * (root / self.measured[rows])[:, None], root)

    def error(self, rows: NDArray[np.bool_], fold: NDArray[np.int64]) -> float:
        """Return the mean cross-validation error of the worst operator; NaN with too few rows."""
        if len(np.unique(self.shapes[rows])) < MIN_SHAPES_PER_TERM * self.matrix.shape[1]:
            return float("nan")

        errors = np.zeros(len(rows))
        for k in range(FOLDS):
            test = rows & (fold == k)
            x = self.fit(rows & (fold != k))
            errors[test] = np.abs(self.matrix[test] @ x / self.measured[test] - 1)

        return max(
            float(np.average(errors[mine], weights=self.weights[mine]))
            for name in np.unique(self.operator[rows])
            if (mine := rows & (self.operator == name)).any()
        )


def _first_rung(
    data: _Data,
    sizes: NDArray[np.float64],
    train: NDArray[np.bool_],
    fold: NDArray[np.int64],
    target: float,
) -> float | None:
    """Return the first power of two above which a linear model meets the target, or None."""
    rung = 2.0 ** (np.floor(np.log2(sizes.min())) + 1)
    largest = sizes.max(where=np.isfinite(sizes), initial=0.0)  # infinite: always within the range
    while rung <= largest and (sizes >= rung).mean() >= MIN_SHARE:
        if data.error(train & (sizes >= rung), fold) <= target:
            return float(rung)

        rung *= 2

    return None


def _report(
    name: str,
    mine: NDArray[np.bool_],
    inside: NDArray[np.bool_],
    tested: NDArray[np.bool_],
    measured: NDArray[np.float64],
    predicted: NDArray[np.float64],
    target: float,
) -> OperatorFit:
    error = np.abs(predicted / measured - 1)
    used = mine & inside
    test = used & tested
    judged = error[test if test.any() else used]
    spread = float(((measured[used] - measured[used].mean()) ** 2).sum()) if used.any() else 0.0
    residual = float(((measured[used] - predicted[used]) ** 2).sum())
    outside = mine & ~inside
    mean = float(judged.mean()) if judged.size else float("nan")

    return OperatorFit(
        operator=name,
        rows=int((used & ~tested).sum()),
        held_out=int(test.sum()),
        outside=int(outside.sum()),
        mean=mean,
        median=float(np.median(judged)) if judged.size else float("nan"),
        p95=float(np.quantile(judged, 0.95)) if judged.size else float("nan"),
        r2=1 - residual / spread if spread > 0 else float("nan"),
        mean_outside=float(error[outside].mean()) if outside.any() else float("nan"),
        measured_ms=measured[used],
        predicted_ms=predicted[used],
        tested=tested[used],
        reached=mean <= target,
    )


def errors_of(found: Fit, models: Iterable[BatchCost]) -> list[dict[str, Any]]:
    """Return the errors of other cost models on the held-out rows of a fit, within its range.

    Parameters
    ----------
    found : Fit
    models : iterable of BatchCost

    Returns
    -------
    list of dict
        One per model and operator: ``model``, ``operator``, ``rows``, ``mean_error``,
        ``median_error``, ``p95_error`` and ``bias`` (the mean of predicted / measured - 1).
        Errors are relative.
    """
    out = []
    generator = np.random.default_rng(found.seed)
    chosen = []

    for table in found.profile.tables:
        tested = _split(table, found.held_out, generator)[0]
        inside = np.ones(len(tested), dtype=bool)
        for key, sizes in table.ladders.items():
            inside &= sizes >= found.cost_model.valid.get(key, 0.0)

        chosen.append(tested & inside)

    for model in models:
        for table, pick in zip(found.profile.tables, chosen, strict=True):
            factor = model.layers if table.whole_batch else 1
            predicted = factor * (table.features @ model.array[1:])
            for name in sorted(set(table.operator.tolist())):
                rows = pick & (table.operator == name)
                if not rows.any():
                    continue

                off = predicted[rows] / table.measured_ms[rows] - 1
                out.append(
                    {
                        "model": model.name, "operator": name, "rows": int(rows.sum()),
                        "mean_error": float(np.abs(off).mean()),
                        "median_error": float(np.median(np.abs(off))),
                        "p95_error": float(np.quantile(np.abs(off), 0.95)),
                        "bias": float(off.mean()),
                    }
                )  # fmt: skip

    return out
