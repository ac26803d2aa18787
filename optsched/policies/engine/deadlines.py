"""The loop of `optsched.policies.edf_decode`: prefills in bursts, decodes by last deadlines.

Before each batch it asks how long the queue can wait until somebody's first token is late. If that
is not long, it prefills a large piece, as long as those that decode can catch up. Else it decodes,
those first that are behind, and the others in the order in which their last tokens are due. The
search for many requests within SLOs runs the same loop with lengths and arrivals known
(`optsched.optimize.search.on_time`). Import this module lazily: it loads numba.
"""

from typing import NamedTuple

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import MEMORY, free, growth, room, take
from optsched.judge.replay import Limits
from optsched.policies.engine import common
from optsched.policies.engine.common import Worker
from optsched.policies.engine.prefills import alone, tokens_within
from optsched.policies.runner import MAX_STALLED_BATCHES
from optsched.problem.kernel import njit

QUEUE, DECODES, LATE = 0, 1, 2
"""The lines of a worker: requests without a first token, by its deadline; those that decode, by the
deadline of the last token; and those that are late, which wait until nobody else does."""

REQUEST_FIELDS = (
    *common.FIELDS,
    ("estimate", np.int64),  # of its output
    ("peak", np.int64),  # KV that it will hold by its estimate
    ("first_due", np.float64),  # latest first token in time; infinite: any
    ("hopeless_at", np.float64),  # not before then can a prefill alone be too late
    ("pace", np.float64),  # mean time that each later token may take; infinite: any
    ("gap", np.float64),  # longest time between two tokens; infinite: any
    ("step", np.float64),  # the smaller of both
    ("ends_by", np.float64),  # latest last token by the latency
    ("due", np.float64),  # latest last token in time
    ("left", np.float64),  # time that each token that is left may take
    ("last_at", np.float64),  # time of its latest token
    ("work", np.float64),  # seconds of its prefill
    ("row", np.int64),  # of the knobs that apply when it is the last to have arrived
    ("batch", np.int64),  # number of its latest batch, from 1
    ("late", np.bool_),  # cannot be in time, or is let go
    ("holds", np.bool_),  # has a seat and KV
)

STATE_FIELDS = (
    *MEMORY,
    ("queued", np.int64),  # length of `QUEUE`
    ("decodes", np.int64),  # of `DECODES`
    ("late", np.int64),  # of `LATE`
    ("reserved", np.int64),  # sum of the peaks of those that hold KV
    ("spare", np.float64),  # how long those that decode can wait and then catch up
    ("longest_decodes", np.float64),  # how long a batch of decodes may take
    ("growing", np.int64),  # KV that the decodes of the batch that is being formed will add
    ("formed", np.int64),  # batches
    ("row", np.int64),  # of the knobs
    ("pending", np.int64),  # requests that may still be in time and have not finished
    ("lost", np.int64),  # requests that were to be in time and are not
)

KNOBS = (
    "urgent", "piece", "share", "floor", "behind", "smallest", "lump", "load", "reserve", "evict",
    "mixed", "drop", "trust",
)  # fmt: skip
URGENT, PIECE, SHARE, FLOOR, BEHIND, SMALLEST, LUMP, LOAD, RESERVE, EVICT = range(10)
MIXED, DROP, TRUST = range(10, len(KNOBS))
"""Places in a row of knobs (`optsched.policies.edf_decode.EdfDecode` says what they are)."""

# No rounding decides who is in time.
_EXACT = 1e-9
# Whoever has more than this share of its step for each token can be in time.
_HOPELESS = 0.5


class Settings(NamedTuple):
    """What the loop is told beside its limits."""

    knobs: Floats  # rows of knobs
    ahead: float  # seconds of arrivals that it knows in advance
    max_lost: int  # it ends when more are lost
    counts: bool  # whether it ends when all have finished that may be in time


@njit(allocates=False)
def _size(s: np.record, line: int) -> int:
    """Return how many are in a line."""
    return int(s.queued if line == QUEUE else s.decodes if line == DECODES else s.late)


