"""Traces of real serving systems as instances.

Each format is read by a function in a file of this package, which `trace_format` registers. A new
format needs no other edit. The steps after reading are the same for all formats: the window of
rows, a random sample, arrivals relative to the first, rounds, and the KV capacity.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.files.measured import Measured
from optsched.problem.columns import check_choice, check_fields
from optsched.problem.errors import InputError, UsageError, check_keywords
from optsched.problem.instance import DEFAULT_KV_CAPACITY, Instance, KvAccounting, clients_words
from optsched.problem.notes import warn
from optsched.workloads.drafts import with_drafts
from optsched.workloads.traces.base import FORMATS, Block, Findings, Source, TraceFormat, Window
from optsched.workloads.traces.cached import with_cached
from optsched.workloads.traces.collected import Rows
from optsched.workloads.traces.exact import DURATIONS, PLACES, TIMES
from optsched.workloads.traces.plausible import check_trace, waiting_clients
from optsched.workloads.traces.prefixes import OUTPUTS, check_ids, prefix_columns

UNITS = (*PLACES, "datetime")
"""Units of times in a file."""


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
        Number of rows left out: failed requests, those without a positive number of tokens, and
        rows that cannot be read.
    failed : int
        Number of failed requests among the dropped rows.
    unreadable : int
        Number of rows among them that cannot be read, or whose times cannot be.
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
    unmeasured : str
        Why there are no measured times, if there are none.
    model : str
        The model that a benchmark says it asked, if any.
    notes : tuple of str
        All of this in words; empty if there is nothing to say.
    """

    read: int
    dropped: int = 0
    failed: int = 0
    unreadable: int = 0
    first_dropped_line: int | None = None
    backwards: int = 0
    first_backwards_line: int | None = None
    arrivals: bool = True
    measured: Measured | None = None
    unmeasured: str = ""
    model: str = ""
    notes: tuple[str, ...] = ()


def trace_formats() -> dict[str, str]:
    """Return one line on each trace format, by name, sorted."""
    return {name: found.summary for name, found in FORMATS.all().items()}


