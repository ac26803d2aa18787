"""The loop of `optsched.policies.edf_decode`: prefills in bursts, decodes by last deadlines.

Before each batch it asks how long the queue can wait until somebody's first token is late. If that
is not long, it prefills a large piece, as long as those that decode can catch up. Else it decodes,
those first that are behind, and the others in the order in which their last tokens are due. The
search for many requests within SLOs runs the same loop with lengths and arrivals known
(`optsched.optimize.search.on_time`). Import this module lazily: it loads numba. `requests` and the
state `s` are records, whose fields stand in `REQUEST_FIELDS` and `STATE_FIELDS`.
"""

from typing import NamedTuple

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import MEMORY, free, growth, has_room, take
from optsched.judge.replay import Limits
from optsched.policies.engine import common
from optsched.policies.engine.common import Worker
from optsched.policies.engine.prefills import time_alone, tokens_within
from optsched.policies.runner import MAX_STALLED_BATCHES
from optsched.problem.kernel import njit

QUEUE, DECODES, LATE = 0, 1, 2
"""The lines of a worker: requests whose prefill has not ended, by `first_due` (of one that was
evicted while it decoded, the latest moment at which it can go on); those that decode, by the
deadline of the last token; and those that are late, which wait until nobody else does."""

REQUEST_FIELDS = (
    *common.FIELDS,
    ("estimate", np.int64),  # of its output
    ("peak", np.int64),  # KV that it will hold by its estimate
    ("first_due", np.float64),  # latest time of a first token in time; infinite: any
    ("hopeless_at", np.float64),  # before then its prefill alone would not be too late
    ("pace", np.float64),  # mean time that each later token may take; infinite: any
    ("gap", np.float64),  # longest time between two tokens; infinite: any
    ("step", np.float64),  # the smaller of `pace` and `gap`
    ("ends_by", np.float64),  # latest last token by the latency
    ("due", np.float64),  # latest last token in time
    ("left", np.float64),  # seconds that each of its tokens left may take
    ("last_at", np.float64),  # time of its latest token
    ("work", np.float64),  # seconds of its prefill
    ("row", np.int64),  # of the knobs that apply when it is the last to have arrived
    ("batch", np.int64),  # number of its latest batch; ``formed`` + 1 is the one that is formed now
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
# The knobs `mixed` and `drop` are switches, 0.0 or 1.0.
URGENT, PIECE, SHARE, FLOOR, BEHIND, SMALLEST, LUMP, LOAD, RESERVE, EVICT = range(10)
MIXED, DROP, TRUST = range(10, len(KNOBS))
"""Places in a row of knobs (`optsched.policies.edf_decode.EdfDecode` says what they are)."""

# A token is late only if it is late by more than this, so that no rounding decides.
_EXACT = 1e-9
# A request that has more than this share of its step for each token is never taken as hopeless.
_HOPELESS = 0.5


class Settings(NamedTuple):
    """What the loop is told beside its limits."""

    knobs: Floats  # rows of knobs
    ahead: float  # seconds of arrivals that it knows in advance
    max_lost: int  # it ends when more are lost
    counts: bool  # whether it ends when all have finished that may be in time


@njit(allocates=False)
def _length(s: np.record, line: int) -> int:
    """Return how many requests are in a line."""
    if line == QUEUE:
        return int(s.queued)

    return int(s.decodes if line == DECODES else s.late)


@njit(allocates=False)
def _insert(requests: Records, line: Ints, size: int, i: int, by_due: bool) -> None:
    """Insert a request in a sorted line of so many, behind its equals.

    `by_due`: the line is sorted by `due`, else by `first_due`.
    """
    r, k = requests[i], size
    while k > 0:
        other = requests[line[k - 1]]
        if (other.due <= r.due) if by_due else (other.first_due <= r.first_due):
            break

        line[k] = line[k - 1]
        k -= 1

    line[k] = i


@njit(allocates=False)
def _remove(line: Ints, size: int, i: int) -> None:
    """Remove a request from a line of so many, and keep the order of the others."""
    k = 0
    while line[k] != i:
        k += 1

    while k + 1 < size:
        line[k] = line[k + 1]
        k += 1


@njit(allocates=False)
def _append_late(s: np.record, lines: Ints, i: int) -> None:
    """Let a request wait behind all others. The caller takes it out of the line where it was."""
    lines[LATE, s.late] = i
    s.late += 1


@njit(allocates=False)
def _arrive(requests: Records, s: np.record, lines: Ints, i: int) -> None:
    """Let a request wait, in the queue or behind all others."""
    r = requests[i]
    s.row = r.row  # the knobs of whoever came last apply, also of one that was evicted
    if r.late:
        # A search sets `late` alone for those that it lets go. Their prefills have no deadline.
        r.first_due = np.inf
        _append_late(s, lines, i)
    else:
        r.hopeless_at = -np.inf  # unknown: `_mark_hopeless` computes it
        _insert(requests, lines[QUEUE], s.queued, i, False)  # by `first_due`
        s.queued += 1


@njit(allocates=False)
def _lose(r: np.record, s: np.record) -> None:
    """Note that a request is not in time."""
    r.late = True
    # Without deadlines no batch is cut short for it any more, and it stands last in every order.
    r.first_due = r.due = r.gap = np.inf
    s.lost += 1
    s.pending -= 1


@njit(allocates=False)
def _mark_hopeless(requests: Records, s: np.record, lines: Ints, cost: Floats) -> None:
    """Move requests of the queue whose first token cannot be in time any more behind all others."""
    queue, kept = lines[QUEUE], 0
    for k in range(s.queued):
        i = queue[k]
        r = requests[i]
        # The bound `hopeless_at`, after which its prefill alone comes too late, is computed anew
        # only when it has passed, since the prefill may have gone on.
        if s.now > r.hopeless_at:
            r.hopeless_at = r.first_due - time_alone(r, cost)
        if s.now > r.hopeless_at:
            _lose(r, s)
            _append_late(s, lines, i)
        else:
            queue[kept] = i
            kept += 1

    s.queued = kept


@njit(allocates=False)
def _update_slack(requests: Records, s: np.record, line: Ints, cost: Floats, knobs: Floats) -> None:
    """Find how long the requests that decode can wait, and those that cannot be in time any more.

    The latter move to the end of the line (`DECODES`). `r.left` of each gets the seconds that each
    of its tokens left may take. `s.spare` gets how many seconds a batch without decodes may take,
    and `s.longest_decodes` how many a batch of decodes may take.
    """
    # Over all that can be in time: the least seconds that a token may take, and the least step.
    s.spare = tightest = smallest = np.inf
    hopeful = s.decodes  # the first so many of the line can be in time, or have not been looked at
    k = 0
    while k < hopeful:
        i = line[k]
        r = requests[i]
        # A request that runs has one more token at least, whatever was predicted. Its last token is
        # `due`, and the next one no later than a `gap` after the latest, `last_at`.
        due, steps_left = r.due, float(max(1, r.estimate - r.produced))
        r.left = min((due - s.now) / steps_left, r.last_at + r.gap - s.now)
        # It is far behind (`_HOPELESS`), and late even in batches of its own.
        if r.left < _HOPELESS * r.step and r.left < batch_time(cost, add_decode(EMPTY, r.cached)):
            _lose(r, s)
            r.left = np.inf
            hopeful -= 1
            # The others move up, and k stays: the next one stands there now.
            for m in range(k, s.decodes - 1):
                line[m] = line[m + 1]

            line[s.decodes - 1] = i
            continue

        k += 1
        # Its output may be shorter than predicted, by the share of its later tokens that is not
        # trusted. Then its last token is due earlier, too, by a pace for each of them.
        if knobs[TRUST] < 1.0 and r.pace < np.inf:
            unsure = (1.0 - knobs[TRUST]) * (steps_left - 1.0)
            due, steps_left = due - unsure * r.pace, steps_left - unsure
            r.left = min((due - s.now) / steps_left, r.last_at + r.gap - s.now)
        if r.left < np.inf:
            tightest, smallest = min(tightest, r.left), min(smallest, r.step)
        # After the wait it still catches up if each token takes `floor` of its step from then on.
        if r.due < np.inf and r.step < np.inf:
            s.spare = min(s.spare, due - s.now - steps_left * knobs[FLOOR] * r.step)
        # The wait takes a share of the time until the next token is due. The rest is for its batch.
        if r.gap < np.inf:
            s.spare = min(s.spare, (r.last_at + r.gap - s.now) * knobs[SHARE])

    # The one that is most behind decides, but a batch may always take `smallest` of a step.
    s.longest_decodes = knobs[SHARE] * tightest
    if smallest < np.inf:
        s.longest_decodes = max(s.longest_decodes, knobs[SMALLEST] * smallest)


@njit(allocates=False)
def _prefill_left_s(r: np.record) -> float:
    """Return about how many seconds of a request's prefill are left, by its share of the tokens."""
    return float(r.work * life.rest_of(r) / max(1, r.prompt))


@njit(allocates=False)
def _slack(requests: Records, s: np.record, w: Worker, ahead: float, knobs: Floats) -> float:
    """Return how long the prefills of the queue can wait, with those that are known to come.

    One after the other, each may be in time if the first begins this much later: the min over them
    of `first_due` less the end of its prefill. Where they cannot wait at all, some may be let go.
    `ahead`: for how many seconds arrivals are known in advance.
    """
    lines, queue = w.lines, w.lines[QUEUE]
    clock, slack, k = s.now, np.inf, 0
    factor = 1.0 + knobs[LOAD]  # prefills take longer, since decodes run between them
    while k < s.queued:
        clock += _prefill_left_s(requests[queue[k]]) * factor
        slack = min(slack, requests[queue[k]].first_due - clock)
        k += 1
        if slack < 0.0 and knobs[DROP] > 0.5:
            # Somebody up to here will be late. Let it be the one with the largest prefill, as Moore
            # and Hodgson do to have the fewest late, and count anew from the first.
            largest = 0
            for m in range(1, k):
                if _prefill_left_s(requests[queue[m]]) > _prefill_left_s(requests[queue[largest]]):
                    largest = m

            i = queue[largest]
            _remove(queue, s.queued, i)
            s.queued -= 1
            _append_late(s, lines, i)
            _lose(requests[i], s)
            clock, slack, k = s.now, np.inf, 0

    for k in range(s.arrived, w.coming.shape[0]):
        r = requests[w.coming[k]]
        # Beyond the known time, or once the machine would be idle, arrivals do not matter.
        if r.release > min(clock, s.now + ahead):
            break
        # Those that a search has let go take no time from the others.
        if not r.late:
            clock += r.work * factor
            slack = min(slack, r.first_due - clock)

    return slack


@njit(allocates=False)
def _has_place(r: np.record, s: np.record, limits: Limits, reserve: float) -> bool:
    """Return whether there are a seat and KV for the input of a request, now and later.

    `reserve`: the share of the KV that requests are still predicted to take which must be free. If
    nobody runs, only the present counts. `s.growing`: what the decodes in the batch will add.
    """
    size = r.prompt + r.produced
    # All predicted peaks, with its own, less what is held now and what its input takes.
    later = reserve * (s.reserved + r.peak - s.held - size)
    fits = has_room(s, s.growing + growth(r, size, limits), limits)
    if s.running >= limits.max_running or not fits:
        return False

    return bool(s.running == 0 or s.held + s.growing + size + later <= limits.kv_capacity)


@njit(allocates=False)
def _admit(r: np.record, s: np.record, limits: Limits, reserve: float) -> bool:
    """Give a request a seat and KV for its input; return whether there is room."""
    if r.holds:
        return True
    if not _has_place(r, s, limits, reserve):
        return False

    r.holds = True
    s.running += 1
    s.reserved += r.peak
    take(s, r, r.prompt + r.produced, limits)
    return True


@njit(allocates=False)
def _free_seat(r: np.record, s: np.record, limits: Limits) -> None:
    """Free the seat and the KV of a request."""
    r.holds = r.leaving = False
    s.running -= 1
    s.reserved -= r.peak
    free(s, r, limits)


@njit(allocates=False)
def _resumes_by(r: np.record, floor: float) -> float:
    """Return when a request that decodes must have its next token to be in time."""
    if r.due == np.inf:  # late, or nobody asks
        return float(r.last_at + r.gap)

    steps_left = max(1, r.estimate - r.produced)
    return float(min(r.due - floor * r.step * steps_left, r.last_at + r.gap))


@njit(allocates=False)
def _evict_one(requests: Records, s: np.record, w: Worker, floor: float, line: int, i: int) -> None:
    """Evict a request of a line. It waits by the latest moment at which it can go on."""
    r = requests[i]
    _free_seat(r, s, w.limits)
    life.evict(r, w.limits.restart)
    common.add_eviction(w.columns.evicted, s, i)
    r.hopeless_at = -np.inf  # its prefill begins anew, so the bound is unknown again
    # In the other lines it waits already, and keeps its place.
    if line == DECODES:
        _remove(w.lines[DECODES], s.decodes, i)
        s.decodes -= 1
        r.first_due = _resumes_by(r, floor)
        _arrive(requests, s, w.lines, i)


@njit(allocates=False)
def _evict(requests: Records, s: np.record, w: Worker, floor: float) -> bool:
    """Evict one request outside the batch that is being formed; return whether there is one.

    Late ones go first, then those that decode, the one due last first, then those of the queue.
    Each line is gone through from its end. Whoever is in the batch has its number, ``formed`` + 1.
    """
    lines = w.lines
    for line in (LATE, DECODES, QUEUE):
        for k in range(_length(s, line) - 1, -1, -1):
            i = lines[line, k]
            r = requests[i]
            if r.holds and r.batch != s.formed + 1:
                _evict_one(requests, s, w, floor, line, i)
                return True

    return False


@njit(allocates=False)
def _evict_for_first(requests: Records, s: np.record, w: Worker, knobs: Floats) -> None:
    """Evict requests that decode until the first of the queue has a place.

    Each time the one goes that has the most time to spare beyond its second prefill. It must have
    more than the knob, in seconds, and may not need its next token before the first request's.
    """
    first = requests[w.lines[QUEUE, 0]]
    while not first.holds and not _has_place(first, s, w.limits, knobs[RESERVE]):
        chosen, best_spare = -1, knobs[EVICT]
        for i in w.lines[DECODES, : s.decodes]:
            r = requests[i]
            # Evicted, it has what it has produced to prefill too: as long, by the tokens.
            refill_s = r.work * (r.prompt + r.produced) / r.prompt
            resumes_by = _resumes_by(r, knobs[FLOOR])
            if resumes_by - s.now - refill_s > best_spare and resumes_by > first.first_due:
                chosen, best_spare = i, resumes_by - s.now - refill_s

        if chosen < 0:
            break

        _evict_one(requests, s, w, knobs[FLOOR], DECODES, chosen)


@njit(allocates=False)
def _add_prefills(
    requests: Records, s: np.record, w: Worker, reserve: float, line: int, sums: Sums, time: float
) -> Sums:
    """Add prefills of a line to a batch that takes at most a time; return its sums.

    The first that gets none, or not all of its input, ends the line: nobody overtakes it. `line`:
    `QUEUE` or `LATE`. `reserve`: as in `_has_place`. `sums`: what the batch holds already.
    """
    limits = w.limits
    for k in range(_length(s, line)):
        i = w.lines[line, k]
        r = requests[i]
        input_left = life.rest_of(r)
        batch_left = limits.max_batch_tokens - sums.tokens
        limit = min(input_left, batch_left, limits.max_prefill_tokens - sums.prefill_tokens)
        # A prefill that is completed has its first token at the end of the batch, which may
        # therefore take no longer than until it is due.
        time_for_it = min(time, r.first_due - s.now)
        tokens = tokens_within(r, sums, limit, w.cost, time_for_it)
        if tokens < input_left and not limits.chunked:
            tokens = 0
        if tokens < 1 or not _admit(r, s, limits, reserve):
            break
        if tokens == input_left:
            time = time_for_it

        r.batch = s.formed + 1
        sums = add_prefill(sums, tokens, r.cached)
        common.add_entry(w.columns.entries, s, i, tokens)
        if tokens < input_left:
            break

    return sums


@njit(allocates=False)
def _add_decodes(
    requests: Records, s: np.record, w: Worker, knobs: Floats, sums: Sums, time: float
) -> Sums:
    """Add decodes to a batch that takes at most a time; return its sums.

    Requests that are behind come first, and then the others by their last deadlines. A request is
    behind if each of its tokens left may take less than the knob's share of its step.
    """
    limits, all_decodes = w.limits, sums
    for i in w.lines[DECODES, : s.decodes]:
        all_decodes = add_decode(all_decodes, requests[i].cached)

    # Most batches have time for all of them. Then no decode is timed alone.
    time = np.inf if batch_time(w.cost, all_decodes) <= time else time
    for behind in (True, False):
        k = 0
        while k < s.decodes:
            i = w.lines[DECODES, k]
            r = requests[i]
            k += 1
            # Those that are behind in the first turn, the others in the second; nobody twice.
            slow = r.left < np.inf and r.left < knobs[BEHIND] * r.step
            if slow != behind or r.batch == s.formed + 1:
                continue
            if sums.tokens >= limits.max_batch_tokens:
                return sums

            # The first one decodes however long that takes, so that somebody always goes on.
            more = add_decode(sums, r.cached)
            if sums.tokens > 0 and time < np.inf and batch_time(w.cost, more) > time:
                return sums

            r.batch = s.formed + 1  # so that `_evict` spares it
            kv_growth = growth(r, 1, limits)
            while not has_room(s, s.growing + kv_growth, limits):
                if not _evict(requests, s, w, knobs[FLOOR]):
                    r.batch = s.formed  # it is not in the batch after all
                    return sums

            s.growing += kv_growth
            sums = more
            common.add_entry(w.columns.entries, s, i, 1)

    return sums


@njit(allocates=False)
def decide(requests: Records, s: np.record, w: Worker, settings: Settings, knobs: Floats) -> Sums:
    """Form the next batch, of prefills where they are due and of decodes else; return its sums.

    `knobs`: the row that applies now. `_update_slack` has written `s.spare` and
    `s.longest_decodes`, the seconds that a batch without decodes, or of decodes, may take.
    """
    sums, reserve = EMPTY, knobs[RESERVE]
    # A search that knows what arrives lets late requests wait for all others. One that only counts
    # who is in time ends before that.
    serves_late = not settings.counts and (settings.ahead == 0.0 or s.pending == 0)
    s.growing = 0
    line, due = QUEUE, s.decodes == 0  # whose prefills, and whether they are due
    if s.queued > 0:
        slack = _slack(requests, s, w, settings.ahead, knobs)
        due = due or slack < knobs[URGENT]
        if due and knobs[EVICT] > 0.0 and s.queued > 0:  # `_slack` may have let all go
            _evict_for_first(requests, s, w, knobs)
    elif serves_late:
        line, due = LATE, True

    # Prefills come in large pieces: not before decodes can wait for a piece of the least size.
    if due and s.spare >= knobs[LUMP]:
        time = min(s.spare, knobs[PIECE])
        # A mixed batch decodes first, and prefills in what is left of its time.
        if w.limits.hybrid and knobs[MIXED] > 0.5:
            sums = _add_decodes(requests, s, w, knobs, sums, time)
        sums = _add_prefills(requests, s, w, reserve, line, sums, time)

    if sums.tokens == 0 and s.decodes > 0:
        sums = _add_decodes(requests, s, w, knobs, sums, s.longest_decodes)
    # If neither gave a batch, a prefill may take any time.
    for line in (QUEUE, LATE):
        if sums.tokens == 0 and (line == QUEUE or serves_late):
            sums = _add_prefills(requests, s, w, reserve, line, sums, np.inf)

    return sums


@njit(allocates=False)
def _begin_decoding(requests: Records, s: np.record, lines: Ints, i: int) -> None:
    """Move a request whose prefill has ended to those that decode, if it has not finished.

    Its first token fixes the deadline of its last one (``due``): by the pace, and by the latency
    (``ends_by``).
    """
    r = requests[i]
    if r.late:
        _remove(lines[LATE], s.late, i)
        s.late -= 1
    else:
        _remove(lines[QUEUE], s.queued, i)
        s.queued -= 1
        # After a later token, which ends the refill of an evicted request, `due` stays as it was.
        if r.produced == 1:
            if s.now > r.first_due + _EXACT:
                _lose(r, s)
            else:
                # Without a pace, only the end of the last token counts (inf times 0 is no number).
                rest = r.pace * (r.estimate - 1) if r.pace < np.inf else np.inf
                r.due = min(r.first_at + rest, r.ends_by)

    if not r.leaving:  # else the prefill gave its last token
        _insert(requests, lines[DECODES], s.decodes, i, True)  # by `due`
        s.decodes += 1


@njit(allocates=False)
def _process(requests: Records, s: np.record, lines: Ints, entries: Ints, limits: Limits) -> None:
    """Process the entries of a batch: tokens, deadlines, and which line each request is in.

    `entries`: requests and tokens of the batch alone. A request that is found late (`_lose`) goes
    on without deadlines; one that ends in time is taken off ``s.pending``.
    """
    finished = 0
    for k in range(entries.shape[1]):
        i = entries[common.REQUEST, k]
        r = requests[i]
        decoded = r.decoding
        if decoded:  # a prefill has had room since its admission
            take(s, r, 1, limits)
        if not life.advance(r, entries[common.TOKENS, k]):  # its prefill goes on
            continue

        last_before, r.last_at = r.last_at, s.now
        ended = common.note_token(r, s)
        if not r.late and r.produced > 1 and s.now > last_before + r.gap + _EXACT:
            _lose(r, s)
            if decoded:  # without a deadline it stands last
                _remove(lines[DECODES], s.decodes, i)
                lines[DECODES, s.decodes - 1] = i
            else:  # its refill after an eviction, since it had a token before
                _remove(lines[QUEUE], s.queued, i)
                s.queued -= 1
                _append_late(s, lines, i)  # `_begin_decoding` takes it from there

        if not decoded:
            _begin_decoding(requests, s, lines, i)
        elif ended:
            _remove(lines[DECODES], s.decodes, i)
            s.decodes -= 1
        elif r.produced >= r.estimate and r.due < np.inf:
            # It is longer than predicted: one more token is expected, and due a pace later.
            r.due = min(r.first_at + r.pace * r.produced, r.ends_by)

        if ended:
            finished += 1
            if not r.late and s.now > r.due + _EXACT:
                _lose(r, s)
            elif not r.late:
                s.pending -= 1

            _free_seat(r, s, limits)

    s.done += finished
    s.since_progress = 0 if finished > 0 else s.since_progress + 1
    # The longest request alone takes so many batches, which are no sign of an endless loop.
    if s.since_progress > MAX_STALLED_BATCHES + s.longest:
        s.outcome = common.STALLED


@njit(allocates=False)
def run(requests: Records, state: Records, w: Worker, settings: Settings) -> None:
    """Run until the requests assigned so far have finished, or up to a time.

    A search may end it earlier: when too many are lost, that is late, or, where it only counts who
    is in time (``counts``), when all have finished that may be (``s.pending`` is 0).
    """
    s, lines = state[0], w.lines
    while common.begin_turn(s, w):
        if s.lost > settings.max_lost or (settings.counts and s.pending == 0):
            break

        i = common.next_arrival(requests, s, w.coming)
        while i >= 0:
            _arrive(requests, s, lines, i)
            i = common.next_arrival(requests, s, w.coming)

        _mark_hopeless(requests, s, lines, w.cost)
        knobs = settings.knobs[s.row]  # those of whoever came last (`_arrive`)
        _update_slack(requests, s, lines[DECODES], w.cost, knobs)
        first = s.entries
        sums = decide(requests, s, w, settings, knobs)
        # Nothing can run: wait, or stop at the first of the queue, or of those that are late.
        if sums.tokens == 0:
            about = lines[QUEUE, 0] if s.queued > 0 else -1
            about = lines[LATE, 0] if about < 0 and s.late > 0 else about
            if not common.let_time_pass(requests, s, w, about):
                break

            continue

        s.formed += 1
        common.run_batch(w.columns.batches, s, batch_time(w.cost, sums))
        rows = w.columns.entries[:, first : s.entries]
        _process(requests, s, lines, rows, w.limits)
