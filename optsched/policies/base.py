"""What a scheduler is: `Rules` or `Windows` as data, or any object that answers batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import BatchCost, CostModel, UnitCost
from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError, LoopError
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import EvictMode, Schedule

Order = Literal["arrival", "prompt", "output", "total", "volume", "work", "random"]
Group = Literal["waiting", "running", "running_decode", "running_prefill", "all"]
Admission = Literal["present", "lookahead", "reserve", "protect"]
Overflow = Literal["evict_latest", "clear", "evict_shortest"]
Lengths = Literal["predicted", "lower", "upper", "hindsight"]

MAX_WORKERS = 10_000
"""Most workers of `Windows`."""


@dataclass(frozen=True, eq=False)
class Job:
    """What a scheduler is run for.

    Parameters
    ----------
    instance : Instance
        As the scheduler is told it: with what is predicted.
    problem : Instance
        The same requests as the schedule's reader knows them.
    cost : CostModel
    seed : int
        For decisions at random.
    name : str
        What errors call the scheduler.
    """

    instance: Instance
    problem: Instance
    cost: CostModel
    seed: int = 0
    name: str = "policy"


class Runner:
    """A scheduler that knows how it is run: `Rules`, `Windows`, `Trail`, or an `Online` object.

    Attributes
    ----------
    hybrid, chunked : bool
        Whether it makes batches that hold both phases, and splits prefills, where it may.
    """

    hybrid: ClassVar[bool] = False
    chunked: ClassVar[bool] = False

    def run(self, job: Job) -> Schedule:
        """Run to the end.

        Raises
        ------
        LoopError
            It would go on for ever, or cannot go on.
        """
        raise NotImplementedError

    def warm_up(self) -> None:
        """Load what it runs on, so that no clock sees compiled code being made or loaded."""
        one = Instance(np.array([0]), np.array([1]), np.array([1]), kv_capacity=2)
        self.run(Job(one, one, UnitCost()))

    def uses_lengths(self, instance: Instance) -> bool | None:
        """Whether it uses (predicted) output lengths on an instance; None: it cannot say."""
        return None

    def allows(self, instance: Instance) -> str | None:
        """Return why an instance rules it out, or None if it may run there."""
        return None

    def waiting_rank(self, instance: Instance, cost: CostModel) -> NDArray[np.int64] | None:
        """Return each request's fixed place among those that wait, or None if there is none."""
        return None

    def switched_off(self, instance: Instance) -> tuple[str, ...]:
        """Return, in words, which of its features an instance switches off."""
        notes = []
        if self.hybrid and instance.hybrid_batching is False:
            notes.append("hybrid batching is off by the instance")
        if self.chunked and instance.chunked_prefill is False:
            notes.append("chunked prefill is off by the instance")
        return tuple(notes)


def endless(job: Job, request: int, batch: int, now: float, reason: str) -> LoopError:
    """Return the error of a scheduler that would go on for ever, or cannot go on."""
    problem = job.problem
    where = f"batch {batch} at {now + problem.first_arrival:.6g} {problem.time_unit}s"
    about = f", request {request}" if request >= 0 else ""
    return LoopError(f"policy {job.name!r}: endless loop at {where}{about}: {reason}")


def too_long(instance: Instance) -> str | None:
    """Return which request's prompt does not fit into a batch unless it is split, or None."""
    for name in ("max_batch_tokens", "max_prefill_tokens"):
        limit = getattr(instance.limits, name)
        if limit is not None and (instance.prompt_tokens > limit).any():
            i = int((instance.prompt_tokens > limit).argmax())
            return (
                f"request {i}: prompt_tokens {instance.prompt_tokens[i]} exceeds {name} {limit}, "
                "and the policy splits no prefill"
            )
    return None


