"""Traces of real serving systems as instances.

Each format is read by a function in a file of this package, which `trace_format` registers. A new
format needs no other edit. The steps after reading are the same for all formats: the window of
rows, a random sample, arrivals relative to the first, rounds, and the KV capacity.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from optsched.files.measured import Measured
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import DEFAULT_KV_CAPACITY, Instance, KvAccounting
from optsched.workloads.traces.base import FORMATS, Block, Source, TraceFormat, Window
from optsched.workloads.traces.collected import Rows
from optsched.workloads.traces.fields import PLACES

UNITS = (*PLACES, "datetime")
"""Units of times in a file with named columns."""


class TraceWarning(UserWarning):
    """A warning about rows of a trace that were left out, or about what the trace does not say."""


@dataclass(frozen=True)
class TraceReport:
    """Numbers of rows of a trace that were read, dropped and sorted.

    Parameters
    ----------
    read : int
        Number of rows read: at most ``limit``, after ``offset``.
    dropped : int
        Number of rows left out: failed requests, and those without a positive number of tokens.
    failed : int
        Number of failed requests among the dropped rows.
    first_dropped_line : int, optional
        Line of the first dropped row.
    backwards : int
        Number of requests that are earlier than the one before them in the file. Requests are
        then sorted.
    first_backwards_line : int, optional
        Line of the first such request.
    arrivals : bool
        Whether the trace has arrivals.
    measured : Measured, optional
        Times that the trace's own server took, if the trace has them and every row is read
        unchanged.
    notes : tuple of str
        All of this in words; empty if there is nothing to say.
    """

    read: int
    dropped: int = 0
    failed: int = 0
    first_dropped_line: int | None = None
    backwards: int = 0
    first_backwards_line: int | None = None
    arrivals: bool = True
    measured: Measured | None = None
    notes: tuple[str, ...] = ()


def trace_formats() -> dict[str, str]:
    """Return every trace format.

    Returns
    -------
    dict of str to str
        One line on each format, by name, sorted.
    """
    return {name: found.summary for name, found in FORMATS.all().items()}


class TraceOptions(TypedDict, total=False):
    """Options of `read_trace` and `read_trace_report`; see there."""

    offset: int
    limit: int | None
    sample: int | None
    seed: int
    kv_capacity: int | None
    kv_accounting: KvAccounting | None
    kv_block_tokens: int
    rate: float | None
    rate_scale: float
    round_seconds: float | None
    columns: Mapping[str, str] | None
    unit: str | None
    tokenizer: str | Callable[[str], int] | None
    strict: bool
    name: str | None
    progress: Callable[[int], None] | None


def read_trace(format: str, path: str | Path, **options: Unpack[TraceOptions]) -> Instance:
    """Return the instance of a trace.

    Parameters
    ----------
    format : str
        One of `trace_formats`.
    path : str or Path
        The file, which may be compressed with gzip.
    **options
        See `read_trace_report`.

    Returns
    -------
    Instance

    Warns
    -----
    TraceWarning
        Rows were dropped or sorted, or the trace lacks something.

    Raises
    ------
    InputError, UsageError
        See `read_trace_report`.
    """
    instance, report = read_trace_report(format, path, **options)
    for note in report.notes:
        warnings.warn(f"{path}: {note}", TraceWarning, stacklevel=2)
    return instance


def read_trace_report(
    format: str, path: str | Path, **options: Unpack[TraceOptions]
) -> tuple[Instance, TraceReport]:
    """Return the instance of a trace, or of some of its rows, and a report on the rows.

    Requests are sorted by arrival, and equal arrivals keep the file's order. Arrivals count from
    the first request. The file is read in blocks and only to the end of the window. So memory
    grows with the requests that are kept, not with the file.

    Parameters
    ----------
    format : str
        One of `trace_formats`.
    path : str or Path
        The file, which may be compressed with gzip.
    **options
        Described below.

    Other Parameters
    ----------------
    offset, limit : int
        Number of rows to skip (default 0), and number of rows to read after them (default None:
        all). Both count rows of the file, including those that are dropped. So windows that
        follow each other never share a request.
    sample : int, optional
        Keep this many requests of the window, drawn without replacement, with every set equally
        likely. This lowers the rate of arrivals; ``rate_scale`` can make up for it.
    seed : int
        Seed of the sample and of drawn arrivals (default 0).
    kv_capacity : int, optional
        KV capacity in tokens. The default is `DEFAULT_KV_CAPACITY` for an instance in seconds; an
        instance in rounds has none.
    kv_accounting : {"generated", "cached"}, optional
        See `optsched.Instance`. The default is cached in seconds and generated in rounds.
    kv_block_tokens : int
        KV tokens of a block (default 1), see `optsched.Instance`.
    rate : float, optional
        Draw Poisson arrivals with this many requests per second in place of the trace's own. With
        infinity, all requests arrive at 0. Without ``rate`` they do so if the trace has no
        arrivals.
    rate_scale : float
        Factor by which requests arrive faster (default 1).
    round_seconds : float, optional
        Length of a round, for an instance in rounds. An arrival at t becomes round
        floor(t / length), computed exactly. None gives an instance in seconds.
    columns : mapping of str to str, optional
        For the format ``csv``: name of the column of each field of
        `optsched.workloads.traces.formats.FIELDS`.
    unit : str, optional
        For the format ``csv``: unit of times, one of `UNITS` (default seconds).
    tokenizer : str or callable, optional
        For traces of texts: see `optsched.workloads.traces.tokenizer.token_counter`. None counts
        words.
    strict : bool
        Whether to refuse a file with rows that would be dropped or sorted, or one without arrivals
        if no ``rate`` is given (default False).
    name : str, optional
        Name of the instance; None: the name of the file.
    progress : callable, optional
        Called with the number of rows read so far.

    Returns
    -------
    instance : Instance
    report : TraceReport

    Raises
    ------
    InputError
        The file cannot be read, a row is malformed (the error names line, field and value), the
        window has no request, a request does not fit into the KV capacity, or an option has a
        value out of range.
    UsageError
        The format does not take an option.
    """
    chosen, wanted, file = FORMATS.get(format), _Options(**options), Path(path)
    wanted.check(chosen)
    from optsched.workloads.traces.tokenizer import token_counter

    window = Window(wanted.offset, wanted.limit)
    source = Source(
        file, window, wanted.columns or {}, wanted.unit or "s", token_counter(wanted.tokenizer)
    )
    # Two streams of one seed, so that the sample does not depend on whether arrivals are drawn.
    draws = [np.random.default_rng([wanted.seed, stream]) for stream in (0, 1)]
    drawn = wanted.rate is not None
    rows = Rows(file, window, wanted.sample, draws[0], wanted.strict, drawn)
    rows.collect(chosen.read(source), wanted.progress)
    kept, notes = rows.kept(), rows.notes()
    if "tokenizer" in chosen.options and wanted.tokenizer is None:
        notes += ("tokens are words; tokenizer=NAME (--tokenizer NAME) counts a model's",)
    if drawn or kept.time_ns is None:
        since = _poisson(len(kept.line), wanted.rate, draws[1])
    else:
        time, order = kept.time_ns, np.argsort(kept.time_ns, kind="stable")
        since = time[order] - time.min()
        if rows.backwards:
            kept = kept.pick(order)
    if not (drawn or rows.arrivals):
        notes += (
            "the trace has no arrivals: all requests arrive at 0; rate=R (--rate R) draws "
            "Poisson arrivals of R requests a second",
        )
    instance = _instance(file, kept, wanted, since)
    report = TraceReport(
        read=window.taken,
        dropped=rows.dropped,
        failed=rows.failed,
        first_dropped_line=rows.first_dropped,
        backwards=rows.backwards,
        first_backwards_line=rows.first_backwards,
        arrivals=rows.arrivals,
        measured=_measured(file, kept, instance) if rows.arrivals and wanted.as_it_is else None,
        notes=notes,
    )
    return instance, report


@dataclass(frozen=True)
class _Options:
    """The options of `TraceOptions` with their defaults."""

    offset: int = 0
    limit: int | None = None
    sample: int | None = None
    seed: int = 0
    kv_capacity: int | None = None
    kv_accounting: KvAccounting | None = None
    kv_block_tokens: int = 1
    rate: float | None = None
    rate_scale: float = 1.0
    round_seconds: float | None = None
    columns: Mapping[str, str] | None = None
    unit: str | None = None
    tokenizer: str | Callable[[str], int] | None = None
    strict: bool = False
    name: str | None = None
    progress: Callable[[int], None] | None = None

    @property
    def as_it_is(self) -> bool:
        """Whether every row is read, at the times of the trace."""
        window = self.offset == 0 and self.limit is None and self.sample is None
        return window and self.rate is None and self.rate_scale == 1 and self.round_seconds is None

    def check(self, format: TraceFormat) -> None:
        for key, low in (("offset", 0), ("seed", 0), ("limit", 1), ("sample", 1)):
            _check_whole(getattr(self, key), key, low)
        for key in ("rate_scale", "rate", "round_seconds"):
            if (value := getattr(self, key)) is not None and (key, value) != ("rate", math.inf):
                _exact(value, key)
        if self.round_seconds is not None and self.kv_capacity is None:
            raise InputError("kv_capacity: found nothing; expected tokens for a trace in rounds")
        _check_whole(self.kv_capacity, "kv_capacity", 1)
        if self.unit is not None and self.unit not in UNITS:
            raise InputError(f"unit: found {self.unit!r}; expected one of {', '.join(UNITS)}")
        for key in ("columns", "unit", "tokenizer"):
            if getattr(self, key) and key not in format.options:
                able = ", ".join(f.name for f in FORMATS.all().values() if key in f.options)
                raise UsageError(
                    f"{key}: found with the format {format.name!r}; expected only with {able}"
                )


def _instance(file: Path, kept: Block, wanted: _Options, since: NDArray[np.int64]) -> Instance:
    """Return the instance of some rows, whose arrivals are nanoseconds since the first."""
    length, scale = wanted.round_seconds, _exact(wanted.rate_scale, "rate_scale")
    in_rounds = length is not None
    arrival: NDArray[Any] = since / 1e9 / float(scale)
    if length is not None:
        arrival = _rounds(since, scale * _exact(length, "round_seconds"))
    try:
        return Instance(
            arrival=arrival,
            prompt_tokens=kept.prompt_tokens,
            output_tokens=kept.output_tokens,
            kv_capacity=wanted.kv_capacity or DEFAULT_KV_CAPACITY,
            time_unit="round" if in_rounds else "second",
            kv_accounting=wanted.kv_accounting or ("generated" if in_rounds else "cached"),
            kv_block_tokens=wanted.kv_block_tokens,
            name=wanted.name
            if wanted.name is not None
            else file.name.removesuffix(".gz").rpartition(".")[0],
        )
    except InputError as error:
        hint = "; a larger kv_capacity fits" if "kv_capacity" in str(error) else ""
        raise InputError(f"{_at_line(file, error, kept.line)}{hint}") from None


def _measured(file: Path, kept: Block, instance: Instance) -> Measured | None:
    """Return the measured times of an instance's requests, in the order of its requests."""
    if kept.latency_s is None:
        return None
    try:
        return Measured(kept.latency_s, kept.ttft_s, instance_sha256=instance.sha256)
    except InputError as error:
        raise _at_line(file, error, kept.line) from None


