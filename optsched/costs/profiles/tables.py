"""What a folder of profiles holds: tables of batches and their times, checked row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import COEFFICIENTS
from optsched.costs.hardware import Architecture, Device
from optsched.problem.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    Frame = pd.DataFrame

Floats = NDArray[np.float64]
Terms = Mapping[str, Floats | float]
"""Columns or constants by the coefficient that they multiply."""

COLUMN = {name: k for k, name in enumerate(COEFFICIENTS)}


@dataclass(frozen=True)
class Rejected:
    """A row that was left out.

    Parameters
    ----------
    file : str
    line : int
        Line of a CSV file (the header is line 1), or row of a Parquet file from 1.
    reason : str
    """

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Table:
    """Rows whose times share coefficients.

    Parameters
    ----------
    name : str
    operator : ndarray of str, shape (rows,)
        The operator that each row measures; errors are reported for each.
    features : ndarray, shape (rows, coefficients)
        What multiplies each of `optsched.costs.batch.COEFFICIENTS`.
    measured_ms : ndarray, shape (rows,)
        Per layer, or per whole batch.
    terms : tuple of str
        Coefficients that the table can identify.
    whole_batch : bool
        Whether a time covers all layers.
    ladders : dict of str to ndarray
        Lower limits of validity and their value in each row; `fit` may raise one of them where
        small values do not follow a linear model.
    limits : dict of str to ndarray
        The other quantities whose range bounds validity, by name of the limit.
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
        """Return the table of one operator whose rows have such values of such terms."""
        operator = np.full(len(measured_ms), name)
        features = features_of(len(measured_ms), terms)
        return cls(
            name, operator, features, measured_ms, tuple(terms), ladders=ladders or {},
            limits=limits,
        )  # fmt: skip


def features_of(rows: int, terms: Terms) -> Floats:
    """Return what multiplies each coefficient, a column of 0 for those that are not named."""
    features = np.zeros((rows, len(COEFFICIENTS)))
    for name, values in terms.items():
        features[:, COLUMN[name]] = values
    return features


def decode_table(n: Floats, m: Floats, measured_ms: Floats) -> Table:
    """Return the table of ``n`` decode requests that hold ``m`` tokens of KV each."""
    return Table.of(
        "decode",
        measured_ms,
        {"decode_kv": n * m, "decode_request": n, "decode_base": 1},
        ladders={"min_decode_requests": n},
        limits={"max_decode_requests": n, "max_request_kv_tokens": m, "max_kv_tokens": n * m},
    )


def attention_flops(shape: Architecture, c: Floats, m: Floats | float, degree: int) -> Floats:
    """Return the arithmetic of causal attention: two products over c m + c (c + 1) / 2 pairs."""
    return 4 * shape.hidden / degree * (c * m + c * (c + 1) / 2)


@dataclass(frozen=True, eq=False)
class Profile:
    """What was read from a folder of profiles.

    Parameters
    ----------
    source : str
        The kind of profile.
    shape : Architecture
    tensor_parallel : int
    hardware : Device
    tables : tuple of Table
    rejected : tuple of Rejected
    notes : tuple of str
        What the profile lacks.
    """

    source: str
    shape: Architecture
    tensor_parallel: int
    hardware: Device
    tables: tuple[Table, ...]
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Measurements:
    """Rows of a file, and the device that none of them may beat.

    Parameters
    ----------
    path : Path
    frame : DataFrame
        With a column ``line``.
    peak : Device
    rejected : list of Rejected
        Rows that beat the device are added here.
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
        """Return a column of numbers >= low, naming the first that is not."""
        import pandas as pd

        values = pd.to_numeric(self.frame[name], errors="coerce").to_numpy(dtype=np.float64)
        bad = ~(np.isfinite(values) & (values >= low))
        if bad.any():
            k = int(bad.argmax())
            found = self.frame[name].iloc[k]
            raise InputError(f"{self._place(k)}: {name}: {found!r}; a number >= {low:g} is right")
        return values

    def times(self, name: str) -> Floats:
        """Return a column of times > 0."""
        values = self.numbers(name)
        if (values == 0).any():
            k = int((values == 0).argmax())
            raise InputError(f"{self._place(k)}: {name}: 0 ms; a time > 0 is right")
        return values

    def possible(
        self, what: str, measured_ms: Floats, flops: Floats, memory_bytes: Floats | float
    ) -> NDArray[np.bool_]:
        """Return which rows do not beat the device, after a check of the unit."""
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
            right = "a profile of this device is right"
            if in_seconds:
                right = "the times look like seconds, milliseconds are right"
            raise InputError(
                f"{self._place(k)}: {what}: {measured_ms[k]:.6g} ms beats {peak.name} "
                f"({least[k]:.4g} ms at its peak), as {beats.mean():.0%} of the rows do; {right}"
            )
        if least.max() > 0.01 and slack.min() > 100:
            raise InputError(
                f"{self.path}: {what}: every row is more than {slack.min():.0f} times slower than "
                f"{peak.name}'s peak; the times look like microseconds, milliseconds are right"
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


def read_table(path: Path, needed: Sequence[str]) -> Frame:
    """Return the rows of a CSV or Parquet file that has the columns needed, and their lines.

    Raises
    ------
    InputError
        Another kind of file, a missing column, Parquet without pyarrow.
    """
    import pandas as pd

    parquet = path.suffix == ".parquet"
    kind, first_line = ("Parquet", 1) if parquet else ("CSV", 2)
    try:
        frame = pd.read_parquet(path) if parquet else pd.read_csv(path)
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs the package pyarrow; install it") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable {kind} file ({error})") from None
    missing = [name for name in needed if name not in frame]
    if missing:
        raise InputError(f"{path}: column {missing[0]!r} is missing; needed: {', '.join(needed)}")
    return frame.assign(line=np.arange(len(frame)) + first_line)
