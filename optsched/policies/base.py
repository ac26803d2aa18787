"""The kinds of scheduler: `Rules`, `Windows`, or any object that answers batch by batch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import alone_ms
from optsched.costs.cost import BatchCost, CostModel
from optsched.policies.rules import Group, Rules
from optsched.policies.runner import Job, Order, Runner, Workers, own_work, waiting_rank
from optsched.policies.windows import Windows
from optsched.problem.errors import InputError
from optsched.problem.instance import Limits
from optsched.problem.room import NO_WINDOW, KvWindow, room_of
from optsched.problem.schedule import EvictMode

__all__ = [
    "Batch", "Group", "Job", "Order", "Policy", "Rules", "Runner", "Scheduler", "View", "Windows",
    "Workers", "own_work", "waiting_rank",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class View:
    """What a policy sees before a batch: the requests that have arrived, and nothing hidden.

    Columns are read-only, have the shape (n,), and are indexed by request. Entries of requests
    that have not arrived are -1; ``generated`` and ``cached`` are 0 and ``decoding`` is false
    there.

    Parameters
    ----------
    now : float
        The time at which the batch would start, in seconds or rounds.
    waiting : list of int
        The requests that have arrived and hold no KV, in the order in which they arrived. An
        evicted request is added at the end.
    running : list of int
        The requests that hold KV, ordered by (arrival, index).
    arrival : ndarray of float64
        Arrival times, in seconds or rounds.
    prompt_tokens, predicted : ndarray of int64
        Prompt tokens, and predicted output tokens. The latter are the true ones when nothing was
        predicted.
    remaining : ndarray of float64
        Predicted output tokens that are left, >= 1. They come from the instance's forecast, or
        else are ``predicted`` minus ``generated``.
    generated, cached : ndarray of int64
        Output tokens produced so far, and KV tokens stored.
    decoding : ndarray of bool
        Whether the whole input is cached. The next step is then a decode of one token.
    kv_capacity, kv_offset, kv_block_tokens : int
        M, the KV tokens that a running request holds beyond its cached ones, and the tokens of a
        KV block (`Instance`).
    kv_window : KvWindow
        The window of sliding attention. Without one no layer slides. `kv_of` counts all of these.
    limits : Limits
        Hard limits of the instance.
    hybrid, chunked : bool
        Whether the instance lets a batch hold both phases, and lets a prefill be split.
    evict_mode : {"restart", "recompute"}
        Whether an eviction loses the output tokens produced as well as the KV.
    generator : numpy.random.Generator
        The source of randomness for random decisions.
    cost : CostModel
        The batch times of the machine, as profiled.
    predicted_lower, predicted_upper : ndarray of int64 or None
        Prediction intervals in tokens, where the instance carries them.
    weight : ndarray of int64 or None
        How much each request counts, where the instance has weights.
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
    kv_block_tokens: int = 1
    kv_window: KvWindow = NO_WINDOW
    weight: NDArray[np.int64] | None = None

    def rest(self, i: int) -> int:
        """Return the tokens that a request must process to produce its next one.

        Parameters
        ----------
        i : int
        """
        return int(self.prompt_tokens[i] + self.generated[i] - self.cached[i])

    def held(self, requests: Sequence[int] | None = None) -> int:
        """Return the KV tokens that some requests hold now.

        Parameters
        ----------
        requests : sequence of int, optional
            Running requests; default: all of them.
        """
        which = self.running if requests is None else list(requests)
        return int(self._kv_of(self.cached[which]).sum())

    def alone(self, i: int) -> float:
        """Return how long a request would take alone on the machine, from its prefill to its end.

        In seconds by ``cost``, in rounds one for each of its ``predicted`` tokens. What it has done
        so far does not count.

        Parameters
        ----------
        i : int
        """
        s, o = int(self.prompt_tokens[i]), int(self.predicted[i])
        if not isinstance(self.cost, BatchCost):
            return float(o)

        return float(self.cost.layers * alone_ms(self.cost.array, s, o, fixed=True) / 1000.0)

    def kv_of(self, tokens: int) -> int:
        """Return the KV tokens of the capacity that a request takes with so many tokens cached.

        Parameters
        ----------
        tokens : int
        """
        return int(self._kv_of(tokens))

    def _kv_of(self, tokens: Any) -> Any:
        return room_of(tokens + self.kv_offset, self.kv_block_tokens, self.kv_window)


# What the columns of a `Batch` must be.
_KINDS = {"tokens": Mapping, "evict": Collection, "reused": Mapping}


@dataclass(frozen=True)
class Batch:
    """A policy's answer: the tokens to process for each request, and whom to evict before.

    A batch without tokens and evictions waits for the next arrival.

    Parameters
    ----------
    tokens : mapping of int to int
        Tokens to process, >= 1, by request.
    evict : sequence of int
        Running requests that are evicted before the batch, in this order.
    stall : bool
        Whether a batch without tokens lets the time pass that one batch of all running requests
        would take.
    reused : mapping of int to int
        Tokens that a request which holds no KV claims from the cache of shared prefixes, before its
        own are processed (docs/formulations.md, Shared prefixes).
    """

    tokens: Mapping[int, int] = field(default_factory=dict)
    evict: Sequence[int] = ()
    stall: bool = False
    reused: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the kinds of the columns; the engine checks what is in them."""
        for name, kind in _KINDS.items():
            found = getattr(self, name)
            if not isinstance(found, kind):
                words = "a dict of tokens by request" if kind is Mapping else "a list of requests"
                raise InputError(f"{name}: found {found!r}; expected {words}, empty for none")


class Policy(Protocol):
    """Any object that answers batch by batch.

    Two attributes are optional. ``evict_mode`` says what an eviction loses (default
    ``"recompute"``). ``clairvoyant = False`` says that the policy never reads the view's
    ``predicted`` columns, which hold the true output lengths where nothing was predicted (`score`
    then leaves them out, and ``remaining`` with them). Without
    this attribute, and without predictions, results say that the policy may use true lengths. A
    policy of this package may also be a `Runner`, with a compiled loop that decides as `batch`
    would.
    """

    def batch(self, view: View) -> Batch:
        """Return what the next batch processes.

        Parameters
        ----------
        view : View
        """


Scheduler = Runner | Policy
"""What can be simulated: `Rules`, `Windows`, another `Runner`, or an object with ``batch``."""