@dataclass(frozen=True)
class TraceOptions:
    """Options of `read_trace` and `read_trace_report`.

    Parameters
    ----------
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
    kv_window : str or KvWindow, optional
        Layers that keep the KV of a window alone, see `optsched.Instance`.
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
        For the formats ``csv`` and ``jsonl``: name of the column of each field of
        `optsched.workloads.traces.formats.FIELDS`. In JSON a point leads into an object, as in
        ``usage.prompt_tokens``, and ``rows`` is the path to the list of requests in a document.
    unit : str or mapping of str to str, optional
        Unit of times, one of `UNITS`; of some fields if given by field, with an empty name for the
        others. The default is the format's own, and seconds for named columns. With dates,
        durations are in seconds.
    success : collection of str
        For named columns: further words of a status that mean success.
    run : int, optional
        Number of the run to read from a file of several, from 1, or from -1 for the last.
    tokenizer : str or callable, optional
        For traces of texts: see `optsched.workloads.traces.tokenizer.tokens_of`. None counts
        words.
    prefixes : bool, optional
        Whether to keep the prefixes that requests share, which a trace has as ids of blocks or
        tokens. The default is to do so in seconds where it has them. (In rounds a prefill takes one
        round, whatever is reused of it, and bounds and optima refuse such instances.)
    outputs : {"none", "granted"}
        Whether a request that goes on behind an earlier one's prompt repeats its output, too, where
        only prompts have ids (default none).
    slack : bool
        Whether requests share what ids of blocks may hide: all tokens but one of the first block
        in which they differ (default False). A bound for a real engine needs that.
    ids_tokens : int, optional
        Tokens that an id stands for; None: the format's.
    prefix_block_tokens : int, optional
        Tokens of the blocks in which KV is shared, see `optsched.Instance`. None: those of an id,
        or ``kv_block_tokens`` if an id is one token.
    sessions : bool
        Whether calls are released when those before them have ended (closed loop), if the trace
        says so. ``rate`` then draws the arrivals of sessions. Default False: at their own times.
    think_scale : float
        Factor of the delays between calls in closed loop (default 1).
    strict : bool
        Whether to refuse a file with rows that would be dropped or sorted, one that is odd, or one
        without arrivals if no ``rate`` is given (default False).
    name : str, optional
        Name of the instance; None: the name of the file.
    progress : callable, optional
        Called with the number of rows read so far.
    """

    offset: int = 0
    limit: int | None = None
    sample: int | None = None
    seed: int = 0
    kv_capacity: int | None = None
    kv_accounting: KvAccounting | None = None
    kv_block_tokens: int = 1
    kv_window: str | None = None
    rate: float | None = None
    rate_scale: float = 1.0
    round_seconds: float | None = None
    columns: Mapping[str, str] | None = None
    unit: str | Mapping[str, str] | None = None
    success: Collection[str] = ()
    run: int | None = None
    tokenizer: str | Callable[[str], int] | None = None
    prefixes: bool | None = None
    outputs: str = "none"
    slack: bool = False
    ids_tokens: int | None = None
    prefix_block_tokens: int | None = None
    sessions: bool = False
    think_scale: float = 1.0
    strict: bool = False
    name: str | None = None
    progress: Callable[[int], None] | None = None

    @property
    def changes(self) -> str:
        """What keeps the trace from being read whole, at its own times in seconds."""
        keys = ("offset", "limit", "sample", "rate", "rate_scale", "round_seconds", "sessions")
        changed = [key for key in keys if getattr(self, key) != getattr(TraceOptions, key)]
        return f"a trace changed by {', '.join(changed)}" if changed else ""

    @property
    def units(self) -> Mapping[str, str]:
        """Units by field; an empty name stands for the others."""
        if self.unit is None or isinstance(self.unit, str):
            return {"": self.unit} if self.unit else {}

        return self.unit

    def __post_init__(self) -> None:
        whole = ("limit", "sample", "kv_capacity", "ids_tokens", "prefix_block_tokens")
        check_fields(self, {"offset": 0, "seed": 0, **dict.fromkeys(whole, 1)})
        # `_exact` refuses what is not finite and above 0. Only `rate` may be infinite.
        for key in ("rate_scale", "rate", "round_seconds", "think_scale"):
            if (value := getattr(self, key)) is not None and (key, value) != ("rate", math.inf):
                _exact(value, key)

        if self.round_seconds is not None and self.kv_capacity is None:
            raise InputError("kv_capacity: found nothing; expected tokens for a trace in rounds")

        check_choice(self.outputs, "outputs", OUTPUTS)
        # Whoever changes an option of prefixes asks for prefixes.
        of_prefixes = ("outputs", "slack", "ids_tokens", "prefix_block_tokens")
        changed = [key for key in of_prefixes if getattr(self, key) != getattr(TraceOptions, key)]
        if changed and self.prefixes is False:
            raise UsageError(f"{', '.join(changed)}: found without prefixes; expected either")
        if changed:
            object.__setattr__(self, "prefixes", True)

        for name, unit in self.units.items():
            if name not in ("", *TIMES):
                raise InputError(f"unit: found {name!r}; expected a field of {', '.join(TIMES)}")

            check_choice(unit, "unit", PLACES if name in DURATIONS else UNITS)  # none are dates

        if self.run is not None and (type(self.run) is not int or not self.run):
            raise InputError(f"run: found {self.run!r}; expected an integer, but 0")

    def _check(self, format: TraceFormat) -> None:
        """Check that the options suit each other and the format."""
        if self.sample is not None and self.sessions:
            raise UsageError(
                "--sample: found with --sessions; expected --limit, which counts whole sessions"
            )
        if self.think_scale != 1 and not self.sessions:
            raise UsageError("--think-scale: found without --sessions; expected both")

        for key in ("columns", "unit", "success", "run", "tokenizer", "sessions"):
            if getattr(self, key) and key not in format.options:
                takers = ", ".join(f.name for f in FORMATS.all().values() if key in f.options)
                raise UsageError(
                    f"--{'column' if key == 'columns' else key}: found with the format "
                    f"{format.name!r}; expected only with {takers}"
                )


