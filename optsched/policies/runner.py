"""What every scheduler that runs has in common: how it begins, and what it says about itself.

Compiled loops (`optsched.policies.engine`) import this file and no scheduler.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import alone_ms
from optsched.costs.cost import BatchCost, CostModel, UnitCost
from optsched.policies.workers import Job, Workers, hand_out
from optsched.problem.errors import LoopError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule

if TYPE_CHECKING:
    from optsched.judge.life import Records

__all__ = ["Job", "Order", "Runner", "Workers"]

Order = Literal[
    "arrival", "prompt", "output", "total", "volume", "work", "deadline", "slack", "random",
    "session", "attained", "ratio", "response",
]  # fmt: skip

Group = Literal["waiting", "running", "running_decode", "running_prefill", "prefill", "all"]
Admission = Literal["present", "lookahead", "reserve", "protect"]
Overflow = Literal["evict_latest", "clear", "evict_shortest"]

DUE = ("deadline", "slack")
"""Orders by times that count from a request's release."""

ANEW = ("ratio", "response")
"""Orders by what happens while requests wait."""

MAX_STALLED_BATCHES = 1_000_000
"""More batches than this without a completion, plus the longest output, are an endless loop."""


class Runner:
    """A scheduler that knows how it is run: `Rules`, `Windows`, `Trail`, or an `Online` object.

    Attributes
    ----------
    hybrid, chunked : bool
        Whether it makes batches that hold both phases, and splits prefills, where it may.
    moves : bool
        Whether it lets requests wait whose KV comes from another machine.
    drafts : bool
        Whether it verifies drafts, where the server has some (`Instance.num_speculative_tokens`).
    """

    hybrid: ClassVar[bool] = False
    chunked: ClassVar[bool] = False
    moves: ClassVar[bool] = True
    drafts: ClassVar[bool] = False

    def run(self, job: Job) -> Schedule:
        """Run the scheduler until every request has finished.

        Parameters
        ----------
        job : Job

        Returns
        -------
        Schedule
            The decisions, as a schedule of ``job.problem``.

        Raises
        ------
        LoopError
            If the scheduler would go on for ever, or cannot go on.
        """
        begun = self.begin(job, 1)
        if begun is None:
            raise NotImplementedError

        return hand_out(begun, job, lambda request, now: 0, in_steps=False)

    def begin(self, job: Job, workers: int) -> Workers | None:
        """Return workers that run this scheduler in steps, or None if it runs only whole instances.

        Parameters
        ----------
        job : Job
        workers : int
            Number of workers. Each has the instance's KV capacity and limits.
        """
        return None

    def warm_up(self) -> None:
        """Run a tiny instance, so that compiling and loading code count in no measured time."""
        tiny = Instance(np.array([0]), np.array([1]), np.array([1]), kv_capacity=2)
        with suppress(LoopError):  # a policy that admits nothing here is loaded all the same
            self.run(Job(tiny, tiny, UnitCost()))

    def uses_lengths(self, instance: Instance) -> bool | None:
        """Return whether decisions use output lengths, true or predicted; None if it cannot say.

        Parameters
        ----------
        instance : Instance
        """
        return None

    def allows(self, instance: Instance) -> str | None:
        """Return why the scheduler cannot run on an instance, or None if it can.

        Parameters
        ----------
        instance : Instance
        """
        return None

    def switched_off(self, instance: Instance) -> tuple[str, ...]:
        """Return, in words, which features of the scheduler an instance switches off.

        Parameters
        ----------
        instance : Instance
        """
        notes = []
        if self.hybrid and instance.hybrid_batching is False:
            notes.append("hybrid batching is off by the instance")
        if self.chunked and instance.chunked_prefill is False:
            notes.append("chunked prefill is off by the instance")
        if instance.drafts is not None and not self.drafts:
            notes.append("the policy verifies no drafts, so that its decode steps yield one token")

        return tuple(notes)


def endless(job: Job, request: int, batch: int, now: float, reason: str) -> LoopError:
    """Return the error of a scheduler that would go on for ever, or cannot go on."""
    problem = job.problem
    where = f"batch {batch} at {now + problem.first_arrival:.6g} {problem.time_unit}s"
    about = f", request {request}" if request >= 0 else ""
    return LoopError(f"policy {job.name!r}: endless loop at {where}{about}: {reason}")


def beyond_limits(instance: Instance, size: int) -> str | None:
    """Return which limit on a batch's tokens an input exceeds that is not split."""
    exceeded = instance.limits.exceeded(np.array([size]))
    if exceeded is None:
        return None

    name, limit, _ = exceeded
    return f"its input of {size} tokens exceeds {name} {limit}, and is not split"


def too_long(instance: Instance) -> str | None:
    """Return which request's prompt is longer than a batch's limit allows without a split."""
    exceeded = instance.limits.exceeded(instance.prompt_tokens)
    if exceeded is None:
        return None

    name, limit, i = exceeded
    prompt = instance.prompt_tokens[i]
    found = f"request {i}: prompt_tokens {prompt} exceeds {name} {limit}"
    return f"{found}, and the policy splits no prefill"


