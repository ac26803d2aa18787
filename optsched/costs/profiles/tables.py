"""The content of a folder of profiles: tables of batches and their times, checked row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.architectures import Architecture
from optsched.costs.batch import COEFFICIENTS
from optsched.costs.devices import Device
from optsched.costs.table import Grid
from optsched.problem.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    Frame = pd.DataFrame

Floats = NDArray[np.float64]
Terms = Mapping[str, Floats | float]
"""Columns, shape (rows,), or constants, by the coefficient that they multiply."""

COLUMN = {name: k for k, name in enumerate(COEFFICIENTS)}
PARTS = {
    "layers": "token",
    "attention of decodes": "decode_kv",
    "attention of prefills": "prefill_square",
}
"""What every profile has to measure, and a coefficient of each."""


@dataclass(frozen=True)
class Rejected:
    """A row that was left out.

    Parameters
    ----------
    file : str
        Name of the file.
    line : int
        Line of a CSV file, where the header is line 1, or row of a Parquet file from 1.
    reason : str
        Why the row was left out.
    """

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Table:
    """Measured rows whose times share coefficients.

    Parameters
    ----------
    name : str
    operator : ndarray of str, shape (rows,)
        The operator that each row measures; a fit reports errors per operator.
    features : ndarray of float64, shape (rows, coefficients)
        What multiplies each of `optsched.costs.batch.COEFFICIENTS` in the time of a row.
    measured_ms : ndarray of float64, shape (rows,)
        Milliseconds per layer, or per whole batch.
    terms : tuple of str
        Coefficients that the table can identify.
    whole_batch : bool
        Whether a time covers all layers.
    ladders : mapping of str to ndarray of float64, shape (rows,)
        Quantities with a lower limit of validity, by name of the limit. `fit` may raise one of
        these limits where small values do not follow a linear model.
    limits : mapping of str to ndarray of float64, shape (rows,)
        Quantities with an upper limit of validity, by name of the limit.
    """

    name: str
    operator: NDArray[np.str_]
    features: Floats
    measured_ms: Floats
    terms: tuple[str, ...]
    whole_batch: bool = False
    ladders: Mapping[str, Floats] = field(default_factory=dict)
    limits: Mapping[str, Floats] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        measured_ms: Floats,
        terms: Terms,
        *,
        ladders: Mapping[str, Floats] | None = None,
        limits: Mapping[str, Floats],
    ) -> Table:
        """Return the table of a single operator."""
        operator = np.full(len(measured_ms), name)
        features = features_of(len(measured_ms), terms)
        return cls(
            name, operator, features, measured_ms, tuple(terms), ladders=ladders or {},
            limits=limits,
        )  # fmt: skip


def features_of(rows: int, terms: Terms) -> Floats:
    """Return what multiplies each coefficient in the time of each row."""
    features = np.zeros((rows, len(COEFFICIENTS)))
    for name, values in terms.items():
        features[:, COLUMN[name]] = values

    return features


def attention_flops(shape: Architecture, c: Floats, m: Floats | float, degree: int) -> Floats:
    """Return the operations of causal attention: two products over c m + c (c + 1) / 2 pairs."""
    return 4 * shape.attention_width / degree * (c * m + c * (c + 1) / 2)


@dataclass(frozen=True, eq=False)
class Profile:
    """What was read from a folder of profiles.

    Parameters
    ----------
    source : str
        The kind of profile.
    shape : Architecture
        Architecture of the profiled model.
    tensor_parallel : int
        Degree of tensor parallelism.
    hardware : Device
        Device that was profiled.
    tables : tuple of Table
    rejected : tuple of Rejected
        Rows that are faster than the device can be.
    notes : tuple of str
        What the profile is by its files, which rows were used, and what it lacks.
    grids : tuple of Grid
        Milliseconds per layer of a profile that becomes a tabulated model; it has no tables.
    skew : Grid, optional
        See `optsched.costs.table`.
    apart : tuple of ndarray
        Points of the last grid's quantities, shape (rows, 4), and their milliseconds per layer,
        shape (rows,), that were measured and are not on that grid.
    files : mapping of str to str
        Where each of `PARTS` is expected, for errors.
    """

    source: str
    shape: Architecture
    tensor_parallel: int
    hardware: Device
    tables: tuple[Table, ...]
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    skew: Grid | None = None
    apart: tuple[Floats, Floats] | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        """Those of `PARTS` that no row measures."""
        if self.grids:
            return ()

        features = np.concatenate([table.features for table in self.tables])
        return tuple(part for part, term in PARTS.items() if not features[:, COLUMN[term]].any())


@dataclass(frozen=True, eq=False)
class Measurements:
    """Rows of a file, with checks against the device that was profiled.

    Parameters
    ----------
    path : Path
        The file.
    frame : DataFrame
        Its rows, with a column ``line``.
    peak : Device
        No row may be faster than the peaks of this device allow.
    rejected : list of Rejected
        Rows that are too fast are added here.
    """

    path: Path
    frame: Frame
    peak: Device
    rejected: list[Rejected]

    def __len__(self) -> int:
        return len(self.frame)

    def only(self, chosen: Any) -> Measurements:
        """Return some of the rows."""
        return replace(self, frame=self.frame[chosen])

    def numbers(self, name: str, low: float = 0.0) -> Floats:
        """Return a column of numbers, checked."""
        import pandas as pd

        values = pd.to_numeric(self.frame[name], errors="coerce").to_numpy(dtype=np.float64)
        bad = ~(np.isfinite(values) & (values >= low))
        if bad.any():
            k = int(bad.argmax())
            found = self.frame[name].iloc[k]
            raise InputError(
                f"{self._place(k)}: {name}: found {found!r}; expected a number >= {low:g}"
            )

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
    ) -> NDArray[np.bool_]:
        """Return which rows are possible on the device, and reject the others."""
        peak = self.peak
        memory_bytes = np.broadcast_to(memory_bytes, len(self))
        by_flops = flops / peak.tflops / 1e9
        by_bytes = memory_bytes / peak.bandwidth_gb_s / 1e6
        least = np.maximum(by_flops, by_bytes)
        slack = measured_ms / least
        beats = slack < 1

        if beats.mean() > 0.5:
            k = int(beats.argmax())
            in_seconds = slack.min() < 0.01 and (1000 * slack >= 1).mean() > 0.9
            right = "expected a profile of this device"
            if in_seconds:
                right = "expected milliseconds, and these look like seconds"

            raise InputError(
                f"{self._place(k)}: {what}: found {measured_ms[k]:.6g} ms, which beats {peak.name} "
                f"({least[k]:.4g} ms at its peak), as {beats.mean():.0%} of the rows do; {right}"
            )

        if least.max() > 0.01 and slack.min() > 100:
            raise InputError(
                f"{self.path}: {what}: found every row more than {slack.min():.0f} times slower "
                f"than {peak.name}'s peak; expected milliseconds, and these look like microseconds"
            )

        for k in np.flatnonzero(beats).tolist():
            if by_flops[k] >= by_bytes[k]:
                rate = f"{flops[k] / measured_ms[k] / 1e9:.4g} TFLOP/s; the peak is {peak.tflops:g}"
            else:
                speed = memory_bytes[k] / measured_ms[k] / 1e6
                rate = f"{speed:.4g} GB/s; the peak is {peak.bandwidth_gb_s:g}"

            reason = f"{what}: {measured_ms[k]:.6g} ms is {rate}"
            line = int(self.frame["line"].iloc[k])
            self.rejected.append(Rejected(self.path.name, line, reason))

        return ~beats

    def _place(self, row: int) -> str:
        return f"{self.path}, line {self.frame['line'].iloc[row]}"


def decode_table(
    rows: Measurements, times: str, n: Floats, m: Floats, shape: Architecture, degree: int
) -> Table:
    """Return the table of decode batches of n requests that hold m tokens of KV each."""
    measured = rows.times(times)
    flops = 4 * shape.attention_width / degree * n * m
    good = rows.possible(times, measured, flops, n * m * shape.layer_kv_bytes / degree)
    n, m = n[good], m[good]

    return Table.of(
        "decode",
        measured[good],
        {"decode_kv": n * m, "decode_request": n, "decode_base": 1},
        ladders={"min_decode_requests": n},
        limits={"max_decode_requests": n, "max_request_kv_tokens": m, "max_kv_tokens": n * m},
    )


def read_table(path: Path, needed: Sequence[str]) -> Frame:
    """Return the rows of a CSV or Parquet file."""
    import pandas as pd

    try:
        with path.open("rb") as file:
            pointer = file.read(24).startswith(b"version https://git-lfs")
    except OSError:
        pointer = False

    if pointer:
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
        raise InputError(
            f"{path}: found no column {missing[0]!r}; expected the columns {', '.join(needed)}"
        )

    return frame.assign(line=np.arange(len(frame)) + first_line)
