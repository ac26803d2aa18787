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
from optsched.problem.sorting import sort_up

# The words in `Rules`, by their places.
WAITING, RUNNING, RUNNING_DECODE, RUNNING_PREFILL, PREFILL, ALL = range(len(get_args(Group)))
NO_GROUP = -1
PRESENT, LOOKAHEAD, RESERVE, PROTECT = range(len(get_args(Admission)))
EVICT_LATEST, CLEAR, EVICT_SHORTEST = range(len(get_args(Overflow)))

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
    ("finished", np.int64),  # number of requests that have finished
    ("seen", np.int64),  # output tokens that they had
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
    ("fixed", np.float64),  # seconds of a decode batch whatever it holds
    ("setup", np.float64),  # seconds that prefills add to a batch whatever their number
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
"""A share of a token's time: who is ahead of its pace by less is not, so no rounding decides."""


@njit(allocates=False, forceinline=True)
def time_alone(r: np.record, cost: Floats) -> float:
    """Return the time of what is left of a request's prefill, in a batch of its own."""
    return float(batch_time(cost, add_prefill(EMPTY, life.rest_of(r), r.cached)))


@njit(allocates=False, forceinline=True)
def _slack(r: np.record, s: np.record) -> float:
    """Return the time until a request's next token is due by its pace."""
    return float(r.first_at + r.pace * r.produced - s.now)


@njit(allocates=False, forceinline=True)
def is_ahead(r: np.record, s: np.record) -> bool:
    """Whether a request that decodes waits for prefills, since it is ahead of its pace.

    It is ahead if it has more than ``hold`` tokens' time. Just after its first token it has exactly
    one, which rounding must not turn into more: hence `EXACT`.
    """
    return bool(s.holding and _slack(r, s) > (s.hold + EXACT) * r.pace)


@njit
def time_left(requests: Records, s: np.record, running: Ints) -> float:
    """Return how long a batch may take such that no running request falls behind its pace.

    A request that is ahead of its pace waits for this batch, so it needs a token's time for the
    next one. A batch may take half of a token's time at the largest pace in any case, so that
    prefills never stop.
    """
    limit_s, minimum_s = np.inf, 0.0
    for k in range(s.running):
        r = requests[running[k]]
        if r.decoding and r.pace < np.inf:
            slack = _slack(r, s)
            limit_s = min(limit_s, slack - r.pace if is_ahead(r, s) else slack)
            minimum_s = max(minimum_s, 0.5 * r.pace)

    return max(limit_s, minimum_s)


@njit(allocates=False)
def tokens_within(r: np.record, sums: Sums, tokens: int, cost: Floats, time: float) -> int:
    """Return how many tokens of a prefill, of at most so many, leave the batch within a time."""
    if tokens < 1 or batch_time(cost, add_prefill(sums, tokens, r.cached)) <= time:
        return tokens

    # The time grows with the tokens, so halve: `within` tokens leave it in time, `beyond` do not.
    within, beyond = 0, tokens
    while beyond - within > 1:
        middle = (within + beyond) // 2
        if batch_time(cost, add_prefill(sums, middle, r.cached)) <= time:
            within = middle
        else:
            beyond = middle

    return within


@njit
def prefill_size(r: np.record, s: np.record, sums: Sums, limits: Limits, cost: Floats) -> int:
    """Return how many tokens of a prefill the batch can take, `PASSED_OVER` or `REFUSED`.

    Hard limits are those of the instance, the soft one is the scheduler's. A prefill that is not
    split may exceed the soft limit if it runs alone.
    """
    if not limits.hybrid and sums.decode_requests > 0:
        return PASSED_OVER

    tokens = life.rest_of(r)
    # The scheduler's P counts all tokens in the batch (`Rules`), and the instance's prefills alone.
    soft = s.max_prefill_tokens - sums.tokens
    batch, prefill = limits.max_batch_tokens, limits.max_prefill_tokens
    hard = min(batch - sums.tokens, prefill - sums.prefill_tokens)
    if not limits.chunked:
        return tokens if tokens <= hard and (tokens <= soft or sums.tokens == 0) else REFUSED

    tokens = min(tokens, soft, hard)
    # The batch may take `time_left` seconds by the pace of those that run, `piece` by the rules.
    if s.paced:
        tokens = tokens_within(r, sums, tokens, cost, s.time_left)
    if s.piece < np.inf:  # one token goes on in any case, however long the decodes take
        tokens = max(min(tokens, 1), tokens_within(r, sums, tokens, cost, s.piece))

    return tokens if tokens >= 1 else REFUSED


@njit(allocates=False)
def note_end(r: np.record, s: np.record, cost: Floats) -> None:
    """Add a request that has finished to what is known of lengths and of work."""
    s.finished += 1
    s.seen += r.produced
    if s.patient:
        # A decode step in the middle of the output has the mean cost of all of its steps. The first
        # token is the prefill's.
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
    if work <= 0.0:  # nobody has finished, or work costs nothing
        return 1.0, 0.0

    # All that have arrived are taken to have as much work as those that have finished in the mean.
    arrived = s.finished + s.running + s.waiting
    load = min(MAX_LOAD, work / s.finished * arrived / s.now)
    return 1.0 / (1.0 - load), s.decode_work / work


@njit
def gate_seconds(requests: Records, s: np.record, running: Ints, cost: Floats) -> float:
    """Return how many seconds of a prefill may run beside those that decode; infinite: any.

    What they have left is predicted (`by_work`), or the mean of an exponential law that fits the
    requests seen so far: all tokens produced, over the number of requests that have finished.
    """
    decodes, prefills = 0, s.waiting  # numbers of requests
    produced, predicted_left = s.seen, 0  # tokens
    sums = EMPTY
    # Patience reckons with the load, which nobody knows before the first request has finished.
    patient = s.patient and s.finished > 0
    # Of each that decodes, which only patient prefills in the order of work look at.
    tokens_left = np.empty(s.running if patient and s.by_work else 0, np.int64)
    for k in range(s.running):
        r = requests[running[k]]
        if r.leaving:
            continue

        produced += r.produced
        if r.decoding:
            if tokens_left.size > 0:
                known = r.estimate > r.produced
                tokens_left[decodes] = r.estimate - r.produced if known else UNKNOWN
            if patient:
                sums = add_decode(sums, r.cached)

            predicted_left += max(1, r.estimate - r.produced)
            decodes += 1
        else:
            prefills += 1

    if decodes == 0:
        return np.inf

    mean = predicted_left / decodes if s.by_work else produced / max(1, s.finished)
    # w <= gate D max(1, q / k) for q prefills and k decodes (`Rules`), where D is a step for each
    # of the tokens left. `s.gate` has the step in it already.
    time = s.gate * mean * max(1.0, prefills / decodes)
    if not patient:
        return float(time)

    # `soonest`: the min over m of t / m, where t steps pass up to the m-th completion from now. Of
    # k exponential lives it is their mean over k.
    sort_up(tokens_left, decodes if s.by_work else 0)
    soonest = np.inf if s.by_work else mean / decodes
    for m in range(decodes if s.by_work else 0):
        soonest = min(soonest, tokens_left[m] / (m + 1))

    # Of N requests in the system k decode. A prefill of w seconds should wait for the next m
    # completions, t seconds away, if m w > c t N / k. So it may run now if w <= c (t / m) N / k for
    # every m. c counts the decodes' share of the work as often as the queue passes a delay on, and
    # the share of prefills once.
    factor, share = delay_factor(s)
    share = 1.0 - share + share * factor
    wait = share * soonest * batch_time(cost, sums) * (s.running + s.waiting) / decodes
    return float(min(time, wait))
