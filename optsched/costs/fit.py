"""Cost models from profiles, fitted by relative least squares and tested on held-out rows."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from optsched.costs.batch import COEFFICIENTS
from optsched.costs.corner import largest
from optsched.costs.cost import BatchCost
from optsched.costs.hardware import kv_capacity
from optsched.costs.model_file import to_toml
from optsched.costs.profiles import Asked, read_profile
from optsched.costs.profiles.tables import COLUMN, Bools, Profile, Rejected, Table
from optsched.costs.table import CostTable, Floats, no_skew
from optsched.costs.tabulate import interpolated, left_out, non_negative, tabulate
from optsched.problem.errors import InputError, UsageError

TARGET = 0.08
"""Mean relative error up to which `fit` accepts a range of validity."""
FOLDS = 5
"""Parts of the training shapes in cross-validation."""
MIN_SHAPES_PER_TERM = 3
"""Minimum number of different shapes per coefficient, including the held-out ones."""
_CUTS = (0.2, 0.4, 0.6, 0.8)
"""Two models divide the rows by their time, at first at one of these shares."""
_MAX_ROUNDS = 8
"""How often the division is made again by the two models."""
_ERROR_SHARE = 0.97
"""Two models are taken if their error is below this share of the error of one."""
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
    measured_ms: Floats
    predicted_ms: Floats
    tested: Bools
    reached: bool


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted cost model and the evidence for it.

    Parameters
    ----------
    cost_model : BatchCost
    operators : tuple of OperatorFit
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
        rows = []
        for o in self.operators:
            row = {name: getattr(o, name) for name in ("operator", "rows", "held_out", "outside")}
            for name, field in errors.items():
                value = getattr(o, field)
                row[name] = None if np.isnan(value) else value

            rows.append(row | {"reached": o.reached})

        return rows

    def to_toml(self) -> str:
        """Return the cost model's TOML file, with the errors of the fit as comments at its top."""
        lacks = [f"MISSING: {part} costs nothing" for part in self.profile.missing]
        return to_toml(self.cost_model, [*lacks, *(self._summary(o) for o in self.operators)])

    def _summary(self, o: OperatorFit) -> str:
        """Return how well an operator is predicted, in a line."""
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
    partial: bool = False,
    name: str | None = None,
    held_out: float = 0.2,
    target: float = TARGET,
    seed: int = 0,
    **asked: Unpack[Asked],
) -> Fit:
    """Fit a cost model to a folder of profiles.

    Coefficients are non-negative and minimize the squared relative error, so that a batch of a
    microsecond counts as much as one of a second. A share of the shapes is held out, with all
    repetitions of a shape, and the reported errors are those of the held-out rows.

    Small chunks or batches may not follow a linear model, since a kernel works in tiles and
    leaves processors idle. The range of validity then starts at the first power of two at which
    cross-validation on the training rows meets the target. The report says how many rows were
    left out, and the judge warns about schedules outside the range.

    A step of a server's log takes the larger of two linear times where that is nearer: the host's
    and the device's, or reading weights and arithmetic.

    The profile of LLMServingSim becomes a tabulated model (`optsched.costs.table`). Its errors are
    those of interpolation: every inner value of a grid is predicted from its two neighbours on each
    axis, and rows that are not on the grid from the grid.

    Parameters
    ----------
    profiles : str, path or Profile
        A folder, the log of a server's steps, or what `optsched.costs.profiles.read_profile`
        returned for one.
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
    **asked
        What a folder's profile has to be. ``model``: its name, or its config.json; by default it is
        the one that the files or the folder name. ``tensor_parallel``: degree of the rows to read,
        by default the only one, or 1. ``hardware``: the device that was profiled, whose peaks no
        row may beat; by default the one that the files or the folder name, or else an A100, which
        the notes say. ``link_gb_s``: bandwidth between devices. ``only``: values that columns must
        have.

    Returns
    -------
    Fit
    """
    if not 0 < held_out < 1:
        raise InputError(f"held_out: found {held_out!r}; expected a share between 0 and 1")
    if not target > 0:
        raise InputError(f"target: found {target!r}; expected a relative error > 0")

    profile = profiles if isinstance(profiles, Profile) else read_profile(profiles, **asked)
    _check_whole(profile, partial)
    if profile.grids:
        return _tabulated(profile, name, target)

    generator = np.random.default_rng(seed)
    values = np.zeros(len(COEFFICIENTS))
    valid: dict[str, float] = {}
    reports: list[OperatorFit] = []
    models: list[Floats] = []

    for table in profile.tables:
        # `models`: one linear model, and behind it two whose larger time is nearer, if any are.
        models, limits, of_table = _fit_table(table, held_out, target, generator)
        values += models[0]  # a batch takes the sum of what the tables measure
        reports += of_table

        for limit, value in limits.items():
            # A chunk, batch or context that is outside one table is outside the range.
            narrower = max if limit.startswith("min_") else min
            valid[limit] = narrower(value, valid.get(limit, value))

    # Prefills over no cached KV do not show the cross term. Attention makes c m pairs of it, and
    # c^2 / 2 of the square, so by the arithmetic it is twice that.
    names = {c for table in profile.tables for c in table.terms}
    if "prefill_square" in names and "prefill_cross" not in names and values.any():
        values[COLUMN["prefill_cross"]] = 2 * values[COLUMN["prefill_square"]]
        names.add("prefill_cross")

    provenance = [
        f"fitted by optsched to {profile.words}: non-negative relative least squares, "
        f"{held_out:.0%} of the shapes held out (seed {seed}), {len(profile.rejected)} rows "
        "rejected for beating the device; KV capacity derived from 90% of the memory less the "
        "weights",
        *(f"{part} is missing and costs nothing" for part in profile.missing),
    ]
    coefficients = {key: values[COLUMN[key]] for key in COEFFICIENTS if key in names}
    corner = None
    if len(models) > 1:  # of a log of steps, which is one table
        provenance.append("a step takes the larger of two linear times")
        corner = largest([dict(zip(COEFFICIENTS, model, strict=True)) for model in models[1:]])

    cost_model = _model(profile, name, coefficients, provenance, valid, corner)
    return Fit(cost_model, tuple(reports), profile.rejected, profile, seed, target, held_out)


