"""What a scheduler may be: `Rules`, `Windows`, or any object that answers batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import CostModel
from optsched.policies.rules import Group, Rules, interval_ratio
from optsched.policies.runner import Job, Order, Runner, own_work, waiting_rank
from optsched.policies.windows import Windows
from optsched.problem.instance import Limits
from optsched.problem.schedule import EvictMode

__all__ = [
    "Batch", "Group", "Job", "Order", "Policy", "Rules", "Runner", "Scheduler", "View", "Windows",
    "interval_ratio", "own_work", "waiting_rank",
]  # fmt: skip


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


Scheduler = Runner | Policy
"""What can be simulated: `Rules`, `Windows`, another `Runner`, or an object with ``batch``."""
