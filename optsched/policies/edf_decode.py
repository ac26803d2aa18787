"""Prefills in large pieces while those that decode can catch up; decodes by last deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from optsched.policies import policy
from optsched.policies.runner import Job, Runner, Workers, own_work
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import EvictMode
from optsched.problem.service import SLOS
from optsched.workloads.predict import estimates

if TYPE_CHECKING:  # the loop is loaded by those who run it
    from optsched.judge.life import Records
    from optsched.judge.replay import Limits


def limits_for(job: Job, mode: EvictMode) -> Limits:
    """Return the limits of batches, within which the cost model is valid.

    The loop fills batches by their time alone, and so might go beyond that range.
    """
    from optsched.judge.replay import limits_of

    limits, valid = limits_of(job.instance, mode), getattr(job.cost, "valid", {})
    largest = limits.max_batch_tokens
    tokens = min(largest, int(valid.get("max_batch_tokens", largest)))
    return limits._replace(max_batch_tokens=max(1, tokens))


def requests_of(job: Job) -> Records:
    """Return the records of requests for `optsched.policies.engine.deadlines`."""
    from optsched.policies.engine import common, deadlines as loop

    instance = job.instance
    limits = {name: instance.slos.get(name, np.full(instance.n, np.inf)) for name in SLOS}
    predicted, _ = estimates(instance)
    requests = common.new_requests(instance, loop.REQUEST_FIELDS)
    requests["estimate"] = predicted
    # A request holds most in its last batch: its prompt and all output tokens but the last.
    requests["peak"] = instance.kv_of(instance.prompt_tokens + predicted - 1)
    # In a session these count from a release that nobody knows yet, which `released` adds.
    release = np.zeros(instance.n) if instance.after is not None else instance.release
    requests["first_due"] = release + np.minimum(limits["slo_ttft"], limits["slo_latency"])
    requests["ends_by"] = release + limits["slo_latency"]
    requests["pace"], requests["gap"] = limits["slo_tpot"], limits["slo_gap"]
    # The time that a token may take, and the work up to the first token: that of the prefill.
    requests["step"] = np.minimum(limits["slo_tpot"], limits["slo_gap"])
    requests["work"] = own_work(instance.prompt_tokens, np.ones_like(predicted), job.cost)
    for name in ("due", "finish", "first_at"):  # unknown before the first token
        requests[name] = np.inf

    return requests


@policy("edf-decode", "prefills in bursts, decodes in the order in which their last tokens are due")
@dataclass(kw_only=True, eq=False)
class EdfDecode(Runner):
    """Prefills in large pieces while those that decode can catch up (docs/policies/deadlines.md).

    Parameters
    ----------
    urgent : float
        Prefills begin once the queue leaves so many seconds until a first token is late.
    piece, lump : float
        A batch with prefills takes at most ``piece`` seconds, and at least ``lump``, unless the
        queue is shorter.
    floor, behind : float
        A prefill may take as long as those that decode can be in time if each token that they have
        left takes ``floor`` of its SLO. Those that have less than ``behind`` of it decode first.
    share, smallest : float
        A batch of decodes takes at most ``share`` of the time that the one who is most behind has
        left for a token, but ``smallest`` of its SLO.
    load : float
        Seconds of decodes for each second of prefills, while requests wait.
    reserve : float
        The share of the KV that those who run will need, as predicted, that is kept for them.
    evict : float
        A prompt that is due and has no room evicts those that decode and have the most time to
        spare, if they have more than ``evict`` seconds beyond their refill. 0: none.
    mixed : bool
        Whether batches with prefills decode as well.
    drop : bool
        Whether the largest prefill of the queue waits until the others are done as soon as
        somebody of the queue would be late.
    trust : float
        The share of the tokens that a request is predicted to have left which it is sure to have.
        It must be in time if it ends after them.
    """

    hybrid: ClassVar[bool] = True
    chunked: ClassVar[bool] = True

    urgent: float = 2.0
    piece: float = 0.5
    share: float = 0.9
    floor: float = 0.7
    behind: float = 0.7
    smallest: float = 0.6
    lump: float = 0.05
    load: float = 0.3
    reserve: float = 0.8
    evict: float = 0.0
    mixed: bool = False
    drop: bool = True
    trust: float = 0.0

    def __post_init__(self) -> None:
        from optsched.policies.engine.deadlines import KNOBS

        for name in KNOBS:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(f"{name}: found {value!r}; expected a number >= 0")

    @property
    def row(self) -> NDArray[np.float64]:
        """The parameters, in the order of the loop."""
        from optsched.policies.engine.deadlines import KNOBS

        return np.array([getattr(self, name) for name in KNOBS], dtype=np.float64)

    def begin(self, job: Job, workers: int) -> Workers:
        """See `Runner.begin`. The loop is in `optsched.policies.engine.deadlines`."""
        from optsched.judge.life import UNLIMITED
        from optsched.policies.engine import common, deadlines as loop

        mode: EvictMode = "restart" if job.instance.in_rounds else "recompute"
        requests = requests_of(job)
        # One row of knobs for all, no arrival known in advance, and it runs to the end of all.
        settings = loop.Settings(self.row[None], 0.0, UNLIMITED, False)

        def released(request: int, at: float) -> None:
            """Let a request's deadlines count from its release, in an instance with sessions."""
            requests["first_due"][request] += at
            requests["ends_by"][request] += at

        run = common.Loop(loop.run, [(settings,)], released)
        state = common.new_state(loop.STATE_FIELDS, job.instance)
        return common.Compiled(job, requests, state, limits_for(job, mode), run, workers)

    def uses_lengths(self, instance: Instance) -> bool:
        """See `Runner.uses_lengths`. How far a request may fall behind depends on its length."""
        return True

    def allows(self, instance: Instance) -> str | None:
        """See `Runner.allows`. There must be deadlines."""
        if not {"slo_ttft", "slo_latency"} & set(instance.slos):
            return "the instance has neither slo_ttft nor slo_latency, by which the policy decides"

        return None