@njit(allocates=False)
def _insert(requests: Records, line: Ints, size: int, i: int, by_due: bool) -> None:
    """Insert a request in a sorted line of so many."""
    r, k = requests[i], size
    while k > 0:
        o = requests[line[k - 1]]
        if (o.due <= r.due) if by_due else (o.first_due <= r.first_due):
            break

        line[k] = line[k - 1]
        k -= 1

    line[k] = i


@njit(allocates=False)
def _remove(line: Ints, size: int, i: int) -> None:
    """Remove a request from a line of so many."""
    k = 0
    while line[k] != i:
        k += 1

    while k + 1 < size:
        line[k] = line[k + 1]
        k += 1


@njit(allocates=False)
def _append_late(s: np.record, lines: Ints, i: int) -> None:
    """Let a request wait behind all others."""
    lines[LATE, s.late] = i
    s.late += 1


@njit(allocates=False)
def _arrive(requests: Records, s: np.record, lines: Ints, i: int) -> None:
    """Let a request wait, in the queue or behind all others."""
    r = requests[i]
    s.row = r.row
    if r.late:
        r.first_due = np.inf
        _append_late(s, lines, i)
    else:
        r.hopeless_at = -np.inf
        _insert(requests, lines[QUEUE], s.queued, i, False)
        s.queued += 1


@njit(allocates=False)
def _lose(r: np.record, s: np.record) -> None:
    """Note that a request is not in time."""
    r.late = True
    r.first_due = r.due = r.gap = np.inf
    s.lost += 1
    s.pending -= 1


@njit(allocates=False)
def _give_up(requests: Records, s: np.record, lines: Ints, cost: Floats) -> None:
    """Let those of the queue be late who cannot be in time any more."""
    queue, kept = lines[QUEUE], 0
    for k in range(s.queued):
        i = queue[k]
        r = requests[i]
        if s.now > r.hopeless_at:
            r.hopeless_at = r.first_due - alone(r, cost)
        if s.now > r.hopeless_at:
            _lose(r, s)
            _append_late(s, lines, i)
        else:
            queue[kept] = i
            kept += 1

    s.queued = kept


@njit(allocates=False)
def _update_slack(requests: Records, s: np.record, line: Ints, cost: Floats, knobs: Floats) -> None:
    """Look at those that decode: who cannot be in time any more, and how long all can wait."""
    s.spare, tightest, smallest, lost = np.inf, np.inf, np.inf, s.decodes
    k = 0
    while k < lost:
        i = line[k]
        r = requests[i]
        due, left = r.due, float(max(1, r.estimate - r.produced))  # as far as one can tell
        r.left = min((due - s.now) / left, r.last_at + r.gap - s.now)
        if r.left < _HOPELESS * r.step and r.left < batch_time(cost, add_decode(EMPTY, r.cached)):
            _lose(r, s)
            r.left = np.inf
            lost -= 1
            for m in range(k, s.decodes - 1):
                line[m] = line[m + 1]

            line[s.decodes - 1] = i
            continue

        k += 1
        if knobs[TRUST] < 1.0 and r.pace < np.inf:  # it may end earlier, and is due then
            less = (1.0 - knobs[TRUST]) * (left - 1.0)
            due, left = due - less * r.pace, left - less
            r.left = min((due - s.now) / left, r.last_at + r.gap - s.now)
        if r.left < np.inf:
            tightest, smallest = min(tightest, r.left), min(smallest, r.step)
        if r.due < np.inf and r.step < np.inf:
            s.spare = min(s.spare, due - s.now - left * knobs[FLOOR] * r.step)
        if r.gap < np.inf:
            s.spare = min(s.spare, (r.last_at + r.gap - s.now) * knobs[SHARE])

    s.longest_decodes = knobs[SHARE] * tightest
    if smallest < np.inf:
        s.longest_decodes = max(s.longest_decodes, knobs[SMALLEST] * smallest)


@njit(allocates=False)
def _rest(r: np.record) -> float:
    """Return the seconds of what is left of a prefill, about."""
    return float(r.work * life.rest_of(r) / max(1, r.prompt))


