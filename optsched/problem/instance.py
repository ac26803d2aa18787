"""The problem: requests as read-only columns, the KV capacity and the machine's limits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.problem.columns import (
    INT64_MAX,
    MAX_TOKENS,
    check_choice,
    first_of,
    plain_numbers,
    real_column,
    same_length,
    whole_column,
    whole_number,
)
from optsched.problem.drafts import MAX_DRAFTS, Accepted, Drafts, check_accepted, drafts_of
from optsched.problem.errors import InputError, UsageError
from optsched.problem.forecast import Forecast
from optsched.problem.markup import facts
from optsched.problem.prefixes import Prefixes, check_tree, tree_of_some
from optsched.problem.room import NO_WINDOW, KvWindow, kv_window_of, most_tokens, room_of
from optsched.problem.service import SLOS, plain_limits, slo_column
from optsched.problem.sessions import UNKNOWN, After, Sessions, check_sessions

TimeUnit = Literal["round", "second"]
KvAccounting = Literal["generated", "cached"]

MAX_ROUND = 2**53
"""Largest arrival in rounds. Beyond it a float64 clock no longer counts single rounds."""


MAX_SECOND = 2.0**42
"""Largest arrival in seconds. Beyond it a float64 no longer separates single milliseconds."""

MAX_WEIGHT = 1_000_000
"""Largest weight of a request."""

DEFAULT_KV_CAPACITY = 100_000
"""KV capacity, in tokens, of a trace in seconds for which none is given: Llama-2-7B on one A100."""

PREDICTIONS = ("predicted", "predicted_lower", "predicted_upper", "forecast")
"""Fields of an `Instance` that hold predictions."""

SWITCHES = ("hybrid_batching", "chunked_prefill")
"""Fields that forbid something, or leave it to each scheduler."""

PREFIX = ("prefix_parent", "prefix_tokens")
"""Columns of the tree of shared prefixes."""

SENT = ("arrival", "prompt_tokens", "output_tokens", *PREFIX, "after", "delay")
"""The columns that say what a server is sent, and when."""

# Columns of numbers, in the order of files; SLOs come later.
_NUMBERS = ("arrival", "prompt_tokens", "output_tokens", *PREDICTIONS[:3], "weight")


@dataclass(frozen=True)
class Limits:
    """Hard limits of the machine for each batch; ``None`` means unlimited.

    Parameters
    ----------
    max_batch_tokens : int, optional
        C: maximum number of tokens processed in one batch, prefill and decode together
        (``max_num_batched_tokens`` in vLLM).
    max_prefill_tokens : int, optional
        P: maximum number of prefill tokens processed in one batch.
    max_running : int, optional
        R_max: maximum number of requests that hold KV after a batch (``max_num_seqs`` in vLLM).
    """

    max_batch_tokens: int | None = None
    max_prefill_tokens: int | None = None
    max_running: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_prefill_tokens", "max_running"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(value, f"limits.{name}", 1, INT64_MAX))

    def as_dict(self) -> dict[str, int]:
        """Return the limits that are set, by name."""
        return {k: v for k, v in vars(self).items() if v is not None}

    def exceeded(self, inputs: NDArray[np.int64]) -> tuple[str, int, int] | None:
        """Return a limit on tokens that an input exceeds as a whole, its value and the first such.

        Parameters
        ----------
        inputs : ndarray of int64
            Tokens, by request.
        """
        for name, limit in self.as_dict().items():
            if name != "max_running" and (i := first_of(inputs > limit)) is not None:
                return name, limit, i

        return None


@dataclass(frozen=True, eq=False)
class Instance:
    """Requests to schedule, the KV capacity and the limits of the machine.

    Requests are indices ``0..n-1`` in the order given; arrivals need not be sorted.

    Parameters
    ----------
    arrival : array_like, shape (n,)
        Arrival times, >= 0: whole rounds, or seconds. None (-1) for requests with `after`.
    prompt_tokens, output_tokens : array_like of int, shape (n,)
        s_i >= 1 and o_i >= 1, in tokens.
    kv_capacity : int
        M: maximum number of KV tokens held at any time.
    time_unit : {"round", "second"}
        ``"round"``: every batch takes one round. ``"second"``: a cost model gives batch times.
    kv_accounting : {"generated", "cached"}
        Whether the KV of a request's newest token counts. While its j-th token is produced, a
        request holds s + j tokens (``"generated"``) or s + j - 1 (``"cached"``). See the page
        on formulations, section 0.
    limits : Limits
    hybrid_batching, chunked_prefill : bool, optional
        Whether a batch may mix prefills and decodes, and whether a prefill may be split. ``None``
        leaves the choice to each scheduler; optimal schedules may then mix, and may not split.
    predicted : array_like, shape (n,), optional
        Predicted output tokens, >= 1.
    predicted_lower, predicted_upper : array_like of int, shape (n,), optional
        Ends of an interval that contains the true output tokens. Give both or neither.
    forecast : Forecast, optional
        Predictions of the output tokens left, renewed while a request runs.
    weight : array_like of int, shape (n,), optional
        How much each request counts in weighted objectives, from 1 to a million. None: 1.
    slo_ttft, slo_tpot, slo_gap, slo_latency : array_like, shape (n,), optional
        The SLOs of each request, times > 0 in the instance's unit: the max TTFT, TPOT, gap between
        two output tokens, and latency. None or infinity: no limit.
    name : str
    id : sequence of str or int, optional
        External names of the requests, all different.
    known : mapping, optional
        What is known of the optimum: ``optimum``, ``bound``, ``best_known``, ``reference``.
    kv_block_tokens : int
        b: KV tokens of a block, >= 1 (``block_size`` in vLLM). A request holds whole blocks, so m
        tokens take ceil(m / b) b tokens of the capacity. What is left of a capacity that is no
        multiple of b is never used.
    prefix_parent : array_like, shape (n,), optional
        The prefix parent of each request: an earlier one in the list, or None (-1). Requests that
        share the beginning of their sequences can share its KV (`optsched.problem.prefixes`).
    prefix_tokens : array_like of int, shape (n,), optional
        Tokens, >= 0, that each request's sequence of prompt and output shares with its parent's.
        Give both columns or neither.
    prefix_block_tokens : int, optional
        B: tokens of the blocks in which KV is shared, a multiple of ``kv_block_tokens``
        (``block_size`` in vLLM, 1 in SGLang). None: ``kv_block_tokens``. Given without the columns,
        requests share no KV, but one that was evicted may find its own again.
    after : sequence, shape (n,), optional
        The request, or a list of the requests, that must end before each is released; None where
        its arrival is given. Nobody may wait in a circle (`optsched.problem.sessions`).
    delay : array_like, shape (n,), optional
        Time, >= 0, from the end of the last of these to the release: whole rounds, or seconds.
    clients : int, optional
        The number of clients of a measured run, each of which sent a request when its last one had
        ended. Arrivals are then the speed of that server, and not its traffic.
    num_speculative_tokens : int, optional
        k: drafts that a decode step verifies, at most (vLLM's name). It then processes 1 to k + 1
        tokens, and takes room for them. None, or 0: decode steps yield one token.
    accepted : sequence of sequences of int, shape (n,), optional
        Accepted drafts, 0 to k, of each decode step of each request. A step yields one token more
        (`optsched.problem.drafts`). None: every draft is accepted.
    kv_window : KvWindow or str, optional
        ``"128:12/24"``: of 24 layers 12 keep the KV of a request's last 128 tokens alone, whose
        attention slides over such a window. Of m > 128 tokens a request then takes
        128 + ceil((m - 128) 12 / 24) of the capacity, which counts tokens held in all layers.

    Raises
    ------
    InputError
        A value of the wrong type or out of range, columns of unequal length, or a request that
        can never fit into the KV capacity or under a hard token limit. The error names the
        field and the request.
    """

    arrival: NDArray[Any]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    kv_capacity: int
    time_unit: TimeUnit = "round"
    kv_accounting: KvAccounting = "generated"
    limits: Limits = field(default_factory=Limits)
    hybrid_batching: bool | None = None
    chunked_prefill: bool | None = None
    predicted: NDArray[np.float64] | None = None
    predicted_lower: NDArray[np.int64] | None = None
    predicted_upper: NDArray[np.int64] | None = None
    forecast: Forecast | None = None
    slo_ttft: NDArray[np.float64] | None = None
    slo_tpot: NDArray[np.float64] | None = None
    slo_gap: NDArray[np.float64] | None = None
    slo_latency: NDArray[np.float64] | None = None
    name: str = ""
    id: tuple[str | int, ...] | None = None
    known: Mapping[str, Any] | None = None
    kv_block_tokens: int = 1
    prefix_parent: NDArray[np.int64] | None = None
    prefix_tokens: NDArray[np.int64] | None = None
    prefix_block_tokens: int | None = None
    after: After | None = None
    delay: NDArray[Any] | None = None
    clients: int | None = None
    weight: NDArray[np.int64] | None = None
    num_speculative_tokens: int | None = None
    accepted: Accepted | None = None
    kv_window: KvWindow | None = None

    if TYPE_CHECKING:
        # Type checkers shall know that columns are made of anything like an array.
        def __init__(
            self,
            arrival: ArrayLike,
            prompt_tokens: ArrayLike,
            output_tokens: ArrayLike,
            kv_capacity: int,
            time_unit: TimeUnit = "round",
            kv_accounting: KvAccounting = "generated",
            limits: Limits = ...,
            hybrid_batching: bool | None = None,
            chunked_prefill: bool | None = None,
            predicted: ArrayLike | None = None,
            predicted_lower: ArrayLike | None = None,
            predicted_upper: ArrayLike | None = None,
            forecast: Forecast | None = None,
            slo_ttft: ArrayLike | None = None,
            slo_tpot: ArrayLike | None = None,
            slo_gap: ArrayLike | None = None,
            slo_latency: ArrayLike | None = None,
            name: str = "",
            id: tuple[str | int, ...] | None = None,
            known: Mapping[str, Any] | None = None,
            kv_block_tokens: int = 1,
            prefix_parent: ArrayLike | None = None,
            prefix_tokens: ArrayLike | None = None,
            prefix_block_tokens: int | None = None,
            after: After | None = None,
            delay: ArrayLike | None = None,
            clients: int | None = None,
            weight: ArrayLike | None = None,
            num_speculative_tokens: int | None = None,
            accepted: Sequence[Sequence[int]] | None = None,
            kv_window: KvWindow | str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        put = object.__setattr__.__get__(self)  # the fields of a frozen object are set this way
        check_choice(self.time_unit, "time_unit", ("round", "second"))
        check_choice(self.kv_accounting, "kv_accounting", ("generated", "cached"))
        if not isinstance(self.name, str):
            raise InputError(f"name: found {self.name!r}; expected a string")
        for switch in SWITCHES:  # hybrid_batching and chunked_prefill
            value = getattr(self, switch)
            if value is not None and not isinstance(value, (bool, np.bool_)):
                raise InputError(f"{switch}: found {value!r}; expected true, false or null")

            put(switch, None if value is None else bool(value))

        put("kv_capacity", whole_number(self.kv_capacity, "kv_capacity", 1, INT64_MAX))
        put("kv_block_tokens", whole_number(self.kv_block_tokens, "kv_block_tokens", 1, MAX_TOKENS))
        put("kv_window", kv_window_of(self.kv_window))
        if self.clients is not None:
            put("clients", whole_number(self.clients, "clients", 1, INT64_MAX))

        self._put_arrivals()

        for name in ("prompt_tokens", "output_tokens"):
            put(name, whole_column(getattr(self, name), f"requests.{name}", 1))
        if self.predicted is not None:
            put("predicted", real_column(self.predicted, "requests.predicted", 1.0, MAX_TOKENS))
        for name in ("predicted_lower", "predicted_upper"):
            if getattr(self, name) is not None:
                put(name, whole_column(getattr(self, name), f"requests.{name}", 1))
        if self.weight is not None:
            put("weight", whole_column(self.weight, "requests.weight", 1, MAX_WEIGHT))

        for name, column in self.slos.items():
            put(name, slo_column(column, f"requests.{name}", MAX_SECOND))

        self._check_columns()
        self._check_intervals()
        check_tree(self, put)
        # What requests would share in layers of a window is not modelled.
        if self.kv_window is not None and self.prefixes is not None:
            raise InputError(
                f"kv_window: found {self.kv_window} beside shared prefixes; expected one of both"
            )

        self._put_drafts()
        if self.forecast is not None:
            if not isinstance(self.forecast, Forecast):
                raise InputError(
                    f"requests.forecast: found {self.forecast!r:.80}; expected a Forecast"
                )

            self.forecast.check(self.output_tokens)

        self._check_fit()

    def _put_arrivals(self) -> None:
        """Check arrivals and sessions, and put them in as columns."""
        put = object.__setattr__.__get__(self)  # the fields of a frozen object are set this way
        arrival, after, delay = self.arrival, None, None
        if self.after is not None or self.delay is not None:
            longest = MAX_ROUND if self.in_rounds else MAX_SECOND
            arrival, after, delay = check_sessions(self, longest)

        if self.in_rounds:
            try:
                arrival = whole_column(arrival, "requests.arrival", 0, MAX_ROUND)
            except InputError as error:
                # Times with a fraction were perhaps meant as seconds.
                if not str(error).endswith("expected an integer"):
                    raise

                raise InputError(f"{error} of rounds, or time_unit 'second' for seconds") from None
        else:
            arrival = real_column(arrival, "requests.arrival", 0.0, MAX_SECOND)

        # Those of requests that come after others were checked as 0, and are -1 from here on.
        if after is not None:
            arrival = np.where([len(row) > 0 for row in after], UNKNOWN, arrival)
            arrival.setflags(write=False)

        put("arrival", arrival)
        put("after", after)
        put("delay", delay)

    def _put_drafts(self) -> None:
        """Check the drafts of decode steps and which are accepted, and put them in."""
        # The fields of a frozen object are set by this ``put``.
        put, name, drafts = object.__setattr__.__get__(self), "num_speculative_tokens", None
        if (given := self.num_speculative_tokens) is not None:
            drafts = whole_number(given, name, 0, MAX_DRAFTS)
        if drafts and self.prefixes is not None:  # both together are not modelled
            raise InputError(f"{name}: found {drafts} beside shared prefixes; expected none")

        accepted = self.accepted
        if accepted is not None:
            accepted = check_accepted(accepted, self.output_tokens, drafts)

        put(name, drafts or None)  # without drafts it is as if nothing had been said of them
        put("accepted", accepted if drafts else None)

    def _check_columns(self) -> None:
        """Check that columns are of one length, and ids different texts or integers."""
        n = len(self.arrival)
        if n == 0:
            raise InputError("requests: found an empty list; expected one or more requests")
        if self.id is not None and (isinstance(self.id, str) or not isinstance(self.id, Sequence)):
            raise InputError(
                f"requests.id: found {self.id!r}; expected a list of strings or integers"
            )

        same_length(n, {key: getattr(self, key) for key in (*_NUMBERS, *SLOS, "id")})
        if self.id is not None:
            seen: dict[str | int, int] = {}
            for i, label in enumerate(self.id):
                if isinstance(label, bool) or not isinstance(label, (str, int)):
                    raise InputError(
                        f"requests.id: request {i}: found {label!r}; expected a string or integer"
                    )
                if (first := seen.setdefault(label, i)) < i:
                    raise InputError(
                        f"requests.id: request {i}: found {label!r}, which request {first} has "
                        "too; expected unique ids"
                    )

            object.__setattr__(self, "id", tuple(self.id))

    def _check_intervals(self) -> None:
        """Check that intervals have both ends and hold the true output."""
        lower, upper = self.predicted_lower, self.predicted_upper
        if (lower is None) != (upper is None):
            missing = "predicted_lower" if lower is None else "predicted_upper"
            raise InputError(f"requests.{missing}: found nothing; expected both ends of intervals")

        if lower is None or upper is None:
            return
        for bad, text in (
            (lower > upper, "lower <= upper"),
            (self.output_tokens < lower, "lower <= output_tokens"),
            (self.output_tokens > upper, "output_tokens <= upper"),
        ):
            if (i := first_of(bad)) is not None:
                raise InputError(
                    f"requests.predicted_lower: request {i}: found the interval "
                    f"[{lower[i]}, {upper[i]}] and output_tokens {self.output_tokens[i]}; "
                    f"expected {text}"
                )

    def _check_fit(self) -> None:
        """Check that each request fits on the machine alone, and that no later sum overflows."""
        peak = self.kv_of(self.peak_tokens - self.kv_offset)  # `kv_of` adds the offset again
        if (i := first_of(peak > self.kv_capacity)) is not None:
            block = self.kv_block_tokens
            blocks = f", in whole blocks of {block}" if block > 1 else ""
            blocks += "" if self.kv_window is None else f", in windows of {self.kv_window}"
            raise InputError(
                f"kv_capacity: request {i}: found {self.kv_capacity}; expected at least "
                f"{peak[i]}, the KV tokens that it holds at its peak "
                f"(prompt {self.prompt_tokens[i]}, output {self.output_tokens[i]}, "
                f"{self.kv_accounting} accounting{blocks})"
            )

        exceeded = self.limits.exceeded(self.prompt_tokens)
        if self.chunked_prefill is False and exceeded is not None:
            name, limit, i = exceeded
            raise InputError(
                f"limits.{name}: request {i}: found {limit}; expected at least its "
                f"prompt_tokens {self.prompt_tokens[i]}, since chunked_prefill is false"
            )

        # In rounds, requests that run one after the other end by `latest`.
        latest = int(self.arrival.max()) + int(self.output_tokens.sum())
        latest += 0 if self.delay is None else int(self.delay.sum())
        tokens, output = self.prompt_tokens + self.output_tokens, self.output_tokens.astype(float)
        if max(latest * int(self.weights.sum()), (tokens * output).sum()) >= 2**62:
            raise InputError(
                "requests: found sums of completion times or KV volumes that may exceed 64-bit "
                "integers; expected fewer or smaller requests, or earlier arrivals"
            )

        # The batch model squares the c tokens of a prefill, after an eviction up to s + o - 1.
        # Without a window a batch holds at most kv_capacity, so its sum of c^2 is at most that
        # times the largest c.
        sizes = (tokens - 1).astype(float)
        squares = (sizes * sizes).sum()
        if self.kv_window is None:
            squares = min(squares, sizes.max() * self.kv_capacity)
        if not self.in_rounds and squares >= 2**63:
            raise InputError(
                f"requests: found squared prefills of one batch that may sum to {squares:.4g}, "
                "beyond 64-bit integers; expected fewer or smaller requests, or a smaller "
                "kv_capacity"
            )

    def __repr__(self) -> str:
        return (
            f"<Instance {self.name!r}: {self.n} requests in {self.time_unit}s, "
            f"kv_capacity {self.kv_capacity} ({self.kv_accounting})>"
        )

    def facts(self) -> list[tuple[str, Any]]:
        """Return what there is to say of it in short: words, and a value or None."""
        arrival, per = self.given_arrivals, self.time_unit if self.in_rounds else "s"
        unit, block = "rounds" if self.in_rounds else "s", self.kv_block_tokens
        span = float(arrival.max() - arrival.min())
        blocks = f", in blocks of {block}" if block > 1 else ""
        blocks += "" if self.kv_window is None else f", in windows of {self.kv_window}"

        def spread(column: NDArray[np.int64]) -> str:
            low, median, high = (int(q) for q in np.percentile(column, [0, 50, 100]))
            sums = f"mean {column.mean():,.1f}, sum {int(column.sum()):,}"
            return f"{low:,} to {high:,}, median {median:,}, {sums}"

        limits = self.limits.as_dict() | {
            name: value for name in SWITCHES if (value := getattr(self, name)) is not None
        }
        is_predicted = self.predicted is not None or self.predicted_upper is not None
        return [
            ("requests", self.n),
            ("KV capacity", f"{self.kv_capacity:,} tokens ({self.kv_accounting}{blocks})"),
            ("prefix block", self.prefixes and self.prefixes.block),
            ("arrivals", f"{arrival.min():g} to {arrival.max():g} {unit}"),
            ("rate", f"{self.n / span:.3g} requests/{per}" if span else None),
            ("clients", self.clients),
            ("sessions", self.sessions and int(self.sessions.session.max()) + 1),
            ("prompt tokens", spread(self.prompt_tokens)),
            ("output tokens", spread(self.output_tokens)),
            ("limits", ", ".join(f"{k} {v}" for k, v in limits.items()) or None),
            ("decode steps", self.granted or None),
            ("output lengths", "predicted" if is_predicted else "no predictions: true lengths"),
            *((f"known {name}".replace("_", " "), v) for name, v in (self.known or {}).items()),
        ]

    def _repr_html_(self) -> str:
        return facts(f"Instance {self.name}", self.facts())

    @property
    def n(self) -> int:
        """Number of requests."""
        return len(self.arrival)

    @property
    def weights(self) -> NDArray[np.int64]:
        """How much each request counts in weighted objectives: `weight`, or 1; shape (n,)."""
        return np.ones(self.n, dtype=np.int64) if self.weight is None else self.weight

    @property
    def kv_offset(self) -> int:
        """KV tokens that a request holds while it runs, beyond those it had cached: 1 or 0."""
        return 1 if self.kv_accounting == "generated" else 0

    def kv_of(self, tokens: Any) -> Any:
        """Return the KV tokens of the capacity that a request takes with so many cached.

        Parameters
        ----------
        tokens : int or array of int
            At least 1.
        """
        return room_of(tokens + self.kv_offset, self.kv_block_tokens, self.kv_window or NO_WINDOW)

    @property
    def largest_held(self) -> int:
        """The largest number of tokens held by a request that fits alone."""
        return most_tokens(self.kv_capacity, self.kv_block_tokens, self.kv_window or NO_WINDOW)

    @property
    def kv_by_token(self) -> bool:
        """Whether every token that a request holds takes one of the capacity."""
        return self.kv_block_tokens == 1 and self.kv_window is None

    @property
    def in_rounds(self) -> bool:
        """Whether every batch takes one round."""
        return self.time_unit == "round"

    @property
    def _numbers(self) -> dict[str, NDArray[Any]]:
        """The columns of `_NUMBERS` that the requests have, by name."""
        return {name: getattr(self, name) for name in _NUMBERS if getattr(self, name) is not None}

    @property
    def slos(self) -> dict[str, NDArray[np.float64]]:
        """The columns of SLOs that the requests have, by name."""
        return {name: getattr(self, name) for name in SLOS if getattr(self, name) is not None}

    @cached_property
    def prefixes(self) -> Prefixes | None:
        """The blocks of KV that requests can share; None where no prefix caching is modelled."""
        block = self.prefix_block_tokens
        if block is None and self.prefix_parent is None:
            return None

        # Without the columns nobody shares with another, but an evicted one may find its own KV.
        nobody = np.full(self.n, -1), np.zeros(self.n, dtype=np.int64)
        parent, shared = (
            nobody if self.prefix_parent is None else (self.prefix_parent, self.prefix_tokens)
        )
        sizes = self.prompt_tokens + self.output_tokens
        return Prefixes(parent, shared, sizes, block or self.kv_block_tokens)  # type: ignore[arg-type]

    @cached_property
    def drafts(self) -> Drafts | None:
        """What decode steps yield, for compiled loops; None where each yields one token."""
        drafts = self.num_speculative_tokens
        return None if drafts is None else drafts_of(self.output_tokens, drafts, self.accepted)

    @property
    def granted(self) -> str:
        """What bounds grant decode steps that verify drafts, in words; empty where none do."""
        if self.num_speculative_tokens is None:
            return ""

        how = "which are all accepted" if self.accepted is None else "accepted as recorded"
        return f"with {self.num_speculative_tokens} drafts a step, {how}"

    @property
    def has_predictions(self) -> bool:
        """Whether there are predictions of any kind; without them policies see true lengths."""
        return not all(getattr(self, name) is None for name in PREDICTIONS)

    def without_predictions(self) -> Instance:
        """Return the same instance with no predictions."""
        return replace(self, **dict.fromkeys(PREDICTIONS))  # type: ignore[arg-type]

    @cached_property
    def first_arrival(self) -> float | int:
        """The first arrival, from which every computation counts its time."""
        return self.given_arrivals.min().item()

    @property
    def given_arrivals(self) -> NDArray[Any]:
        """The arrivals of requests that come after no other."""
        return self.arrival if self.after is None else self.arrival[self.arrival != UNKNOWN]

    @cached_property
    def sessions(self) -> Sessions | None:
        """Which requests are released when others end; None where all arrivals are given."""
        if self.after is None or self.delay is None:
            return None

        return Sessions(self.after, self.delay)

    @property
    def release_times(self) -> NDArray[Any]:
        """Times from which on the requests may be processed, where they are given in advance.

        Bounds, formulations and searches read the arrivals here or from `release`. An instance
        whose releases depend on the schedule has none to be read, which is a `UsageError`.
        """
        if self.after is not None:
            raise UsageError(
                "requests.after: found requests that are released when others end; expected an "
                "instance without, since this needs all arrivals in advance"
            )

        return self.arrival

    def releases(self, finish: NDArray[Any]) -> NDArray[Any]:
        """Return `release_times` in a schedule by the ends of all requests.

        Parameters
        ----------
        finish : ndarray, shape (n,)
            Times of the instance.
        """
        if self.sessions is None:
            return self.release_times

        return self.sessions.release_times(self.arrival, finish)

    @property
    def arrivals_differ(self) -> bool:
        """Whether not all requests may be processed from the same moment on."""
        return self.after is not None or bool((self.arrival != self.arrival[0]).any())

    @cached_property
    def release(self) -> NDArray[np.float64]:
        """`release_times` since the first arrival, shape (n,), read-only, float64 in both units.

        Compiled loops count time from the first arrival, so that a Unix time stamp costs no
        digits. `at` turns their times into the instance's.
        """
        release = (self.release_times - self.first_arrival).astype(np.float64)
        release.setflags(write=False)
        return release

    @property
    def given_release(self) -> NDArray[np.float64]:
        """`release` of the requests with given arrivals, infinite for those with `after`."""
        if self.after is None:
            return self.release

        since = self.arrival - self.first_arrival
        return np.where(self.arrival == UNKNOWN, np.inf, since.astype(np.float64))

    @property
    def clock_origin(self) -> float:
        """What `read_start` subtracts from starts: the first arrival, or 0 in exact rounds."""
        return 0.0 if self.in_rounds else float(self.first_arrival)

    def at(self, since_first: ArrayLike) -> NDArray[Any]:
        """Return times since the first arrival as times of the instance.

        Parameters
        ----------
        since_first : array_like, any shape
            Times since the first arrival, in the instance's unit.
        """
        times: NDArray[Any] = np.asarray(since_first)
        if self.in_rounds:
            times = np.rint(times).astype(np.int64)

        return np.asarray(times + self.first_arrival)

    @cached_property
    def peak_tokens(self) -> NDArray[np.int64]:
        """Max tokens that each request holds, s + o or s + o - 1; shape (n,). See `kv_of`."""
        return self.prompt_tokens + self.output_tokens + (self.kv_offset - 1)

    @cached_property
    def volume(self) -> NDArray[np.int64]:
        """KV tokens that each uninterrupted run fills, summed over its rounds; shape (n,).

        This is s o + o (o + 1) / 2, and o less with ``"cached"`` accounting, without whole blocks
        and windows.
        """
        s, o = self.prompt_tokens, self.output_tokens
        return s * o + o * (o + 1) // 2 + (self.kv_offset - 1) * o

    def check_digest(self, digest: str | None, field: str) -> None:
        """Check that a digest from a file belongs to this instance.

        Parameters
        ----------
        digest : str or None
            SHA-256 of an instance, as `sha256`; None is accepted.
        field : str
            What the error calls the digest.
        """
        if digest not in (None, self.sha256):
            raise InputError(
                f"{field}: found {digest}, which is another instance's; expected {self.sha256} "
                f"of {self.name!r}"
            )

    def subset(self, index: ArrayLike, *, name: str | None = None) -> Instance:
        """Return an instance with some of the requests; only ``known`` is dropped.

        What two of them share of their prefixes stays what it was.

        Parameters
        ----------
        index : array_like of int or bool
            Indices of the requests, in the order wanted, or a mask of shape (n,).
        name : str, optional
            Name of the new instance; None keeps this one's.
        """
        who = np.arange(self.n)[np.asarray(index)]
        columns: dict[str, Any] = {k: v[who] for k, v in (self._numbers | self.slos).items()}
        if self.forecast is not None:
            columns["forecast"] = self.forecast.subset(who)
        if self.id is not None:
            columns["id"] = tuple(self.id[i] for i in who)
        if self.accepted is not None:
            columns["accepted"] = [self.accepted[i] for i in who]
        if self.prefix_parent is not None:
            columns |= zip(PREFIX, tree_of_some(self, who), strict=True)
        if self.sessions is not None:
            columns |= self.sessions.subset(who)

        return replace(self, **columns, known=None, name=self.name if name is None else name)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of an instance file, without fields that are absent."""
        requests: dict[str, Any] = {k: plain_numbers(v) for k, v in self._numbers.items()}
        if self.forecast is not None:
            requests["forecast"] = self.forecast.to_dict()

        requests |= {name: plain_limits(column) for name, column in self.slos.items()}
        if self.prefix_parent is not None and self.prefix_tokens is not None:
            requests["prefix_parent"] = [None if p < 0 else p for p in self.prefix_parent.tolist()]
            requests["prefix_tokens"] = self.prefix_tokens.tolist()

        if self.sessions is not None:
            requests["arrival"] = [None if a == UNKNOWN else a for a in requests["arrival"]]
            requests |= self.sessions.to_dict()
        if self.accepted is not None:
            requests["accepted"] = [list(map(int, row)) for row in self.accepted]
        if self.id is not None:
            requests["id"] = list(self.id)

        data: dict[str, Any] = {
            "format": "optsched-instance",
            "version": 1,
            "name": self.name,
            "time_unit": self.time_unit,
            "kv_capacity": self.kv_capacity,
            "kv_accounting": self.kv_accounting,
        }
        if self.kv_block_tokens != 1:
            data["kv_block_tokens"] = self.kv_block_tokens
        if self.kv_window is not None:
            data["kv_window"] = str(self.kv_window)

        optional: dict[str, Any] = {"prefix_block_tokens": self.prefix_block_tokens}
        optional["limits"] = self.limits.as_dict() or None
        for name in (*SWITCHES, "clients", "num_speculative_tokens"):
            optional[name] = getattr(self, name)

        optional |= {"requests": requests, "known": dict(self.known or ()) or None}
        return data | {name: value for name, value in optional.items() if value is not None}

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the content without ``name``, ``id``, ``clients`` and ``known``, as JSON.

        Numbers without a fraction are integers, and absent and null fields, which mean the same,
        left out.
        """
        data = self.to_dict()
        for key in ("name", "clients", "known"):
            data.pop(key, None)

        data["requests"].pop("id", None)
        return hashlib.sha256(canonical_json(data)).hexdigest()

    @cached_property
    def requests_sha256(self) -> str:
        """SHA-256 of what a server is sent: the columns `SENT` of the requests, as canonical JSON.

        It holds for every KV capacity, limit, SLO and prediction.
        """
        requests = self.to_dict()["requests"]
        sent = {name: requests[name] for name in SENT if name in requests}
        return hashlib.sha256(canonical_json(sent)).hexdigest()


def clients_words(clients: int) -> str:
    """Return what it means that a run had a fixed number of clients."""
    return (
        f"{clients} clients waited for their answers, so arrivals are the speed of the server that "
        "was measured and not its traffic: a faster one would have been sent more"
    )


def canonical_json(data: Any) -> bytes:
    """Return ``data`` as JSON with sorted keys and no spaces, the form that digests cover."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()
