"""The one table of metrics: each row has a name, words, unit, sense, meaning and function.

`Evaluation.metrics`, the schema of result files, the headers of tables, the report and the
documentation are made from `TABLE` or tested against it. A new metric is one more row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from optsched.problem.service import SLOS, with_spare

if TYPE_CHECKING:
    from optsched.problem.instance import Instance

Unit = Literal[
    "time", "time/token", "tokens", "tokens/time", "requests/time", "share", "count", "ratio"
]
"""What a metric is measured in. Times are in the instance's unit."""

# A time unit as readers see it: alone ("rounds"), and after a slash ("tokens/round").
_SHORT = {"round": ("rounds", "round"), "second": ("s", "s")}


def time_words(time_unit: str | None) -> str:
    """Return a unit of time as readers see it."""
    return _SHORT.get(str(time_unit), ("", ""))[0]


@dataclass(frozen=True)
class Metric:
    """A number derived from a judged schedule or from measured times.

    `meaning` is for the documentation and the schema; empty where the `words` of headers are
    enough. `needs` names attributes without which the metric is unknown: measured times have no
    batches and no KV. `function` computes the value, or None. `whole` says where every value is an
    integer. `parameters` are those of `optsched.evaluate` on which it depends.
    """

    name: str
    words: str
    unit: Unit
    meaning: str
    needs: tuple[str, ...]
    function: Callable[[Any], Any]
    sense: Literal["min", "max"] = "min"
    whole: Literal["never", "rounds", "always"] = "never"
    parameters: tuple[str, ...] = ()

    def of(self, judged: Any) -> float | int | None:
        """Return the value of the metric."""
        if any(getattr(judged, need, None) is None for need in self.needs):
            return None

        value = self.function(judged)
        if value is None:
            return None

        return int(value) if self.is_whole(judged.instance) else float(value)

    def is_whole(self, instance: Instance) -> bool:
        """Whether every value of the metric on an instance is an integer."""
        return self.whole == "always" or (self.whole == "rounds" and instance.in_rounds)

    def header(self, time_unit: str | None, between: str = "\n") -> str:
        """Return the words of the metric and its unit in brackets, for the head of a column."""
        unit = self.unit_words(time_unit)
        return f"{self.words}{between}[{unit}]" if unit else self.words

    def unit_words(self, time_unit: str | None) -> str:
        """Return the unit of the metric as readers see it."""
        times, single = _SHORT.get(str(time_unit), ("", ""))
        if self.unit.startswith("time"):
            return times + self.unit.removeprefix("time")
        if self.unit.endswith("/time"):
            return self.unit.removesuffix("time") + single

        return "" if self.unit in ("count", "ratio") else self.unit


@dataclass(frozen=True, eq=False)
class Times:
    """Times of an instance's requests without a schedule, such as those of a real server.

    Columns have the shape (n,). TPOT and gap are NaN for requests of one output token.
    """

    instance: Instance
    latency: NDArray[Any]
    ttft: NDArray[Any] | None = None
    tpot: NDArray[np.float64] | None = None
    gap: NDArray[np.float64] | None = None
    released: NDArray[Any] | None = None

    @property
    def release(self) -> NDArray[Any]:
        """Release of each request since the first arrival: as `released`, or else as given."""
        return self.instance.release if self.released is None else self.released

    @property
    def span(self) -> Any:
        """Time from the first arrival to the last completion."""
        return (self.release + self.latency).max()

    @property
    def session_completion(self) -> NDArray[Any] | None:
        """Time from a session's first arrival to its last end, by session; None without any."""
        sessions, release = self.instance.sessions, self.release
        if sessions is None:
            return None

        ends = sessions.over(release + self.latency, np.maximum)
        return np.asarray(ends - sessions.over(release, np.minimum))


_REDUCE: dict[str, Callable[[NDArray[Any]], Any]] = {
    "mean": np.mean,
    "max": np.max,
    **{f"p{q}": partial(np.percentile, q=q) for q in (50, 90, 99)},
}


def _over(column: str, words: str, unit: Unit, meaning: str, names: str) -> Iterator[Metric]:
    """Yield the rows of a column, reduced over the requests that have a value in it.

    `names`: of the reductions in `_REDUCE`, with spaces between them.
    """

    def reduce(name: str, judged: Any) -> Any:
        values = getattr(judged, column)
        values = values[~np.isnan(values)]
        return _REDUCE[name](values) if values.size else None

    for name in names.split():
        function = partial(reduce, name)
        yield Metric(f"{name}_{column}", f"{name} {words}", unit, meaning, (column,), function)
        meaning = ""  # the documentation says it once, at the first row


def served_well(judged: Any) -> NDArray[np.bool_] | None:
    """Return which requests are within all their SLOs, shape (n,).

    None where there are no SLOs, or where a time that one limits was not measured.
    """
    limits = judged.instance.slos
    times = {name: getattr(judged, SLOS[name]) for name in limits}
    if not limits or any(column is None for column in times.values()):
        return None

    instance = judged.instance
    good = np.ones(instance.n, dtype=bool)
    for name, limit in limits.items():
        # In seconds a limit has a small spare, since clocks are rounded.
        allowed = with_spare(limit, judged.release, instance.in_rounds)
        good &= ~(times[name] > allowed)  # a NaN passes: one token has no TPOT and no gap to miss

    return good


def _attainment(judged: Any) -> float | None:
    good = served_well(judged)
    return None if good is None else good.mean()


def _goodput(judged: Any) -> float | None:
    good = served_well(judged)
    return None if good is None else good.sum() / float(judged.span)


_SLO = tuple(SLOS)