@njit(allocates=False)
def _slack(requests: Records, s: np.record, at: Worker, ahead: float, knobs: Floats) -> float:
    """Return how long the prefills of the queue can wait, with those that are known to come.

    Where they cannot wait at all, some may be let go.
    """
    lines, queue, clock, slack, k = at.lines, at.lines[QUEUE], s.now, np.inf, 0
    factor = 1.0 + knobs[LOAD]
    while k < s.queued:
        clock += _rest(requests[queue[k]]) * factor
        slack = min(slack, requests[queue[k]].first_due - clock)
        k += 1
        if slack < 0.0 and knobs[DROP] > 0.5:
            # Somebody will be late up to here: let it be the largest, as Moore and Hodgson do.
            largest = 0
            for m in range(1, k):
                if _rest(requests[queue[m]]) > _rest(requests[queue[largest]]):
                    largest = m

            i = queue[largest]
            _remove(queue, s.queued, i)
            s.queued -= 1
            _append_late(s, lines, i)
            _lose(requests[i], s)
            clock, slack, k = s.now, np.inf, 0

    for k in range(s.arrived, at.coming.shape[0]):
        r = requests[at.coming[k]]
        if r.release > min(clock, s.now + ahead):
            break
        if not r.late:
            clock += r.work * factor
            slack = min(slack, r.first_due - clock)

    return slack


@njit(allocates=False)
def _fits(r: np.record, s: np.record, limits: Limits, reserve: float) -> bool:
    """Return whether there are a seat and KV for the input of a request, now and later."""
    size = r.prompt + r.produced
    later = reserve * (s.reserved + r.peak - s.held - size)
    fits = room(s, s.growing + growth(r, size, limits), limits)
    if s.running >= limits.max_running or not fits:
        return False

    return bool(s.running == 0 or s.held + s.growing + size + later <= limits.kv_capacity)


@njit(allocates=False)
def _admit(r: np.record, s: np.record, limits: Limits, reserve: float) -> bool:
    """Give a request a seat and KV for its input; return whether there is room."""
    if r.holds:
        return True
    if not _fits(r, s, limits, reserve):
        return False

    r.holds = True
    s.running += 1
    s.reserved += r.peak
    take(s, r, r.prompt + r.produced, limits)
    return True


@njit(allocates=False)
def _leave(r: np.record, s: np.record, limits: Limits) -> None:
    """Free the seat and the KV of a request."""
    r.holds = r.gone = False
    s.running -= 1
    s.reserved -= r.peak
    free(s, r, limits)


@njit(allocates=False)
def _resumes_by(r: np.record, floor: float) -> float:
    """Return when a request that decodes must have its next token to be in time."""
    if r.due == np.inf:  # late, or nobody asks
        return float(r.last_at + r.gap)

    left = max(1, r.estimate - r.produced)
    return float(min(r.due - floor * r.step * left, r.last_at + r.gap))


@njit(allocates=False)
def _evict_one(
    requests: Records, s: np.record, at: Worker, floor: float, line: int, i: int
) -> None:
    """Evict a request of a line. It waits by the latest moment at which it can go on."""
    r = requests[i]
    _leave(r, s, at.limits)
    life.evict(r, at.limits.restart)
    common.add_eviction(at.columns.evicted, s, i)
    r.hopeless_at = -np.inf
    if line == DECODES:
        _remove(at.lines[DECODES], s.decodes, i)
        s.decodes -= 1
        r.first_due = _resumes_by(r, floor)
        _arrive(requests, s, at.lines, i)


@njit(allocates=False)
def _evict(requests: Records, s: np.record, at: Worker, floor: float) -> bool:
    """Evict a late request outside the batch, or the one due last; return whether there is one."""
    lines = at.lines
    for line in (LATE, DECODES, QUEUE):
        for k in range(_size(s, line) - 1, -1, -1):
            i = lines[line, k]
            r = requests[i]
            if r.holds and r.batch != s.formed + 1:
                _evict_one(requests, s, at, floor, line, i)
                return True

    return False