def _model(
    profile: Profile,
    name: str | None,
    coefficients: Mapping[str, float],
    provenance: list[str],
    valid: Mapping[str, float],
    table: CostTable | None = None,
) -> BatchCost:
    """Return the cost model of a profile from what was fitted, with a name and a KV capacity.

    `valid`: the limits of its range of validity, by name. `table`: with it batches are priced by
    grids and minorants. `name`: None to make one of the model and the machine.
    """
    shape, peak, degree = profile.shape, profile.hardware, profile.tensor_parallel
    without = "".join(f"-without-{part.replace(' ', '-')}" for part in profile.missing)
    if len(profile.missing) > 1:  # of both phases: a profile without layers is refused
        without = "-without-attention"

    capacity = profile.kv_capacity
    if capacity is None:
        # Where the weights do not fit into the device's memory, it stays unknown.
        with suppress(InputError):
            kv_bytes = shape.kv_bytes_on(degree)
            capacity = kv_capacity(peak.memory_gib, shape.weight_bytes, kv_bytes, devices=degree)

    machine = f"tp{degree}-{peak.name}-fit"
    if any(table.cornered for table in profile.tables):
        machine = "steps"  # of a server's log, which names no device

    # Times of whole batches are those of one layer. A window goes with a capacity that counts
    # tokens held in all layers, as the derived one does; that of a server's log stands as it is.
    return BatchCost(
        name or f"{shape.name}-{machine}{without}",
        1 if any(table.whole_batch for table in profile.tables) else shape.layers,
        {key: f"{value:.6g}" for key, value in coefficients.items()},
        capacity,
        "; ".join([*provenance, *profile.notes]),
        valid,
        table,
        shape.kv_window if profile.kv_capacity is None else None,
    )


