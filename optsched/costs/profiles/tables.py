"""The content of a folder of profiles: tables of batches and their times, checked row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.costs.architectures import Architecture
from optsched.costs.batch import COEFFICIENTS
from optsched.costs.devices import Device
from optsched.costs.table import Floats, Grid
from optsched.problem.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    Frame = pd.DataFrame

Bools = NDArray[np.bool_]
Columns = Mapping[str, Floats]
"""Columns, shape (rows,), by name."""

COLUMN = {name: k for k, name in enumerate(COEFFICIENTS)}
PARTS = {
    "layers": "token",
    "attention of decodes": "decode_kv",
    "attention of prefills": "prefill_square",
}
"""What every profile has to measure, and a coefficient of each."""


class Rejected(NamedTuple):
    """A row that was left out: its file, its line (of Parquet, its number from 1), and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Table:
    """Measured rows whose times share coefficients.

    `measured_ms`: milliseconds per layer, or of the whole batch.
    `columns`: what multiplies each of `COEFFICIENTS` in the time of a row.
    `limits`: quantities with an upper limit of validity, by name of the limit.
    `ladder`: the name of a lower limit and its quantity by row, infinite in rows that the limit
    does not concern. `fit` may raise this limit where small values do not follow a linear model.
    `identified`: the coefficients that the table can tell apart, unless it is all of its columns'.
    `operators`: the operator of each row, for reports, unless it is the table's name.
    `cornered`: whether a row may take the larger of two linear times.
    """

    name: str
    measured_ms: Floats
    columns: Columns
    limits: Columns
    ladder: tuple[str, Floats] | None = None
    identified: tuple[str, ...] = ()
    operators: NDArray[np.str_] | None = None
    whole_batch: bool = False
    cornered: bool = False

    @property
    def terms(self) -> tuple[str, ...]:
        """Coefficients that the table can identify."""
        return self.identified or tuple(self.columns)

    @property
    def operator(self) -> NDArray[np.str_]:
        """The operator that each row measures."""
        if self.operators is None:
            return np.full(len(self.measured_ms), self.name)

        return self.operators

    @cached_property
    def features(self) -> Floats:
        """What multiplies each coefficient in the time of a row, shape (rows, coefficients)."""
        features = np.zeros((len(self.measured_ms), len(COEFFICIENTS)))
        for name, values in self.columns.items():
            features[:, COLUMN[name]] = values

        return features

    def only(self, rows: Bools) -> Table:
        """Return some of the rows."""
        return replace(
            self,
            measured_ms=self.measured_ms[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
            limits={name: values[rows] for name, values in self.limits.items()},
            ladder=None if self.ladder is None else (self.ladder[0], self.ladder[1][rows]),
            operators=None if self.operators is None else self.operators[rows],
        )


@dataclass(frozen=True, eq=False)
class Profile:
    """What was read from a folder of profiles.

    `rejected`: rows that are faster than the device can be.
    `notes`: what the profile is by its files, which rows were used, and what it lacks.
    `files`: where each of `PARTS` is expected, for errors.
    `grids`, `skew`: milliseconds per layer of a profile that becomes a tabulated model
    (`optsched.costs.table`); it has no tables.
    `apart`: points of the last grid's quantities, shape (rows, 4), and their milliseconds per
    layer, that were measured and are not on that grid.
    `experts`: times of a table of experts, and what other rows say of them.
    `kv_capacity`: the tokens of KV that the server said it holds.
    """

    source: str
    shape: Architecture
    tensor_parallel: int
    hardware: Device
    tables: tuple[Table, ...]
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...]
    files: Mapping[str, str]
    grids: tuple[Grid, ...] = ()
    skew: Grid | None = None
    apart: tuple[Floats, Floats] | None = None
    experts: tuple[Floats, Floats] | None = None
    kv_capacity: int | None = None

    @property
    def words(self) -> str:
        """Of what model and machine the profiles are."""
        what = f"profiles in {self.source} of {self.shape.name} on {self.hardware.name}"
        return f"{what}, tensor parallel {self.tensor_parallel}"

    @property
    def missing(self) -> tuple[str, ...]:
        """Those of `PARTS` that no row measures."""
        if self.grids:
            return ()

        features = np.concatenate([table.features for table in self.tables])
        return tuple(part for part, term in PARTS.items() if not features[:, COLUMN[term]].any())


