"""What the loop of `optsched.policies.engine.rules` knows, and how much a prefill gets by it.

A batch takes what its limits allow. Where it keeps a pace, no more than leaves those that decode in
time; where prefills pause, no more than is worth its delay.
"""

from typing import NamedTuple, get_args

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life, memory
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.replay import Limits
from optsched.policies.engine import blocks, common
from optsched.policies.runner import Admission, Group, Overflow
from optsched.problem.kernel import njit

# The words in `Rules`, by their places.
WAITING, RUNNING, RUNNING_DECODE, RUNNING_PREFILL, PREFILL, ALL = range(len(get_args(Group)))
NO_GROUP = -1
PRESENT, LOOKAHEAD, RESERVE, PROTECT = range(len(get_args(Admission)))
EVICT_LATEST, CLEAR, EVICT_SHORTEST = range(len(get_args(Overflow)))

SORTINGS = {"ratio": 1, "response": 1}
RANKED, BY_RATIO, IN_GROUPS = 0, 1, 2
"""Whether the queue is sorted anew before each batch, and how."""

PASSED_OVER, REFUSED = 0, -1
"""A request gets no tokens. `PASSED_OVER`: others of its group may. `REFUSED`: none may."""

REQUEST_FIELDS = (
    *common.FIELDS,
    ("estimate", np.int64),  # of its output, at present
    ("second", np.int64),  # its estimate once it is promoted
    ("peak", np.int64),  # KV that it will hold by its estimate
    ("in_batch", np.int64),  # number of its latest batch, from 1
    ("tie", np.float64),
    ("promoted", np.bool_),
    ("pace", np.float64),  # mean time that each later token may take; infinite: any
    ("late_after", np.float64),  # latest start for a first token in time; infinite: no matter
    ("later", np.float64),  # work of its decodes, in seconds, where prefills are ordered by it
    ("group", np.int64),  # the first request of its group, which counts for all of it
    # How many of the group wait, or how long its session's calls took.
    ("count", np.float64),
)

# Where prefixes are cached. The others come last, as in `optsched.policies.engine.vllm_v1`.
CACHE_FIELDS = (
    ("reused", np.int64),  # tokens that it finds in the cache in the batch
    ("row", np.int64),  # of the cache's table, while it runs; or -1
    ("rank", np.int64),  # by release
    *REQUEST_FIELDS,
)

SETTINGS = (
    ("beta", np.float64),
    ("promote", np.bool_),
    ("make_room", np.bool_),
    ("late_last", np.bool_),
    ("paced", np.bool_),
    ("hold", np.float64),
    ("gate", np.float64),  # seconds for each token that those who decode have left
    ("piece", np.float64),  # seconds of a batch with a prefill
    ("patient", np.bool_),  # whether prefills wait for completions, and for each other
    ("gather", np.int64),  # waiting requests that are admitted together
)
"""What `Rules` say, by the same names, and gate and piece in seconds."""

STATE_FIELDS = (
    ("counter", np.int64),  # of those that began to wait
    ("partial", np.int64),  # running requests whose prefill is not complete
    ("admitted", np.int64),  # to the batch that is being formed: they stand behind those that run
    ("lost", np.int64),  # running requests that the batch evicts
    *memory.MEMORY,  # all of the input is allocated from the admission on
    ("reserved", np.int64),  # sum of peaks over running requests
    ("over", np.int64),  # projected batches above capacity
    ("freed", np.int64),  # by completions of the last batch, kept for those that wait
    ("clearings", np.int64),  # since the last completion
    ("cleared_at", np.int64),  # completions + arrivals at the last clearing of all
    ("time_left", np.float64),  # for a batch with prefills, by the pace of those that run
    ("holding", np.bool_),  # whether those that are ahead of their pace wait for prefills
    ("finished", np.int64),  # requests, and
    ("seen", np.int64),  # tokens that they had
    ("stall", np.bool_),  # what was cleared is not enough: the time of a batch passes
    *blocks.STATE,
    ("prefill_work", np.float64),  # seconds of the requests that have finished, without `fixed`
    ("decode_work", np.float64),
    ("closed", np.bool_),  # whether a prefill beyond the scheduler's own limit ended the batch
    *SETTINGS,
    ("first_group", np.int64),
    ("second_group", np.int64),
    ("third_group", np.int64),
    ("admission", np.int64),
    ("overflow", np.int64),
    ("threshold", np.float64),  # KV that ``"protect"`` admits up to
    ("requeue_back", np.bool_),
    ("random_ties", np.bool_),
    ("by_estimate", np.bool_),
    ("by_work", np.bool_),  # whether prefills are in the order of their work
    ("short", np.bool_),  # some prediction is too short
    ("max_batch_tokens", np.int64),  # of the scheduler itself
    ("max_prefill_tokens", np.int64),  # not more
    ("sorting", np.int64),
    ("fixed", np.float64),  # seconds of a decode batch whatever it holds, and
    ("setup", np.float64),  # of any prefills in it
)

UNKNOWN = 2**40
"""Tokens left of a request that is longer than predicted: nobody waits for it."""

MAX_LOAD = 0.85
"""The load that patient prefills reckon with at most. Beyond it a queue does not empty."""


class Worker(NamedTuple):
    """What a batch changes or needs of `common.Worker`, by name."""

    heap: Ints
    running: Ints
    usage: Ints
    entries: Ints
    evicted: Ints
    limits: Limits
    cost: Floats


EXACT = 1e-6
"""Tokens' time by which requests are ahead of their pace at least, so that no rounding decides."""


@njit(allocates=False, forceinline=True)
def alone(r: np.record, cost: Floats) -> float:
    """Return the time of what is left of a request's prefill, in a batch of its own."""
    return float(batch_time(cost, add_prefill(EMPTY, life.rest_of(r), r.cached)))