def _check_whole(profile: Profile, partial: bool) -> None:
    """Raise InputError if a profile lacks a part, unless it is attention and `partial`."""
    missing = [part for part in profile.missing if part == "layers" or not partial]
    if missing:
        where = " and ".join(dict.fromkeys(profile.files.get(part, "rows") for part in missing))
        hint = ", or --partial, which takes it for nothing" if "layers" not in missing else ""
        raise InputError(
            f"profile of {profile.shape.name} ({profile.source}): found no "
            f"{' and no '.join(missing)}; expected {where}{hint}"
        )


def _tabulated(profile: Profile, name: str | None, target: float) -> Fit:
    """Return the tabulated model of a profile's grids, and the errors of interpolation."""
    dense, request, attention = profile.grids
    table, linear = tabulate(dense, request, attention, profile.skew or no_skew())
    # What is reported of each operator: its name, the number of values of its grid, and measured
    # and predicted times. All rows are judged, as none were held out.
    names = ("per token", "per request", "attention")
    checks = [
        (operator, grid.values.size, left_out(grid))
        for operator, grid in zip(names, profile.grids, strict=True)
    ]
    if profile.apart is not None and len(profile.apart[1]):
        points, measured = profile.apart
        checks.append(("attention, apart", 0, (measured, interpolated(attention, points))))

    if profile.experts is not None:
        checks.append(("experts", 0, profile.experts))

    reports = []
    for operator, cells, (measured, predicted) in checks:
        all_rows = np.ones(len(measured), dtype=bool)
        report = _report(operator, all_rows, all_rows, all_rows, measured, predicted, target)
        reports.append(replace(report, rows=cells))

    provenance = (
        f"tabulated by optsched from {profile.words}; the coefficients are a linear approximation, "
        "and price single requests alone"
    )
    last = {key: float(axis[-1]) for grid in profile.grids for key, axis in grid.axes.items()}
    valid = {
        "max_batch_tokens": last["tokens"],
        "max_prefill_chunk_tokens": last["prefill_tokens"],
        "max_decode_requests": last["decode_requests"],
        "max_request_kv_tokens": last["decode_kv"],
    }
    coefficients = {key: x for key, x in zip(COEFFICIENTS, linear, strict=True) if x}
    cost_model = _model(profile, name, coefficients, [provenance], valid, table)
    # The two zeros: no seed was needed, since no share of the rows was held out.
    return Fit(cost_model, tuple(reports), profile.rejected, profile, 0, target, 0.0)