@dataclass(frozen=True, eq=False)
class Measurements:
    """Rows of a file, with a column ``line``, and what was profiled.

    No row may be faster than the peaks of the device allow; those that are join the rejected ones.
    """

    path: Path
    frame: Frame
    shape: Architecture
    degree: int
    peak: Device
    rejected: list[Rejected]

    def __len__(self) -> int:
        return len(self.frame)

    def only(self, chosen: Bools) -> Measurements:
        """Return some of the rows."""
        return replace(self, frame=self.frame[chosen])

    def numbers(self, name: str, low: float = 0.0) -> Floats:
        """Return a column of numbers, checked."""
        import pandas as pd

        values = pd.to_numeric(self.frame[name], errors="coerce").to_numpy(dtype=np.float64)
        bad = ~(np.isfinite(values) & (values >= low))
        if bad.any():
            k = int(bad.argmax())
            found = f"{self._place(k)}: {name}: found {self.frame[name].iloc[k]!r}"
            raise InputError(f"{found}; expected a number >= {low:g}")

        return values

    def times(self, name: str) -> Floats:
        """Return a column of times, checked."""
        values = self.numbers(name)
        if (values == 0).any():
            k = int((values == 0).argmax())
            raise InputError(f"{self._place(k)}: {name}: found 0 ms; expected a time > 0")

        return values

    def possible(
        self, what: str, measured_ms: Floats, flops: Floats, memory_bytes: Floats | float
    ) -> Bools:
        """Return which rows are possible on the device, and reject the others.

        ``what`` is the column of the times, for errors, and ``flops`` and ``memory_bytes`` are what
        a row takes at least. If most rows are impossible, or all are far from the peak, the file is
        not what it is taken for, which is an InputError.
        """
        # A TFLOP/s is 1e9 operations in a millisecond, and a GB/s 1e6 bytes. `slack` is how many
        # times as long as the shortest possible time a row took.
        peak, memory_bytes = self.peak, np.broadcast_to(memory_bytes, len(self))
        by_flops, by_bytes = flops / peak.tflops / 1e9, memory_bytes / peak.bandwidth_gb_s / 1e6
        shortest_ms = np.maximum(by_flops, by_bytes)
        slack = measured_ms / shortest_ms
        beats = slack < 1

        if beats.mean() > 0.5:
            k, expected = int(beats.argmax()), "expected a profile of this device"
            # One is a hundred times too fast, and nearly all would be possible in seconds.
            if slack.min() < 0.01 and (1000 * slack >= 1).mean() > 0.9:
                expected = "expected milliseconds, and these look like seconds"

            raise InputError(
                f"{self._place(k)}: {what}: found {measured_ms[k]:.6g} ms, which beats {peak.name} "
                f"({shortest_ms[k]:.4g} ms at its peak), as {beats.mean():.0%} of the rows do; "
                f"{expected}"
            )

        # Small operators may be that slow by their overhead, but not if one should take 10 us.
        if shortest_ms.max() > 0.01 and slack.min() > 100:
            raise InputError(
                f"{self.path}: {what}: found every row more than {slack.min():.0f} times slower "
                f"than {peak.name}'s peak; expected milliseconds, and these look like microseconds"
            )

        for k in np.flatnonzero(beats).tolist():
            ms = measured_ms[k]
            rate = f"{memory_bytes[k] / ms / 1e6:.4g} GB/s; the peak is {peak.bandwidth_gb_s:g}"
            if by_flops[k] >= by_bytes[k]:
                rate = f"{flops[k] / ms / 1e9:.4g} TFLOP/s; the peak is {peak.tflops:g}"

            line = int(self.frame["line"].iloc[k])
            self.rejected.append(Rejected(self.path.name, line, f"{what}: {ms:.6g} ms is {rate}"))

        return ~beats

    def _place(self, row: int) -> str:
        return f"{self.path}, line {self.frame['line'].iloc[row]}"