def _at_line(file: Path, error: InputError, line: NDArray[np.int64]) -> InputError:
    found = re.search(r"request (\d+)", str(error))
    return InputError(f"{file}: {error}" + (f" (line {line[int(found[1])]})" if found else ""))


def _poisson(n: int, rate: float | None, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return Poisson arrivals in nanoseconds, of which the first is 0."""
    if rate is None or rate == math.inf:
        return np.zeros(n, dtype=np.int64)
    gaps = rng.exponential(1e9 / rate, n)
    gaps[0] = 0.0
    return np.rint(np.cumsum(gaps)).astype(np.int64)


def _rounds(since_ns: NDArray[np.int64], length_s: Fraction) -> NDArray[np.int64]:
    """Return floor(time / length) exactly: 0.3 s is in round 3 of 0.1 s, not in round 2."""
    step = length_s * 10**9
    if int(since_ns.max()) * step.denominator < 2**63 and step.numerator < 2**63:
        return since_ns * step.denominator // step.numerator
    exact = [int(t) * step.denominator // step.numerator for t in since_ns]
    return np.array(exact, dtype=object)


def _exact(value: float, name: str) -> Fraction:
    """Return a positive number as the decimal that it prints as."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise InputError(f"{name}: found {value!r}; expected a number")
    if not 0 < value < float("inf"):
        raise InputError(f"{name}: found {value!r}; expected a finite number above 0")
    return Fraction(str(value))


def _check_whole(value: int | None, name: str, low: int) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if value is not None and (not whole or value < low):
        raise InputError(f"{name}: found {value!r}; expected an integer >= {low}")