class _Rows:
    """The rows of a table to fit and to test. Every shape has the same weight, however often it
    was measured, and is held out, or in a fold, as a whole.

    `matrix`: what multiplies the table's coefficients in each row, shape (rows, coefficients), and
    `columns` the places of these among `COEFFICIENTS`. `shapes`: number of each row's shape, and
    `count` how many there are. `weights`: 1 over the number of rows of the same shape. `tested`:
    whether each row is held out. `fold`: its part in cross-validation. `min_shapes`: without so
    many shapes nothing is fitted.
    """

    def __init__(self, table: Table, held_out: float, generator: np.random.Generator) -> None:
        self.table, self.columns = table, [COLUMN[term] for term in table.terms]
        self.matrix, self.measured = table.features[:, self.columns], table.measured_ms
        if not len(self.matrix):
            raise InputError(f"profile of {table.name}: found no usable rows; expected some")

        self.shapes = np.unique(table.features, axis=0, return_inverse=True)[1].ravel()
        self.count = int(self.shapes.max()) + 1
        self.weights = 1 / np.bincount(self.shapes)[self.shapes]
        # Each shape has a place in `order` by chance. The first places are tested, one at least.
        order = generator.permutation(self.count)
        self.tested = (order < max(1, round(held_out * self.count)))[self.shapes]
        self.fold = (order % FOLDS)[self.shapes]
        self.min_shapes = MIN_SHAPES_PER_TERM * len(self.columns)

    def fit(self, rows: Bools) -> Floats:
        """Return the coefficients >= 0 of the least squared relative error over some rows."""
        count, columns = self.matrix[rows].shape
        if count < columns:
            raise InputError(
                f"profile: found {count} rows; expected at least {columns}, one per coefficient"
            )

        # Dividing every row by its measured time makes the error relative, and the time 1. Rows
        # times the roots of their weights have weighted squares.
        root = np.sqrt(self.weights[rows])
        return non_negative(self.matrix[rows] * (root / self.measured[rows])[:, None], root)

    def pieces(self, rows: Bools) -> list[Floats]:
        """Return a linear model, and behind it, if any, two whose larger time is nearer to rows.

        From several divisions by time on, each of two models is fitted to the rows where it was the
        larger, until it stays so (max-affine regression, Magnani and Boyd 2009).
        """
        times, weights = self.measured, self.weights * rows

        def error(models: list[Floats]) -> float:
            predicted = (self.matrix @ np.transpose(models)).max(axis=1)
            return float(np.average(np.abs(predicted / times - 1), weights=weights))

        # Two models are taken only if their error is below `_ERROR_SHARE` of that of one.
        single, best_two = self.fit(rows), list[Floats]()
        best_error = _ERROR_SHARE * error([single])
        for limit in np.quantile(times[rows], _CUTS):
            # `upper`: the rows of the first model, at first the slower ones, then those where it is
            # the larger.
            upper = times > limit
            for _ in range(_MAX_ROUNDS):
                # A model of too few rows would follow their noise.
                if min((rows & upper).sum(), (rows & ~upper).sum()) < self.min_shapes:
                    break

                two = [self.fit(rows & upper), self.fit(rows & ~upper)]
                if (error_of_two := error(two)) < best_error:
                    best_two, best_error = two, error_of_two

                upper = self.matrix @ two[0] > self.matrix @ two[1]

        return [single, *best_two]

    def error(self, rows: Bools) -> float:
        """Return the mean cross-validation error of the worst operator; NaN with too few rows."""
        if len(np.unique(self.shapes[rows])) < self.min_shapes:
            return float("nan")

        # Each part of the shapes is predicted by a fit to the others.
        errors, operator = np.zeros(len(rows)), self.table.operator
        for k in range(FOLDS):
            test = rows & (self.fold == k)
            x = self.fit(rows & (self.fold != k))
            errors[test] = np.abs(self.matrix[test] @ x / self.measured[test] - 1)

        groups = [rows & (operator == name) for name in np.unique(operator[rows])]
        return max(float(np.average(errors[g], weights=self.weights[g])) for g in groups)

    def min_size(self, sizes: Floats, target: float) -> float | None:
        """Return the first power of two from which on a linear model meets the target, or None.

        `sizes`: what is limited, by row; infinite for rows that are in the range in any case. Rows
        that are not held out decide, and `MIN_SHARE` of all rows have to stay in the range.
        """
        # The first power of two above the smallest size: a smaller limit would leave out nothing.
        limit = 2.0 ** (np.floor(np.log2(sizes.min())) + 1)
        largest = sizes.max(where=np.isfinite(sizes), initial=0.0)
        while limit <= largest and (sizes >= limit).mean() >= MIN_SHARE:
            if self.error(~self.tested & (sizes >= limit)) <= target:
                return float(limit)

            limit *= 2

        return None