def columns_of(
    c: Floats | float, m: Floats | float, n: Floats | float, k: Floats | float, p: Any = 1
) -> dict[str, Floats]:
    """Return what multiplies each coefficient in the time of batches.

    In each batch p requests prefill c tokens over m cached ones, and n decode over k cached tokens:
    of each request. Where c is 0, nothing prefills.
    """
    c, m, n, k, p = np.broadcast_arrays(c, m, n, k, p)
    p = p * (c > 0)
    return {
        "token": p * c + n,
        "base": np.ones(c.shape),
        "decode_kv": n * k,
        "decode_request": n,
        "decode_base": n > 0,
        "prefill_square": p * c * c,
        "prefill_cross": p * c * m,
        "prefill_kv": p * m,
        "prefill_token": p * c,
        "prefill_request": p,
        "prefill_base": p > 0,
    }


def attention_flops(shape: Architecture, c: Floats, m: Floats | float, degree: int) -> Floats:
    """Return the operations of causal attention: two products over c m + c (c + 1) / 2 pairs."""
    return 4 * shape.attention_width / degree * (c * m + c * (c + 1) / 2)


def layer_table(measured_ms: Floats, tokens: Floats) -> Table:
    """Return the table of the operators that process every token of a batch alike."""
    columns = {"token": tokens, "base": np.ones(len(tokens))}
    return Table("layer", measured_ms, columns, {"max_batch_tokens": tokens})


def decode_table(rows: Measurements, times: str, n: Floats, m: Floats) -> Table:
    """Return the table of decode batches of n requests that hold m tokens of KV each."""
    measured, shape, degree = rows.times(times), rows.shape, rows.degree
    # Two products of one token with m others, with an addition for each multiplication.
    flops = 4 * shape.attention_width / degree * n * m
    good = rows.possible(times, measured, flops, n * m * shape.layer_kv_bytes / degree)
    columns = _of_phase("decode", columns_of(0.0, 0.0, n, m))
    limits = {"max_decode_requests": n, "max_request_kv_tokens": m, "max_kv_tokens": n * m}
    return Table("decode", measured, columns, limits, ("min_decode_requests", n)).only(good)


def prefill_table(
    rows: Measurements,
    times: str,
    batch: tuple[Floats, Floats, Floats | float],
    identified: tuple[str, ...],
    limits: Columns,
) -> Table:
    """Return the table of batches of n requests that prefill c tokens over m cached ones each."""
    measured, (n, c, m) = rows.times(times), batch
    flops = n * attention_flops(rows.shape, c, m, rows.degree)
    reads = n * (c + m) * rows.shape.layer_kv_bytes / rows.degree
    good = rows.possible(times, measured, flops, reads)
    columns = _of_phase("prefill", columns_of(c, m, 0.0, 0.0, n))
    ladder = ("min_prefill_chunk_tokens", c)
    return Table("prefill", measured, columns, limits, ladder, identified).only(good)


def _of_phase(phase: str, columns: Columns) -> Columns:
    """Return the columns of a phase, without `token` and `base`, which tables of layers have."""
    return {name: values for name, values in columns.items() if name.startswith(phase)}


def read_table(path: Path, needed: Sequence[str]) -> Frame:
    """Return the rows of a CSV or Parquet file, with the line that each comes from as ``line``.

    `needed`: columns that it must have. Of Parquet the line is the number of the row, from 1.
    """
    import pandas as pd

    try:
        with path.open("rb") as file:
            is_pointer = file.read(24).startswith(b"version https://git-lfs")
    except OSError:  # which reading it below says, too
        is_pointer = False

    if is_pointer:
        raise InputError(f"{path}: found a pointer of Git LFS; expected the file (`git lfs pull`)")

    parquet = path.suffix == ".parquet"
    kind, first_line = ("Parquet", 1) if parquet else ("CSV", 2)
    try:
        frame = pd.read_parquet(path) if parquet else pd.read_csv(path)
    except ImportError:
        raise InputError(f"{path}: Parquet files need the package pyarrow; install it") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a readable {kind} file; found {error}") from None

    missing = [name for name in needed if name not in frame]
    if missing:
        columns = ", ".join(needed)
        raise InputError(f"{path}: found no column {missing[0]!r}; expected the columns {columns}")

    if frame.empty:
        raise InputError(f"{path}: found a header and no rows; expected at least one")

    return frame.assign(line=np.arange(len(frame)) + first_line)