def read_trace(format: str, path: str | Path, **options: Any) -> Instance:
    """Return the instance of a trace.

    Parameters
    ----------
    format : str
        One of `trace_formats`.
    path : str or Path
        The file, which may be compressed with gzip.
    **options
        See `TraceOptions`.

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
        warn(f"{path}: {note}", TraceWarning, stacklevel=2)

    return instance


def read_trace_report(
    format: str, path: str | Path, **options: Any
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
        See `TraceOptions`.

    Raises
    ------
    InputError
        The file cannot be read, no row can (the error names line, field and value of the first),
        times surely mean something else, the window has no request, a request does not fit into
        the KV capacity, or an option has a value out of range.
    UsageError
        The format does not take an option.
    """
    return read_with_findings(format, path, **options)[:2]


def read_with_findings(
    format: str, path: str | Path, **options: Any
) -> tuple[Instance, TraceReport, Findings]:
    """See `read_trace_report`; beside it, return what was found on the way."""
    check_keywords(
        read_trace_report, options, [option.name for option in dataclasses.fields(TraceOptions)]
    )
    form, wanted, file = FORMATS.get(format), TraceOptions(**options), Path(path)
    wanted._check(form)
    source = _source(file, form, wanted)
    # Two streams of one seed, so that the sample does not depend on whether arrivals are drawn.
    for_sample, for_arrivals = (np.random.default_rng([wanted.seed, k]) for k in (0, 1))
    rows = Rows(source, wanted.sample, for_sample)
    rows.collect(form.read(source), wanted.progress)
    kept = with_cached(rows.kept(), source.findings)
    unit = source.findings.units.get("arrival") or form.unit
    # A format whose unit is fixed has an empty one here, and then arrivals are not checked.
    check_trace(kept, source, form.unit and source.unit("arrival", unit))

    # By default prefixes are kept where the trace has them for every request, and in seconds alone.
    ids_tokens = source.findings.ids_tokens or form.ids_tokens
    if wanted.prefixes is None:
        # Without ids they are known where each request names the one that it goes on behind.
        known = kept.follows is not None
        if kept.ids is not None:
            known = all(isinstance(ids, list) for ids in kept.ids)

        wanted = replace(wanted, prefixes=known and wanted.round_seconds is None)
    if wanted.prefixes:
        check_ids(kept, ids_tokens, source.findings)

    notes = rows.notes()
    if "tokenizer" in form.options and wanted.tokenizer is None:
        notes.append("tokens are words; tokenizer=NAME (--tokenizer NAME) counts a model's")

    # Nanoseconds since the first arrival. `backwards`: rows that are earlier than the one before.
    kept, since_ns = _arrivals(kept, wanted, for_arrivals, sort=bool(rows.backwards))
    instance = _instance(file, kept, wanted, since_ns, ids_tokens)
    # Arrivals that were drawn say nothing of the clients that sent the requests.
    clients = None if source.drawn else waiting_clients(kept, source.findings.clients)
    if clients is not None:
        words, count = clients
        instance = replace(instance, clients=count)
        notes.append(f"{words}: {clients_words(count)}")

    if rates := source.findings.accepted:
        instance = with_drafts(instance, len(rates), rates=rates, seed=wanted.seed)
        notes.append(f"the server accepted drafts: {instance.granted}, drawn by the file's rates")

    why = wanted.changes  # the first reason why the trace's own times are no measured ones
    if kept.latency_s is None:
        why = why or "no latencies (of csv and jsonl, columns latency or finished_at)"
    if not rows.arrivals:
        why = why or "latencies, but no arrivals (of a benchmark, start_times)"

    report = TraceReport(
        read=source.window.taken,
        dropped=rows.dropped,
        failed=rows.failed,
        unreadable=source.findings.unreadable,
        first_dropped_line=rows.first_dropped_line,
        backwards=rows.backwards,
        first_backwards_line=rows.first_backwards,
        arrivals=rows.arrivals,
        measured=None if why else _measured(file, kept, instance),
        unmeasured=why,
        model=source.findings.model,
        notes=tuple(notes),
    )
    return instance, report, source.findings