def no_room_for_drafts(instance: Instance) -> str | None:
    """Return which request's last drafts have no room even if it is alone."""
    drafts = instance.num_speculative_tokens or 0
    # `peak_tokens` has the offset already, and `kv_of` adds it.
    peak = instance.kv_of(instance.peak_tokens - instance.kv_offset + drafts)
    if drafts == 0 or peak.max() <= instance.kv_capacity:
        return None

    i = int(np.argmax(peak))
    return f"request {i}: it and {drafts} drafts take {peak[i]} of {instance.kv_capacity} KV tokens"


def own_work(
    prompt: NDArray[np.int64], output: NDArray[np.int64], cost: CostModel
) -> NDArray[np.float64]:
    """Return what each request adds to the time of its batches.

    In seconds this is the time of a whole prefill, and of o - 1 decode steps that read the KV
    cached before them, without the fixed costs of batches. In rounds a batch takes the same time
    whatever it holds. The work is then the KV volume s o + o (o + 1) / 2.
    """
    s, o = prompt.astype(np.float64), output.astype(np.float64)
    if not isinstance(cost, BatchCost):
        return s * o + o * (o + 1) / 2

    return np.asarray(cost.layers * alone_ms(cost.array, s, o, fixed=False) / 1000.0)


def attained(job: Job, requests: Records, request: int, at: float) -> tuple[float, float]:
    """Return (work, time) of the requests of a request's session that have ended by its release.

    The time sums up how long each of them took from its own release on.
    """
    instance, sessions = job.instance, job.instance.sessions
    if sessions is None:
        return 0.0, 0.0

    ended = requests["finish"] <= at
    earlier = np.flatnonzero(ended & (sessions.session == sessions.session[request]))
    work = own_work(instance.prompt_tokens[earlier], instance.output_tokens[earlier], job.cost)
    durations = requests["finish"][earlier] - requests["release"][earlier]
    return float(work.sum()), float(durations.sum())


def first_deadline(instance: Instance) -> NDArray[np.float64]:
    """Return when each request's first token is due by its SLO on TTFT.

    In an instance with sessions this counts from the request's release, which nobody knows yet.
    """
    if instance.slo_ttft is None:
        return np.full(instance.n, np.inf)

    release = np.zeros(instance.n) if instance.after is not None else instance.release
    return np.asarray(release + instance.slo_ttft)


def latest_start(instance: Instance, cost: CostModel) -> NDArray[np.float64]:
    """Return when the prefill of each request must start for its first token to be in time.

    It counts from where `first_deadline` does. The prefill is timed alone in its batch, with the
    batch's fixed costs (`fixed`).
    """
    prefill_s = np.ones(instance.n)  # in rounds a prefill takes one
    if isinstance(cost, BatchCost) and not instance.in_rounds:
        ones = np.ones(instance.n)
        prompt = instance.prompt_tokens.astype(np.float64)
        prefill_ms = alone_ms(cost.array, prompt, ones, fixed=True)
        prefill_s = np.asarray(cost.layers * prefill_ms / 1000.0)

    return first_deadline(instance) - prefill_s


def order_key(
    order: Order, instance: Instance, predicted: NDArray[np.int64], cost: CostModel
) -> NDArray[np.float64]:
    """Return what an order of `Rules` compares, before ties. Loops compare it as float64.

    In an instance with sessions the keys of `DUE` count from the release, and ``"attained"`` and
    ``"response"`` are those of sessions that have not been served. Other keys are
    replaced by their ranks, so that no integer loses digits.
    """
    prompt, sessions = instance.prompt_tokens, instance.sessions
    # Ties are broken by arrival, or at random. No session has attained anything yet.
    none = ("arrival", "random", "attained")
    if order in none or (order == "session" and sessions is None):
        return np.zeros(instance.n)

    prefill = own_work(prompt, np.ones_like(prompt), cost)
    key = {
        "prompt": lambda: prompt,
        "output": lambda: predicted,
        "total": lambda: prompt + predicted,
        "volume": lambda: prompt * predicted + predicted * (predicted + 1) // 2,
        "work": lambda: own_work(prompt, predicted, cost),
        "deadline": lambda: first_deadline(instance),
        "slack": lambda: latest_start(instance, cost),
        # It is divided by, and is 0 where a cost model has no work by the token.
        "ratio": lambda: np.maximum(prefill, 1e-12),
        "response": lambda: np.maximum(prefill, 1e-12),
        "session": lambda: sessions.over(instance.given_release, np.minimum)[sessions.session],  # type: ignore[union-attr]
    }[order]()
    # These are computed with while requests wait, or when they are released.
    if order in ANEW or (order in DUE and sessions is not None):
        return np.asarray(key)

    return np.unique(key, return_inverse=True)[1].astype(np.float64)


def waiting_rank(
    order: Order, instance: Instance, predicted: NDArray[np.int64], cost: CostModel
) -> NDArray[np.int64]:
    """Return requests' places in an order of `Rules`; ties by (arrival, index)."""
    key = order_key(order, instance, predicted, cost)
    order_of = np.lexsort((np.arange(instance.n), instance.release_times, key))
    rank = np.empty(instance.n, dtype=np.int64)
    rank[order_of] = np.arange(instance.n)

    return rank