_ROWS = (
    Metric("tel", "TEL", "time", "total latency: the sum of finish - arrival",
           ("latency",), lambda judged: judged.latency.sum(), whole="rounds"),
    Metric("weighted_latency", "weighted latency", "time",
           "the sum of weight * (finish - arrival)",
           ("weight", "latency"), lambda judged: (judged.weight * judged.latency).sum(),
           whole="rounds"),
    Metric("weighted_completion", "weighted completion", "time", "the sum of weight * finish",
           ("weight", "finish"), lambda judged: (judged.weight * judged.finish).sum(),
           whole="rounds"),
    *_over("latency", "latency", "time", "finish - arrival", "mean p50 p90 p99"),
    *_over("ttft", "TTFT", "time", "arrival to first token", "mean p50 p90 p99"),
    *_over("tpot", "TPOT", "time/token",
           "time per output token after the first, over requests that have more than one",
           "mean p99 max"),
    *_over("gap", "gap", "time",
           "largest time between two output tokens of a request in succession", "p99 max"),
    *_over("queuing_delay", "queuing delay", "time", "arrival to first batch", "mean p99"),
    *_over("waiting", "waiting", "time", "latency less the time in batches", "mean"),
    Metric("makespan", "makespan", "time", "the last completion",
           ("span",), lambda judged: judged.span + judged.instance.first_arrival, whole="rounds"),
    *_over("stretch", "stretch", "ratio",
           "latency over the rounds that the request takes alone, in rounds", "max"),
    Metric("tps", "output tokens", "tokens/time",
           "output tokens per unit of time, from the first arrival to the last completion",
           ("span",), lambda judged: judged.instance.output_tokens.sum() / float(judged.span),
           sense="max"),
    Metric("peak_kv", "peak KV", "tokens", "largest number of KV tokens held",
           ("batch_kv",), lambda judged: judged.batch_kv.max(), whole="always"),
    Metric("mean_kv", "mean KV", "tokens", "KV tokens held, averaged over the time of batches",
           ("mean_kv",), lambda judged: judged.mean_kv),
    Metric("batches", "batches", "count", "batches, or rounds in which something runs",
           ("busy_batches",), lambda judged: judged.busy_batches, whole="always"),
    Metric("evictions", "evictions", "count", "how often a request lost its KV",
           ("evictions",), lambda judged: judged.evictions.sum(), whole="always"),
    Metric("prefix_hit_tokens", "prefix hits", "tokens",
           "input tokens that were found in the cache of shared prefixes and not computed",
           ("reuse",), lambda judged: judged.reuse.reused.sum(), sense="max", whole="always"),
    Metric("prefix_hit_rate", "prefix hit rate", "share",
           "prefix hits among the input tokens of all requests, again after each eviction",
           ("reuse",), lambda judged: judged.reuse.reused.sum() / judged.reuse.asked.sum(),
           sense="max"),
    Metric("peak_retained_kv", "peak retained KV", "tokens",
           "largest number of KV tokens that no request held and a later one found",
           ("reuse",), lambda judged: judged.reuse.batch_retained.max(), whole="always"),
    Metric("moves", "moves", "count", "how often KV moved to another machine",
           ("moves",), lambda judged: len(judged.moves.start), whole="always"),
    Metric("move_time", "time of moves", "time", "time that all moves of KV take together",
           ("moves",), lambda judged: (judged.moves.end - judged.moves.start).sum(),
           whole="rounds"),
    Metric("session_completion", "session completion", "time",
           "the sum over sessions of the time from their arrival to their last completion",
           ("session_completion",), lambda judged: judged.session_completion.sum(),
           whole="rounds"),
    *_over("session_completion", "session completion", "time",
           "from a session's arrival to its last completion", "mean p99"),
    Metric("slo_attainment", "SLO attainment", "share",
           "share of the requests within all their SLOs",
           (), _attainment, sense="max", parameters=_SLO),
    Metric("slo_goodput", "SLO goodput", "requests/time",
           "requests within all their SLOs, per unit of time",
           (), _goodput, sense="max", parameters=_SLO),
)  # fmt: skip

TABLE: dict[str, Metric] = {metric.name: metric for metric in _ROWS}
"""Every metric by name, in the order of files and tables."""

METRICS = tuple(TABLE)
"""Names of `Evaluation.metrics`, in the order of tables."""


def list_metrics() -> dict[str, Metric]:
    """Return every metric by name, in the order of tables."""
    return dict(TABLE)


def check_parameter(value: float) -> str | None:
    """Return what is expected of a parameter of a metric, or None if the value is that."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return "a number"

    return None if 0 < value < float("inf") else "a time > 0"


COMPARED = (
    *("mean_latency", "p99_latency", "mean_ttft", "p99_ttft"),
    *("mean_tpot", "makespan", "evictions"),
)
"""Names of the metrics that comparisons show for every scheduler, beside the objective."""


def compared(metrics: Iterable[Mapping[str, Any] | None]) -> tuple[str, ...]:
    """Return `COMPARED`, with the prefix hit rate where a scheduler's metrics have one."""
    hits = any((one or {}).get("prefix_hit_rate") is not None for one in metrics)
    return (*COMPARED, "prefix_hit_rate") if hits else COMPARED


_OPTIONAL = {"weight", "stretch", "reuse", "moves", "session_completion"}


def derive(judged: Any) -> dict[str, float | int | None]:
    """Return every metric by name; those that need one of `_OPTIONAL` only where there is some."""
    absent = {name for name in _OPTIONAL if getattr(judged, name, None) is None}
    return {name: m.of(judged) for name, m in TABLE.items() if absent.isdisjoint(m.needs)}