def _source(file: Path, form: TraceFormat, wanted: TraceOptions) -> Source:
    """Return what the reader of a format gets of a file and the options.

    In closed loop a prompt repeats the turns before it, so by default texts give ids of tokens
    there (`shared`), and arrivals count as drawn.
    """
    from optsched.workloads.traces.tokenizer import tokens_of

    return Source(
        file,
        Window(wanted.offset, wanted.limit),
        columns=wanted.columns or {},
        units=wanted.units,
        success=frozenset(wanted.success),
        run=wanted.run,
        drawn=wanted.rate is not None or wanted.sessions,
        closed=wanted.sessions,
        shared=wanted.sessions if wanted.prefixes is None else wanted.prefixes,
        tokens=tokens_of(wanted.tokenizer),
        form=form,
        findings=Findings(wanted.strict, wanted.ids_tokens),
    )


def _arrivals(
    kept: Block, wanted: TraceOptions, rng: np.random.Generator, *, sort: bool
) -> tuple[Block, NDArray[np.int64]]:
    """Return the requests, sorted by arrival if need be, and nanoseconds since the first.

    `sort`: whether the rows of the file are not in the order of their times. Calls of sessions stay
    in the order of the file, which `after` goes by.
    """
    time = kept.time_ns
    if wanted.sessions:
        if time is not None and wanted.rate is None:
            return kept, time - time.min()

        # One draw for each session, which all of its calls have. A call is its name, those before
        # it and a wait, and a name is the session's with that of the call (`Block.calls`).
        assert kept.calls is not None
        names = [name[0] for name, _, _ in kept.calls]
        session = np.unique(names, return_inverse=True)[1]
        return kept, _poisson(int(session.max()) + 1, wanted.rate, rng)[session]
    if wanted.rate is not None or time is None:
        return kept, _poisson(len(kept.line), wanted.rate, rng)

    order = np.argsort(time, kind="stable")
    return kept.pick(order) if sort else kept, time[order] - time.min()


def _instance(
    file: Path, kept: Block, wanted: TraceOptions, since_ns: NDArray[np.int64], ids_tokens: int
) -> Instance:
    """Return the instance of some rows.

    `since_ns`: their arrivals in nanoseconds since the first. `ids_tokens`: the tokens that an id
    stands for.
    """
    columns: dict[str, Any] = {"weight": kept.weight}
    if wanted.prefixes:
        columns |= prefix_columns(kept, ids_tokens, wanted.outputs, wanted.slack)
        block = ids_tokens if ids_tokens > 1 else wanted.kv_block_tokens
        columns["prefix_block_tokens"] = wanted.prefix_block_tokens or block

    length, scale = wanted.round_seconds, _exact(wanted.rate_scale, "rate_scale")
    in_rounds, name = length is not None, file.name.removesuffix(".gz").rpartition(".")[0]
    arrival: NDArray[Any] = since_ns / 1e9 / float(scale)
    # To divide times by the scale is to make rounds as much longer, and that is exact.
    if length is not None:
        arrival = _rounds(since_ns, scale * _exact(length, "round_seconds"))

    columns["arrival"] = arrival
    if wanted.sessions:
        columns |= _session_columns(kept, arrival, wanted)

    try:
        return Instance(
            prompt_tokens=kept.prompt_tokens,
            output_tokens=kept.output_tokens,
            kv_capacity=wanted.kv_capacity or DEFAULT_KV_CAPACITY,
            time_unit="round" if in_rounds else "second",
            kv_accounting=wanted.kv_accounting or ("generated" if in_rounds else "cached"),
            kv_block_tokens=wanted.kv_block_tokens,
            kv_window=wanted.kv_window,
            name=name if wanted.name is None else wanted.name,
            **columns,
        )
    except InputError as error:
        hint = "; a larger kv_capacity fits" if "kv_capacity" in str(error) else ""
        raise InputError(f"{_at_line(file, error, kept.line)}{hint}") from None