@njit(allocates=False, forceinline=True)
def _slack(r: np.record, s: np.record) -> float:
    """Return the time until a request's next token is due by its pace."""
    return float(r.first_at + r.pace * r.produced - s.now)


@njit(allocates=False, forceinline=True)
def is_ahead(r: np.record, s: np.record) -> bool:
    """Whether a request that decodes waits for prefills, since it is ahead of its pace.

    Just after its first token it is ahead by a token's time, in exact numbers.
    """
    return bool(s.holding and _slack(r, s) > (s.hold + EXACT) * r.pace)


@njit
def time_left(requests: Records, s: np.record, running: Ints) -> float:
    """Return how long a batch may take such that nobody who runs falls behind its pace.

    A held request needs a token's time for the next batch. A batch may take half of a token's time
    at the largest pace in any case, so that prefills never stop.
    """
    left, least = np.inf, 0.0
    for k in range(s.running):
        r = requests[running[k]]
        if r.decoding and r.pace < np.inf:
            slack = _slack(r, s)
            left = min(left, slack - r.pace if is_ahead(r, s) else slack)
            least = max(least, 0.5 * r.pace)

    return max(left, least)


@njit(allocates=False)
def tokens_within(r: np.record, sums: Sums, tokens: int, cost: Floats, time: float) -> int:
    """Return how many tokens of a prefill, of at most so many, leave the batch within a time."""
    if tokens < 1 or batch_time(cost, add_prefill(sums, tokens, r.cached)) <= time:
        return tokens

    inside = 0
    while tokens - inside > 1:
        middle = (inside + tokens) // 2
        if batch_time(cost, add_prefill(sums, middle, r.cached)) <= time:
            inside = middle
        else:
            tokens = middle

    return inside


@njit
def size_of(r: np.record, s: np.record, sums: Sums, limits: Limits, cost: Floats) -> int:
    """Return how many tokens of a prefill the batch can take, `PASSED_OVER` or `REFUSED`."""
    if not limits.hybrid and sums.decode_requests > 0:
        return PASSED_OVER

    c = life.rest_of(r)
    soft = s.max_prefill_tokens - sums.tokens
    batch, prefill = limits.max_batch_tokens, limits.max_prefill_tokens
    hard = min(batch - sums.tokens, prefill - sums.prefill_tokens)
    if not limits.chunked:
        return c if c <= hard and (c <= soft or sums.tokens == 0) else REFUSED

    c = min(c, soft, hard)
    if s.paced:
        c = tokens_within(r, sums, c, cost, s.time_left)
    if s.piece < np.inf:  # one token goes on in any case, however long the decodes take
        c = max(min(c, 1), tokens_within(r, sums, c, cost, s.piece))

    return c if c >= 1 else REFUSED


@njit(allocates=False)
def end(r: np.record, s: np.record, cost: Floats) -> None:
    """Note what a request that has finished has taken."""
    s.finished += 1
    s.seen += r.produced
    if s.patient:
        step = batch_time(cost, add_decode(EMPTY, r.prompt + r.produced // 2)) - s.fixed
        s.decode_work += step * (r.produced - 1)
        s.prefill_work += batch_time(cost, add_prefill(EMPTY, r.prompt, 0)) - s.fixed


@njit(allocates=False)
def delay_factor(s: np.record) -> tuple[float, float]:
    """Return by how much the queue multiplies a delay, and the decodes' share of the work.

    A delay is passed on until the queue is empty, 1 / (1 - load) times. The load is the work that
    has arrived over the time so far.
    """
    work = s.prefill_work + s.decode_work
    if work <= 0.0:
        return 1.0, 0.0

    arrived = s.finished + s.running + s.waiting
    load = min(MAX_LOAD, work / s.finished * arrived / s.now)
    return 1.0 / (1.0 - load), s.decode_work / work


@njit
def gate_of(requests: Records, s: np.record, running: Ints, cost: Floats) -> float:
    """Return how many seconds of a prefill may run beside those that decode.

    What they have left is predicted, or the mean of an exponential law that fits those seen so far:
    all tokens produced, over the number of requests that have finished.
    """
    decodes, produced, prefills, total, sums = 0, s.seen, s.waiting, 0, EMPTY
    patient = s.patient and s.finished > 0
    left = np.empty(s.running if patient and s.by_work else 0, np.int64)
    for k in range(s.running):
        r = requests[running[k]]
        if r.gone:
            continue

        produced += r.produced
        if r.decoding:
            if left.size > 0:
                left[decodes] = r.estimate - r.produced if r.estimate > r.produced else UNKNOWN
            if patient:
                sums = add_decode(sums, r.cached)

            total += max(1, r.estimate - r.produced)
            decodes += 1
        else:
            prefills += 1

    if decodes == 0:
        return np.inf

    mean = total / decodes if s.by_work else produced / max(1, s.finished)
    time = s.gate * mean * max(1.0, prefills / decodes)
    if not patient:
        return float(time)

    common.sort_up(left, decodes if s.by_work else 0)
    soonest = np.inf if s.by_work else mean / decodes
    for m in range(decodes if s.by_work else 0):
        soonest = min(soonest, left[m] / (m + 1))

    # With N requests in the system, m of k completions within t seconds are worth waiting for if
    # m w > c t N / k. What waits has no part in the decodes: their share of the work counts as
    # often as the queue passes a delay on.
    times, share = delay_factor(s)
    share = 1.0 - share + share * times
    wait = share * soonest * batch_time(cost, sums) * (s.running + s.waiting) / decodes
    return float(min(time, wait))