@dataclass(frozen=True)
class Rules(Runner):
    """A scheduler as data, run by the compiled engine (003, Algorithm 1; 002, Algorithms 1, 2).

    Every batch goes through ``groups``, and within a group through its candidates, adding what
    the limits allow. A waiting candidate that is refused ends its group.

    Parameters
    ----------
    order : {"arrival", "prompt", "output", "total", "volume", "work", "random"}
        Ascending order of waiting requests (ties: arrival, index): prompt tokens s, predicted
        output o, s + o, s o + o (o + 1) / 2, or `own_work`.
    ties : {"arrival", "random"}
        ``"random"``: equals in the order of predicted output (which is then the present
        estimate) break at random, drawn anew each time that a request starts to wait.
    lengths : {"predicted", "lower", "upper", "hindsight"}
        Which prediction is the estimate of an output; see `optsched.workloads.predict.estimates`.
    margin : int
        Tokens added to every estimate (002, section 6).
    requeue : {"order", "back"}
        Where an evicted request waits: at its place in ``order``, or behind those that wait.
    groups : tuple of {"waiting", "running", "running_decode", "running_prefill", "all"}
        Running requests are taken in order of (arrival, index). ``"all"`` stands alone: waiting
        and running requests in one line, both by ``order``; what does not fit is passed over,
        and after a waiting request that is refused only running ones go on.
    admission : {"present", "lookahead", "reserve", "protect"}
        When a waiting request fits: its input fits beside what is held now (all of it is held
        from the admission on, also where its prefill is split into chunks); KV stays within
        capacity at every predicted completion (002, inequality (5)); the predicted peaks of all
        running requests fit together (eviction-free, 003); or what is held stays within
        (1 - alpha) of the capacity (002, section 5.2).
    alpha : float
        Share of the capacity protected by ``"protect"``.
    overflow : {"evict_latest", "clear", "evict_shortest"}
        When a running request lacks KV: evict the running requests of latest arrival (the last
        by ``order`` when the group is ``"all"``), the candidate itself last; or, before the
        batch, clear every running request independently with probability ``beta``, a batch's
        time passing for every further draw that is needed; or, before the batch, evict in
        ascending estimate (ties at random) until the rest fits, each one's estimate rising to
        the tokens it had produced (001, Algorithm 2).
    beta : float
    promote : bool
        Whether a running request that has reached its estimate is evicted, to wait behind all
        others with the upper prediction as its estimate (001, Algorithm 6).
    make_room : bool
        With ``"evict_shortest"``: whether the KV that completions free is kept for waiting
        requests, so that running ones past their estimate grow only as others of them leave.
    hybrid, chunked : bool
        Whether a batch may hold both phases, and whether a prefill may be split.
    max_batch_tokens, max_prefill_tokens, max_running : int, optional
        The scheduler's own C, P and R_max. P counts all tokens already in the batch (003,
        section 3.1). Without chunking a prompt beyond C or P runs alone.
    evict_mode : {"restart", "recompute"}
        What an eviction loses in seconds; in rounds only restart exists.
    in_rounds : Rules, optional
        Rules for instances in rounds, where they differ.
    wide : Rules, optional
        Rules for prediction intervals whose `interval_ratio` is below ``wide_below``.
    wide_below : float
    """

    order: Order = "arrival"
    ties: Literal["arrival", "random"] = "arrival"
    lengths: Lengths = "predicted"
    margin: int = 0
    requeue: Literal["order", "back"] = "order"
    groups: tuple[Group, ...] = ("running", "waiting")
    admission: Admission = "present"
    alpha: float = 0.0
    overflow: Overflow = "evict_latest"
    beta: float = 1.0
    promote: bool = False
    make_room: bool = False
    hybrid: bool = True  # type: ignore[misc]
    chunked: bool = False  # type: ignore[misc]
    max_batch_tokens: int | None = None
    max_prefill_tokens: int | None = None
    max_running: int | None = None
    evict_mode: EvictMode = "recompute"
    in_rounds: Rules | None = None
    wide: Rules | None = None
    wide_below: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise InputError(f"alpha: {self.alpha!r}; 0 <= alpha < 1 is right")
        if not 0 < self.beta <= 1:
            raise InputError(f"beta: {self.beta!r}; 0 < beta <= 1 is right")
        if len(set(self.groups)) < len(self.groups) or (
            "running" in self.groups and len(self.groups) > 2
        ):
            raise InputError(f"groups: {self.groups!r}; each request in one group is right")
        if "all" in self.groups and (len(self.groups) > 1 or self.requeue == "back"):
            raise InputError(
                f"groups: {self.groups!r}; 'all' alone, with requeue='order', is right"
            )
        if self.chunked and (self.overflow != "evict_latest" or self.promote):
            raise InputError(
                f"overflow: {self.overflow!r} knows no split prefills; chunked=False is right"
            )
        if self.margin < 0:
            raise InputError(f"margin: {self.margin!r}; an integer >= 0 is right")
        if self.ties == "random" and (
            self.order not in ("output", "random")
            or self.overflow == "evict_latest"
            or self.requeue == "back"
            or "all" in self.groups
        ):
            raise InputError(
                "ties: 'random' needs order 'output' or 'random', requeue 'order', and an overflow "
                "other than 'evict_latest'"
            )
        if self.make_room and self.overflow != "evict_shortest":
            raise InputError("make_room: needs overflow='evict_shortest'")
        if self.order == "random" and self.ties != "random":
            raise InputError("order: 'random' needs ties='random'")
        for name in ("max_batch_tokens", "max_prefill_tokens", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: {value!r}; an integer >= 1 is right")

    @property
    def running_order(self) -> Order:
        """Order in which running requests are taken, and from whose end they are evicted."""
        return self.order if "all" in self.groups else "arrival"

    @property
    def uses_predictions(self) -> bool:
        """Whether decisions depend on predicted output lengths."""
        return self.order in ("output", "total", "volume", "work") or self.admission in (
            "lookahead",
            "reserve",
        )

    def on(self, instance: Instance) -> tuple[Rules, EvictMode, bool, bool]:
        """Return the rules for an instance, their eviction mode, hybrid batching and chunking.

        A switch that the instance forbids is off.
        """
        rules = self.in_rounds if instance.in_rounds and self.in_rounds is not None else self
        if rules.wide is not None and interval_ratio(instance) < rules.wide_below:
            rules = rules.wide
        mode: EvictMode = "restart" if instance.in_rounds else rules.evict_mode
        hybrid = rules.hybrid and instance.hybrid_batching is not False
        chunked = rules.chunked and instance.chunked_prefill is not False
        return rules, mode, hybrid, chunked

    def run(self, job: Job) -> Schedule:
        """See `optsched.policies.engine.rules`."""
        from optsched.policies.engine.rules import schedule

        return schedule(self, job)

    def uses_lengths(self, instance: Instance) -> bool:
        """Whether the form for the instance's time unit depends on predicted lengths."""
        return ((self.in_rounds if instance.in_rounds else None) or self).uses_predictions

    def allows(self, instance: Instance) -> str | None:
        """Return which prompt is too long, unless prefills are split."""
        split = self.chunked and instance.chunked_prefill is not False
        return None if split else too_long(instance)

    def waiting_rank(self, instance: Instance, cost: CostModel) -> NDArray[np.int64] | None:
        """Return the places in ``order``, by the true lengths, unless they are drawn."""
        order = self.on(instance)[0].order
        if order == "random":
            return None
        return waiting_rank(order, instance, instance.output_tokens, cost)

    def switched_off(self, instance: Instance) -> tuple[str, ...]:
        """Return what an instance switches off of the rules for it."""
        return Runner.switched_off(self.on(instance)[0], instance)


@dataclass(frozen=True)
class Windows(Runner):
    """A scheduler that decides once per window of tokens, as data (004, Algorithm 1).

    A request goes to the worker with the fewest unfinished requests when it arrives (ties: the
    lowest number) and stays there. Whenever a worker is free, the first of its requests by
    ``order`` form a batch, as many as ``batch_size`` and the KV capacity allow, and run until
    each has produced ``window`` tokens or one has finished; then the worker decides again.

    Parameters
    ----------
    order : {"arrival", "remaining", "total"}
        Ascending order of a worker's requests (ties: arrival, index): arrival, predicted tokens
        left (`optsched.problem.forecast.tokens_left`), or predicted output. It does not change
        within a window.
    window : int
        K, tokens.
    batch_size : int
        Most requests of a batch.
    workers : int
        Each with the instance's KV capacity and limits.
    aging : float
        Tokens by which a request moves forward in the order per second (or round) since its
        arrival, against starvation: on its worker a request is never passed by one that arrives
        more than (the most tokens ever predicted of it) / aging after it. 0: none.

    Notes
    -----
    What the paper leaves to vLLM 0.5: the prefills of a batch come first, in batches of their
    own, unsplit; a request that leaves the batch between windows keeps its KV, and loses it, to
    be recomputed, only when a batch lacks room: those outside the batch first, the last by
    ``order`` before others. A request whose input does not fit beside those chosen ends the
    choice. Prefill counts as one token of the window. In rounds, where an eviction loses the
    tokens produced, a request is still ranked by what it was last predicted.
    """

    order: Literal["arrival", "remaining", "total"] = "remaining"
    window: int = 50
    batch_size: int = 4
    workers: int = 1
    aging: float = 0.0

    def __post_init__(self) -> None:
        if self.order not in ("arrival", "remaining", "total"):
            raise InputError(f"order: {self.order!r}; arrival, remaining or total is right")
        most = {"window": MAX_TOKENS, "batch_size": MAX_TOKENS, "workers": MAX_WORKERS}
        for name, limit in most.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise InputError(f"{name}: {value!r}; an integer from 1 to {limit} is right")
        if not (isinstance(self.aging, (int, float)) and 0 <= self.aging < float("inf")):
            raise InputError(f"aging: {self.aging!r}; a number of tokens >= 0 is right")

    @property
    def uses_predictions(self) -> bool:
        """Whether decisions depend on predicted output lengths."""
        return self.order != "arrival"

    def run(self, job: Job) -> Schedule:
        """See `optsched.policies.engine.windows`."""
        from optsched.policies.engine.windows import schedule

        return schedule(self, job)

    def uses_lengths(self, instance: Instance) -> bool:
        """Whether the order is by predicted lengths."""
        return self.uses_predictions

    def allows(self, instance: Instance) -> str | None:
        """Return which prompt is too long: windows split no prefill."""
        return too_long(instance)


@dataclass(frozen=True, eq=False)
class View:
    """What a policy sees before a batch: requests that have arrived, and nothing hidden.

    Columns are read-only, indexed by request; entries of requests that have not arrived are -1.

    Parameters
    ----------
    now : float
        Time at which the batch would start (seconds or rounds).
    waiting : list of int
        Arrived requests without KV, in the order in which they came (evicted ones again at the
        end).
    running : list of int
        Requests that hold KV, by (arrival, index).
    arrival : ndarray of float64
    prompt_tokens, predicted : ndarray of int64
        Prompt, and predicted output tokens (the true ones when nothing was predicted).
    remaining : ndarray of float64
        Predicted output tokens left, >= 1: what the instance's forecast says of a request now, or
        ``predicted`` less the tokens produced.
    generated, cached : ndarray of int64
        Output tokens produced so far, and KV tokens stored.
    decoding : ndarray of bool
        Whether the whole input is cached, so that the next step is a decode of one token.
    kv_capacity, kv_offset : int
        M, and the KV tokens a running request holds beyond its cached ones (`Instance`).
    limits : Limits
        Hard limits of the instance.
    hybrid, chunked : bool
        Whether the instance lets a batch hold both phases, and a prefill be split.
    evict_mode : {"restart", "recompute"}
    generator : numpy.random.Generator
        For random decisions.
    cost : CostModel
        Batch times of the machine, as profiled.
    predicted_lower, predicted_upper : ndarray of int64 or None
        Prediction intervals, where the instance carries them.
    """

    now: float
    waiting: list[int]
    running: list[int]
    arrival: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    predicted: NDArray[np.int64]
    remaining: NDArray[np.float64]
    generated: NDArray[np.int64]
    cached: NDArray[np.int64]
    decoding: NDArray[np.bool_]
    kv_capacity: int
    kv_offset: int
    limits: Limits
    hybrid: bool
    chunked: bool
    evict_mode: EvictMode
    generator: np.random.Generator
    cost: CostModel
    predicted_lower: NDArray[np.int64] | None = None
    predicted_upper: NDArray[np.int64] | None = None

    def rest(self, i: int) -> int:
        """Return the tokens request ``i`` must process to produce its next one."""
        return int(self.prompt_tokens[i] + self.generated[i] - self.cached[i])

    def held(self, requests: Sequence[int] | None = None) -> int:
        """Return the KV tokens that ``requests`` (default: all running) hold now."""
        which = self.running if requests is None else list(requests)
        return int(self.cached[which].sum()) + self.kv_offset * len(which)


@dataclass(frozen=True)
class Batch:
    """A policy's answer: tokens to process per request, and what to evict before.

    An empty batch waits for the next arrival; with ``stall`` it lets the time of one batch of
    the running requests pass.
    """

    tokens: Mapping[int, int] = field(default_factory=dict)
    evict: Sequence[int] = ()
    stall: bool = False


class Policy(Protocol):
    """Anything that answers batch by batch.

    Two attributes are optional. ``evict_mode`` says what an eviction loses (default
    ``"recompute"``). ``clairvoyant = False`` says that the policy never reads the view's
    ``predicted`` columns, which hold the true output lengths where nothing was predicted; without
    it, and without predictions, results say that it may use them. A shipped policy may also be a
    `Runner`, with a compiled loop that decides as `batch` would.
    """

    def batch(self, view: View) -> Batch:
        """Return what the next batch processes."""


Scheduler = Rules | Windows | Policy
"""What can be simulated."""


def interval_ratio(instance: Instance) -> float:
    """Return alpha = l / u of the intervals' hull (001); 1 without intervals."""
    if instance.predicted_lower is None or instance.predicted_upper is None:
        return 1.0
    return float(instance.predicted_lower.min() / instance.predicted_upper.max())


def own_work(
    prompt: NDArray[np.int64], output: NDArray[np.int64], cost: CostModel
) -> NDArray[np.float64]:
    """Return what each request adds to the time of its batches, shape (n,).

    In seconds, its share of everything but the fixed costs of a batch: a whole prefill, then
    o - 1 decode steps that read the KV cached before them. In rounds, where batches take no
    less time for holding less, its KV volume s o + o (o + 1) / 2 in token-rounds.
    """
    s, o = prompt.astype(np.float64), output.astype(np.float64)
    if not isinstance(cost, BatchCost):
        return s * o + o * (o + 1) / 2
    prefill = (cost["token"] + cost["prefill_token"] + cost["prefill_square"] * s) * s
    step = cost["token"] + cost["decode_request"]
    read = s * (o - 1) + (o - 1) * (o - 2) / 2
    ms = prefill + cost["prefill_request"] + step * (o - 1) + cost["decode_kv"] * read
    return np.asarray(cost.layers * ms / 1000.0)


def waiting_rank(
    order: Order, instance: Instance, predicted: NDArray[np.int64], cost: CostModel
) -> NDArray[np.int64]:
    """Return the place of each request in an order of waiting requests, shape (n,).

    Ties break by (arrival, index), here and nowhere else.
    """
    prompt = instance.prompt_tokens
    key = {
        "arrival": lambda: np.zeros(instance.n),
        "random": lambda: np.zeros(instance.n),
        "prompt": lambda: prompt,
        "output": lambda: predicted,
        "total": lambda: prompt + predicted,
        "volume": lambda: prompt * predicted + predicted * (predicted + 1) // 2,
        "work": lambda: own_work(prompt, predicted, cost),
    }[order]()
    order_of = np.lexsort((np.arange(instance.n), instance.arrival, key))
    rank = np.empty(instance.n, dtype=np.int64)
    rank[order_of] = np.arange(instance.n)
    return rank