def _session_columns(kept: Block, arrival: NDArray[Any], wanted: TraceOptions) -> dict[str, Any]:
    """Return the columns of sessions, and arrivals without those of calls that others precede.

    So a call has either an arrival, or calls that it comes after and a delay behind them.
    """
    assert kept.calls is not None
    place = {name: i for i, (name, _, _) in enumerate(kept.calls)}
    after = [[place[name] for name in before] or None for _, before, _ in kept.calls]
    scale, length = _exact(wanted.think_scale, "think_scale"), wanted.round_seconds
    waits_ns = np.array([wait for _, _, wait in kept.calls], dtype=np.int64)
    delay: NDArray[Any] = waits_ns / 1e9 * float(scale)
    if length is not None:  # longer delays are those in shorter rounds, and that is exact
        delay = _rounds(waits_ns, _exact(length, "round_seconds") / scale)

    arrivals, delays = list[Any](arrival.tolist()), list[Any](delay.tolist())
    for i, row in enumerate(after):
        if row is None:  # a first call, whose wait means nothing
            delays[i] = 0
        else:
            arrivals[i] = None

    return {"arrival": arrivals, "after": after, "delay": delays}


def _measured(file: Path, kept: Block, instance: Instance) -> Measured:
    """Return the measured times of an instance's requests, in the order of its requests."""
    assert kept.latency_s is not None
    # A TTFT may be above a latency by the rounding of sums.
    ttft = None if kept.ttft_s is None else np.minimum(kept.ttft_s, kept.latency_s)
    try:
        return Measured(
            kept.latency_s,
            ttft,
            instance_sha256=instance.sha256,
            requests_sha256=instance.requests_sha256,
            steps=None if kept.gaps is None else kept.gaps.tolist(),
        )
    except InputError as error:
        raise _at_line(file, error, kept.line) from None


def _at_line(file: Path, error: InputError, line: NDArray[np.int64]) -> InputError:
    """Return an error of an instance with the file, and the line of the request that it names."""
    request = re.search(r"request (\d+)", str(error))
    place = "" if request is None else f" (line {line[int(request[1])]})"
    return InputError(f"{file}: {error}{place}")


def _poisson(n: int, rate: float | None, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return Poisson arrivals in nanoseconds, of which the first is 0.

    `rate`: requests a second. With none or an infinite one all arrive at 0.
    """
    if rate is None or rate == math.inf:
        return np.zeros(n, dtype=np.int64)

    gaps = rng.exponential(1e9 / rate, n)
    gaps[0] = 0.0
    return np.rint(np.cumsum(gaps)).astype(np.int64)


def _rounds(since_ns: NDArray[np.int64], length_s: Fraction) -> NDArray[np.int64]:
    """Return floor(time / length) exactly: 0.3 s is in round 3 of 0.1 s, not in round 2."""
    step_ns = length_s * 10**9
    if int(since_ns.max()) * step_ns.denominator < 2**63 and step_ns.numerator < 2**63:
        return since_ns * step_ns.denominator // step_ns.numerator

    # Python's integers have no end, and numbers that are too large are refused later.
    exact = [int(t) * step_ns.denominator // step_ns.numerator for t in since_ns]
    return np.array(exact, dtype=object)


def _exact(value: float, name: str) -> Fraction:
    """Return a positive number as the decimal that it prints as."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise InputError(f"{name}: found {value!r}; expected a number")
    if not 0 < value < float("inf"):
        raise InputError(f"{name}: found {value!r}; expected a finite number above 0")

    return Fraction(str(value))