@njit(allocates=False)
def _make_room(requests: Records, s: np.record, at: Worker, knobs: Floats) -> None:
    """Evict for the first of the queue, if it has no room, those with the most time to spare."""
    first = requests[at.lines[QUEUE, 0]]
    while not first.holds and not _fits(first, s, at.limits, knobs[RESERVE]):
        chosen, most = -1, knobs[EVICT]
        for i in at.lines[DECODES, : s.decodes]:
            r = requests[i]
            refill = r.work * (r.prompt + r.produced) / r.prompt
            by = _resumes_by(r, knobs[FLOOR])
            if by - s.now - refill > most and by > first.first_due:
                chosen, most = i, by - s.now - refill

        if chosen < 0:
            break

        _evict_one(requests, s, at, knobs[FLOOR], DECODES, chosen)


@njit(allocates=False)
def _prefill(
    requests: Records, s: np.record, at: Worker, reserve: float, line: int, sums: Sums, time: float
) -> Sums:
    """Add prefills of a line to a batch that takes at most a time; return its sums."""
    limits = at.limits
    for k in range(_size(s, line)):
        i = at.lines[line, k]
        r = requests[i]
        rest = life.rest_of(r)
        batch = limits.max_batch_tokens - sums.tokens
        most = min(rest, batch, limits.max_prefill_tokens - sums.prefill_tokens)
        # Those of the batch have their first tokens at its end.
        inside = min(time, r.first_due - s.now)
        tokens = tokens_within(r, sums, most, at.cost, inside)
        if tokens < rest and not limits.chunked:
            tokens = 0
        if tokens < 1 or not _admit(r, s, limits, reserve):
            break
        if tokens == rest:
            time = inside

        r.batch = s.formed + 1
        sums = add_prefill(sums, tokens, r.cached)
        common.add_entry(at.columns.entries, s, i, tokens)
        if tokens < rest:
            break

    return sums


@njit(allocates=False)
def _decode(
    requests: Records, s: np.record, at: Worker, knobs: Floats, sums: Sums, time: float
) -> Sums:
    """Add decodes to a batch that takes at most a time; return its sums.

    Those that are behind come first, and then the others by their last deadlines.
    """
    limits, every = at.limits, sums
    for i in at.lines[DECODES, : s.decodes]:
        every = add_decode(every, requests[i].cached)

    # Most batches have time for all: then none is looked at alone.
    time = np.inf if batch_time(at.cost, every) <= time else time
    for behind in (True, False):
        k = 0
        while k < s.decodes:
            i = at.lines[DECODES, k]
            r = requests[i]
            k += 1
            slow = r.left < np.inf and r.left < knobs[BEHIND] * r.step
            if slow != behind or r.batch == s.formed + 1:
                continue
            if sums.tokens >= limits.max_batch_tokens:
                return sums

            more = add_decode(sums, r.cached)
            if sums.tokens > 0 and time < np.inf and batch_time(at.cost, more) > time:
                return sums

            r.batch = s.formed + 1
            grown = growth(r, 1, limits)
            while not room(s, s.growing + grown, limits):
                if not _evict(requests, s, at, knobs[FLOOR]):
                    r.batch = s.formed
                    return sums

            s.growing += grown
            sums = more
            common.add_entry(at.columns.entries, s, i, 1)

    return sums


@njit(allocates=False)
def decide(requests: Records, s: np.record, at: Worker, settings: Settings, knobs: Floats) -> Sums:
    """Form the next batch; return its sums."""
    sums, reserve = EMPTY, knobs[RESERVE]
    # Whoever knows what arrives lets the late wait for all others.
    serves_late = not settings.counts and (settings.ahead == 0.0 or s.pending == 0)
    s.growing = 0
    line, due = QUEUE, s.decodes == 0
    if s.queued > 0:
        slack = _slack(requests, s, at, settings.ahead, knobs)
        due = due or slack < knobs[URGENT]
        if due and knobs[EVICT] > 0.0 and s.queued > 0:
            _make_room(requests, s, at, knobs)
    elif serves_late:
        line, due = LATE, True

    if due and s.spare >= knobs[LUMP]:
        time = min(s.spare, knobs[PIECE])
        if at.limits.hybrid and knobs[MIXED] > 0.5:
            sums = _decode(requests, s, at, knobs, sums, time)
        sums = _prefill(requests, s, at, reserve, line, sums, time)

    if sums.tokens == 0 and s.decodes > 0:
        sums = _decode(requests, s, at, knobs, sums, s.longest_decodes)
    for line in (QUEUE, LATE):  # nobody decodes: whatever the pieces are
        if sums.tokens == 0 and (line == QUEUE or serves_late):
            sums = _prefill(requests, s, at, reserve, line, sums, np.inf)

    return sums