def _fit_table(
    table: Table, held_out: float, target: float, generator: np.random.Generator
) -> tuple[list[Floats], dict[str, float], list[OperatorFit]]:
    """Return a table's coefficients, its range of validity and one report per operator.

    `held_out` and `target` are those of `fit`, whose one generator draws for all tables. The first
    coefficients are those of one linear model. If the larger of two linear times is nearer, the two
    models follow, and these predict.
    """
    rows = _Rows(table, held_out, generator)
    if rows.count < rows.min_shapes:
        raise InputError(
            f"profile of {table.name}: found {rows.count} usable rows of different shape; expected "
            f"at least {rows.min_shapes} for {len(rows.columns)} coefficients"
        )

    inside = np.ones(len(rows.matrix), dtype=bool)
    limits: dict[str, float] = {}
    # `not <=` and not `>`: the error is NaN if there are too few rows.
    if table.ladder is not None and not rows.error(~rows.tested) <= target:
        key, sizes = table.ladder  # the name of a lower limit, and what it limits, by row
        if (limit := rows.min_size(sizes, target)) is not None:
            inside, limits[key] = sizes >= limit, limit

    train = inside & ~rows.tested
    models = rows.pieces(train) if table.cornered else [rows.fit(train)]
    # Upper limits are the largest size of a row that is inside.
    for key, sizes in table.limits.items():
        if (sizes > 0).any():  # else the table has no batch of that kind
            limits[key] = float(sizes[inside].max())

    coefficients = np.zeros((len(models), len(COEFFICIENTS)))
    coefficients[:, rows.columns] = models
    # The larger time of the two models that follow the first, or that of the only one.
    predicted = (table.features @ coefficients[-2:].T).max(axis=1)
    operator, times = table.operator, (table.measured_ms, predicted)
    reports = [
        _report(str(name), operator == name, inside, rows.tested, *times, target)
        for name in np.unique(operator)
    ]
    return list(coefficients), limits, reports


def _report(
    name: str,
    of_operator: Bools,
    inside: Bools,
    tested: Bools,
    measured: Floats,
    predicted: Floats,
    target: float,
) -> OperatorFit:
    """Return how well an operator's rows are predicted. Without held-out ones, all are judged.

    `of_operator`, `inside`, `tested`: whether each row is of the operator, inside the range of
    validity, and held out. `target`: the mean error to reach.
    """
    error = np.abs(predicted / measured - 1)
    used, outside = of_operator & inside, of_operator & ~inside
    test = used & tested
    judged = error[test if test.any() else used]
    errors = _statistics(judged) if judged.size else (np.nan, np.nan, np.nan)
    spread = float(((measured[used] - measured[used].mean()) ** 2).sum()) if used.any() else 0.0
    residual = float(((measured[used] - predicted[used]) ** 2).sum())
    r2 = 1 - residual / spread if spread > 0 else np.nan
    counts = (int((used & ~tested).sum()), int(test.sum()), int(outside.sum()))
    times = (measured[used], predicted[used], tested[used])
    # The mean decides whether the target is reached; a NaN does not reach it.
    return OperatorFit(name, *counts, *errors, r2, *times, errors[0] <= target)


def _statistics(errors: Floats) -> tuple[float, float, float]:
    """Return the mean, the median and the 95th percentile of errors."""
    return float(errors.mean()), float(np.median(errors)), float(np.quantile(errors, 0.95))


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

    Raises
    ------
    UsageError
        If a model is tabulated: a row of one operator has no place in its tables.
    """
    models = list(models)
    for model in models:
        if model.table is not None:
            raise UsageError(f"--beside: found {model.name}, which is tabulated; expected another")

    # The same seed and the same order of tables give the rows that the fit held out.
    generator = np.random.default_rng(found.seed)
    tests = []
    for table in found.profile.tables:
        test = _Rows(table, found.held_out, generator).tested
        if table.ladder is not None:  # the fit may have raised this lower limit of `sizes`
            key, sizes = table.ladder
            test = test & (sizes >= found.cost_model.valid.get(key, 0.0))

        tests.append((table, test))

    report = []
    for model in models:
        for table, test in tests:
            # Coefficients are per layer, and so are rows that are not of whole batches. In the
            # model's array they stand behind the number of layers.
            layers = model.layers if table.whole_batch else 1
            errors = layers * (table.features @ model.array[1:]) / table.measured_ms - 1
            for name in np.unique(table.operator[test]):
                of_name = errors[test & (table.operator == name)]
                mean, median, p95 = _statistics(np.abs(of_name))
                row = {"model": model.name, "operator": str(name), "rows": len(of_name)}
                row |= {"mean_error": mean, "median_error": median, "p95_error": p95}
                report.append(row | {"bias": float(of_name.mean())})

    return report