@njit(allocates=False)
def _begin_decoding(requests: Records, s: np.record, lines: Ints, i: int) -> None:
    """Let a request whose prefill has ended decode, by the deadline that follows from it."""
    r = requests[i]
    if r.late:
        _remove(lines[LATE], s.late, i)
        s.late -= 1
    else:
        _remove(lines[QUEUE], s.queued, i)
        s.queued -= 1
        if r.produced == 1:
            if s.now > r.first_due + _EXACT:
                _lose(r, s)
            else:
                r.due = min(r.first_at + r.pace * (r.estimate - 1), r.ends_by)

    if not r.gone:
        _insert(requests, lines[DECODES], s.decodes, i, True)
        s.decodes += 1


@njit(allocates=False)
def _process(requests: Records, s: np.record, lines: Ints, entries: Ints, limits: Limits) -> None:
    """Process the entries of a batch."""
    finished = 0
    for k in range(entries.shape[1]):
        i = entries[common.REQUEST, k]
        r = requests[i]
        decoded = r.decoding
        if decoded:
            take(s, r, 1, limits)
        if not life.advance(r, entries[common.TOKENS, k]):
            continue

        before, r.last_at = r.last_at, s.now
        ended = common.note(r, s)
        if not r.late and r.produced > 1 and s.now > before + r.gap + _EXACT:
            _lose(r, s)
            if decoded:  # it is due last now
                _remove(lines[DECODES], s.decodes, i)
                lines[DECODES, s.decodes - 1] = i
            else:
                _remove(lines[QUEUE], s.queued, i)
                s.queued -= 1
                _append_late(s, lines, i)

        if not decoded:
            _begin_decoding(requests, s, lines, i)
        elif ended:
            _remove(lines[DECODES], s.decodes, i)
            s.decodes -= 1
        elif r.produced >= r.estimate and r.due < np.inf:  # longer than predicted
            r.due = min(r.first_at + r.pace * r.produced, r.ends_by)

        if ended:
            finished += 1
            if not r.late and s.now > r.due + _EXACT:
                _lose(r, s)
            elif not r.late:
                s.pending -= 1

            _leave(r, s, limits)

    s.done += finished
    s.since = 0 if finished > 0 else s.since + 1
    if s.since > MAX_STALLED_BATCHES + s.longest:
        s.outcome = common.STALLED


@njit(allocates=False)
def run(requests: Records, state: Records, at: Worker, settings: Settings) -> None:
    """Run until the requests assigned so far have finished, or up to a time."""
    s, lines = state[0], at.lines
    while common.goes_on(s, at):
        if s.lost > settings.max_lost or (settings.counts and s.pending == 0):
            break

        i = common.next_arrival(requests, s, at.coming)
        while i >= 0:
            _arrive(requests, s, lines, i)
            i = common.next_arrival(requests, s, at.coming)

        _give_up(requests, s, lines, at.cost)
        knobs = settings.knobs[s.row]
        _update_slack(requests, s, lines[DECODES], at.cost, knobs)
        first = s.entries
        sums = decide(requests, s, at, settings, knobs)
        if sums.tokens == 0:
            about = lines[QUEUE, 0] if s.queued > 0 else -1
            about = lines[LATE, 0] if about < 0 and s.late > 0 else about
            if not common.waits(requests, s, at, about):
                break

            continue

        s.formed += 1
        common.run_batch(at.columns.batches, s, batch_time(at.cost, sums))
        rows = at.columns.entries[:, first : s.entries]
        _process(requests, s, lines, rows, at.limits)
