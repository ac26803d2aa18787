"""What the compiled loops share: records, the queue, the clock, and the schedule they return.

A loop keeps its requests and its own state in records (`optsched.judge.life` says why). Import
this module lazily: it loads numba.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from optsched.costs.machine import Link
from optsched.judge import life
from optsched.judge.life import Floats, Ints, Records, record
from optsched.judge.replay import Limits, read_start
from optsched.policies.engine import ledger
from optsched.policies.runner import MAX_STALLED_BATCHES, beyond_limits, endless
from optsched.policies.workers import Event, Job, Part, Workers
from optsched.problem import forecast
from optsched.problem.budget import work_time
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit

# Outcomes.
DONE = 0
STUCK = 1  # nothing runs, nothing can be admitted, nothing arrives
LOOP = 2  # cleared twice in the same state
STALLED = 3  # too many batches or clearings without a completion
EVENT = 4  # a request has finished in the last batch, which is watched for
LOST = 5  # nobody waits or runs, nothing arrives, and a request has not finished

MAX_FIRST_ENTRIES = 1 << 24
"""Max entries of a schedule that are allocated before it begins."""
# The turns of a loop before the first look at the clock, and about how long turns last later.
_FIRST_TURNS, _TURNS_S = 1000, 0.05

REQUEST, TOKENS, REUSED = 0, 1, 2
"""Rows of `Columns.entries`; the last one only for an engine that caches prefixes."""

tokens_left = njit(forecast.tokens_left)

FIELDS = (
    ("release", np.float64),  # from when on it may be processed
    ("order", np.float64),  # what the scheduler's order compares (`order_key`); ties: by ``seq``
    ("seq", np.int64),  # its place in the order of (release, index)
    ("band", np.int64),  # its place in the queue: ascending band, then key, then place
    ("key", np.float64),
    ("place", np.int64),
    ("gone", np.bool_),  # leaves the running requests: evicted or finished
    ("first_at", np.float64),  # time of its first token
    ("finish", np.float64),  # time of its last token; infinite while it is unknown
    *ledger.MOVE,
)
"""The fields of a request that every loop has beside those of its life."""

STATE = (
    ("now", np.float64),
    ("end", np.float64),  # of the last batch
    ("latest", np.float64),  # arrival in the batch that is being formed
    ("arrived", np.int64),  # requests, of which ``done`` have finished
    ("done", np.int64),
    ("waiting", np.int64),  # length of the queue
    ("running", np.int64),  # length of the list of those that hold KV
    ("batches", np.int64),  # rows of the columns so far
    ("entries", np.int64),
    ("evicted", np.int64),
    ("settled", np.int64),  # evicted before the last batch: the KV of later ones is still there
    ("since", np.int64),  # batches since the last completion
    ("longest", np.int64),  # output
    ("turns", np.int64),  # turns of the loop until it returns to look at the clock
    ("watch", np.bool_),  # whether the loop returns when a request has finished
    *ledger.MOVES,
    ("wake", np.float64),  # until when there is nothing to decide, unless a request comes
    ("outcome", np.int64),
    ("about", np.int64),  # request that the outcome is about, or -1
    ("off_default", np.bool_),  # some batch does not start at the default time
    ("origin", np.float64),  # of the clock
)
"""The fields that the state of every loop has. A loop adds its own, and its settings.

Every call copies a tuple, but passes a record by its address.
"""

BATCH = record(
    ("start", np.float64),
    ("entries", np.int64),  # of it and all before it
    ("evicted", np.int64),
)


class Columns(NamedTuple):
    """The schedule as it grows. `STATE` says how much of each column is filled."""

    batches: Any
    entries: Ints
    evicted: Ints


class Worker(NamedTuple):
    """What a loop is told of its worker beside its state.

    `coming`: the requests assigned so far, by release. `until`: when the loop returns. `usage`: the
    KV that is projected, for loops that look ahead. `lines`: lists of requests, of which the
    first is mostly the queue, a heap, and the second has those that run.
    """

    limits: Limits
    cost: Floats
    coming: Ints
    until: float
    columns: Columns
    usage: Ints
    lines: Ints


def new_requests(instance: Instance, fields: tuple[tuple[str, Any], ...]) -> Any:
    """Return a record of `LIFE` and ``fields`` for each request, before anything has run."""
    requests = life.new_requests(instance.prompt_tokens, instance.output_tokens, fields)
    requests["release"] = instance.given_release
    if instance.after is None:  # otherwise it is set when a request is assigned
        by_release = np.lexsort((np.arange(instance.n), instance.release))
        requests["seq"][by_release] = np.arange(instance.n)

    return requests


def new_state(fields: tuple[tuple[str, Any], ...], instance: Instance) -> Any:
    """Return the state before any arrival: an array of one record, which is changed in place."""
    state = np.zeros(1, dtype=record(*STATE, *fields))
    state["longest"], state["about"] = instance.output_tokens.max(), -1
    state["landing"], state["origin"] = np.inf, instance.clock_origin
    return state


def new_columns(instance: Instance, rows: int = 2) -> Columns:
    """Return empty columns, long enough for a schedule with few evictions and split prefills.

    Copying an array that grows, to new pages each time, costs more than the loop.
    """
    entries = min(int(instance.output_tokens.sum() * 1.125) + 4096, MAX_FIRST_ENTRIES)
    return Columns(
        np.zeros(1024, dtype=BATCH),
        np.empty((rows, entries), dtype=np.int32),
        np.zeros(256, np.int64),
    )


def no_batches(requests: int) -> Columns:
    """Return columns with room for one batch of so many requests, of which only it is asked."""
    entries: Any = np.empty((2, requests), dtype=np.int32)
    return Columns(np.zeros(0, dtype=BATCH), entries, np.empty(requests, np.int64))


def part_of(job: Job, requests: Any, state: Any, columns: Columns, *, split: bool) -> Part:
    """Return the batches that a compiled loop made; raise `LoopError` if it did not end."""
    s, problem = state[0], job.problem
    if s.outcome != DONE:
        about = int(s.about)
        reason = {
            STUCK: "nothing runs and it can never be admitted",
            LOOP: "the running requests were cleared twice in the same state",
            STALLED: "no request completed for too long",
            LOST: "it has not finished, and neither waits nor runs: the policy has lost it",
        }[int(s.outcome)]
        # Who splits no prefill is stuck where a limit is below its whole input: that says more.
        if s.outcome == STUCK and not split:
            size = int(requests["prompt"][about] + requests["produced"][about])
            reason = beyond_limits(problem, size) or reason

        raise endless(job, about, int(s.batches), float(s.now), reason)

    batches, entries = columns.batches[: s.batches], columns.entries[:, : s.entries]
    ran = batches["entries"], entries[REQUEST], entries[TOKENS]
    evictions = batches["evicted"], columns.evicted[: s.evicted]
    reused = entries[REUSED] if len(entries) > REUSED else None
    return Part(batches["start"], *ran, *evictions, bool(s.off_default), reused)


def in_turns(job: Job, state: Any, run: Callable[[], object]) -> None:
    """Run a compiled loop to its end, and look at the job's budget now and then.

    A compiled loop can be interrupted only by itself: it returns after some turns, and goes on.
    """
    turns = _FIRST_TURNS
    while True:
        state["turns"] = turns
        begin = work_time()
        run()
        if state[0].turns > 0:
            return

        job.budget.check(f"policy {job.name!r} ran")
        slow = work_time() - begin > _TURNS_S
        turns = max(1, turns // 2) if slow else 2 * turns


def direct(function: Any) -> Callable[..., Any]:
    """Return a compiled function for many calls with arguments of the same types.

    numba looks at the types in every call. From one arrival to the next this outlasts the loop.
    """
    if not hasattr(function, "overloads"):
        return function  # numba is switched off

    known: list[Any] = []

    def call(*arguments: Any) -> Any:
        """Return what the function does; after the first call without a look at the types."""
        if known:
            return known[0](*arguments)

        from numba import typeof

        found = function(*arguments)
        known.append(function.overloads[tuple(map(typeof, arguments))].entry_point)
        return found

    return call


class Loop(NamedTuple):
    """A loop that decides for a worker, and what it has of its own.

    ``run(requests, state, at, ...)`` goes on to a time, with a `Worker` and at the end what `own`
    has for each of them, or for all. Where it makes columns anew, it returns them. `released` is
    called with each request of a session and its release: it sets the fields of the request's
    record that follow from it. `ahead`: so many batches more than there are are projected.
    """

    run: Callable[..., Columns | None]
    own: Sequence[tuple[Any, ...]] = ((),)
    released: Callable[[int, float], None] = lambda request, at: None
    ahead: int = 0


class Compiled(Workers):
    """A `Workers` of compiled loops. The requests are shared, since each is on one worker."""

    def __init__(
        self, job: Job, requests: Any, state: Any, limits: Limits, loop: Loop, workers: int = 1
    ) -> None:
        super().__init__(job, workers)
        self.mode = "restart" if limits.restart else "recompute"
        self.assigned, self.requests, self.limits = 0, requests, limits
        self.states = states = [state.copy() for _ in range(workers)]
        self.loop = loop._replace(run=direct(loop.run))
        self.done = [state["done"] for state in states]
        self.now = [state["now"] for state in states]
        self.finish = requests["finish"]
        self.finish[:] = np.inf
        rows = 3 if "reused" in requests.dtype.names else 2
        self.columns = [new_columns(job.instance, rows) for _ in states]
        self.queues = np.empty((workers, job.instance.n), dtype=np.int64)
        self.lines = np.empty((workers, 4, job.instance.n + 1), dtype=np.int64)
        self.usage = [np.zeros(4 * loop.ahead, dtype=np.int64) for _ in states]
        self.counts = [0] * len(states)
        self.away = dict[int, None]()  # in the order in which they were handed over

    def left(self) -> Limits:
        """Return the limits that KV on its way elsewhere leaves."""
        limits, (kv, seats) = self.limits, self.kept
        if seats == 0:
            return limits

        left = limits.kv_capacity - kv, limits.max_running - seats
        return limits._replace(kv_capacity=left[0], max_running=left[1])

    def keep(self, worker: int, request: int, sign: int, at: float) -> None:
        """See `Workers.keep`."""
        super().keep(worker, request, sign, at)
        self.now[worker][0] = max(self.now[worker][0], at)

    def receive(self, worker: int, request: int, at: float, link: Link, takes: float) -> None:
        """See `Workers.receive`."""
        r = self.requests[request]
        ledger.hand_over(r, link.moved(int(r.prompt)), takes, at)
        # It has not finished, so at least one more token comes, whatever was predicted.
        if "estimate" in self.requests.dtype.names:
            r.estimate = max(r.estimate, r.produced + 1)

        self.away[request] = None
        self.assign(worker, request, at)

    def land(self, worker: int, request: int, at: float) -> None:
        """See `Workers.land`."""
        r, state = self.requests[request], self.states[worker][0]
        r.ready = r.first_at = at
        state.landing = min(state.landing, at)
        state.wake = 0.0

    def assign(self, worker: int, request: int, at: float | None = None) -> None:
        """See `Workers.assign`."""
        if at is not None:
            self.requests[request]["release"] = at
            if self.job.instance.after is None:
                self.states[worker]["off_default"] = True
            else:
                self.requests[request]["seq"] = self.assigned
                self.assigned += 1
                self.loop.released(request, at)

            self.states[worker]["wake"] = min(self.states[worker]["wake"][0], at)

        self.queues[worker, self.counts[worker]] = request
        self.counts[worker] += 1

    def clock(self, worker: int) -> float:
        """See `Workers.clock`."""
        open_requests = self.done[worker][0] < self.counts[worker]
        wake = self.states[worker]["wake"][0]
        return float(max(self.now[worker][0], wake)) if open_requests else math.inf

    def step(self, worker: int, until: float, watch: bool) -> list[Event]:
        """See `Workers.step`."""
        state, queue = self.states[worker], self.queues[worker, : self.counts[worker]]
        told, lines, loop = (self.left(), self.job.cost.array, queue), self.lines[worker], self.loop

        def run() -> None:
            """Go on for some turns, and make room if that is why they ended."""
            columns = self.columns[worker]
            if loop.ahead:
                longest = len(columns.batches) + loop.ahead
                self.usage[worker] = grown(self.usage[worker], longest)

            at = Worker(*told, until, columns, self.usage[worker], lines)
            own = loop.own[worker % len(loop.own)]
            self.columns[worker] = loop.run(self.requests, state, at, *own) or columns
            if state[0].turns == 0:
                left = len(queue) - state[0].done
                self.columns[worker] = with_room(self.columns[worker], state[0], left, left)

        if not watch:
            in_turns(self.job, state, run)
            return []

        state["watch"], state["pulled"], state["wake"] = watch, 0, 0.0
        in_turns(self.job, state, run)
        state["watch"] = False
        found = []
        if state[0].pulled > 0:
            for i in [i for i in self.away if self.requests["moved_at"][i] < np.inf]:
                del self.away[i]
                found.append(Event(i, float(self.requests["moved_at"][i]), moves=True))
        if state[0].outcome == EVENT:
            state["outcome"] = DONE
            s, columns = state[0], self.columns[worker]
            first = columns.batches["entries"][s.batches - 2] if s.batches > 1 else 0
            ran = columns.entries[REQUEST, first : s.entries]
            ended = ran[self.requests["finish"][ran] == s.now]
            found += [Event(i, float(s.now)) for i in ended.tolist()]

        return found

    def parts(self) -> list[Part]:
        """See `Workers.parts`."""
        for state, queue, count in zip(self.states, self.queues, self.counts, strict=True):
            if state[0].outcome == LOST:
                state["about"] = next(i for i in queue[:count] if self.finish[i] == np.inf)

        return [
            part_of(self.job, self.requests, state, columns, split=self.limits.chunked)
            for state, columns in zip(self.states, self.columns, strict=True)
        ]


@njit
def grown(array: Any, needed: int) -> Any:
    """Return the array, or a longer copy with zeros at its end if it is too short."""
    if needed <= array.shape[0]:
        return array

    wider = np.zeros(max(needed, 2 * array.shape[0]), dtype=array.dtype)
    for k in range(array.shape[0]):
        wider[k] = array[k]

    return wider


@njit(allocates=False)
def full(columns: Columns, s: Any, entries: int, evicted: int) -> bool:
    """Return whether one more batch, with these entries and evictions, may not fit."""
    return bool(
        s.batches == columns.batches.shape[0]
        or s.entries + entries > columns.entries.shape[1]
        or s.evicted + evicted > columns.evicted.shape[0]
    )


@njit
def with_room(columns: Columns, s: Any, entries: int, evicted: int) -> Columns:
    """Return columns with room for one more batch with these entries and evictions."""
    old = columns.entries
    if s.entries + entries > old.shape[1]:
        longer = max(s.entries + entries, 2 * old.shape[1])
        wider = np.empty((old.shape[0], longer), dtype=np.int32)
        for row in range(old.shape[0]):  # slices take seconds more to compile
            for k in range(s.entries):
                wider[row, k] = old[row, k]

        old = wider

    return Columns(
        grown(columns.batches, s.batches + 1), old, grown(columns.evicted, s.evicted + evicted)
    )


@njit
def add_entry(entries: Ints, s: Any, i: int, tokens: int) -> None:
    """Add tokens of request i to the batch that is being formed."""
    entries[REQUEST, s.entries] = i
    entries[TOKENS, s.entries] = tokens
    s.entries += 1


@njit
def add_eviction(evicted: Ints, s: Any, i: int) -> None:
    """Add request i to those that are evicted before the next batch."""
    evicted[s.evicted] = i
    s.evicted += 1


@njit
def before(a: Any, b: Any) -> bool:
    """Return whether request a stands before request b in the queue."""
    if a.band != b.band:
        return bool(a.band < b.band)
    if a.key != b.key:
        return bool(a.key < b.key)

    return bool(a.place < b.place)


@njit(allocates=False)
def ahead(a: Any, b: Any) -> bool:
    """Return whether request a stands before request b in the scheduler's order."""
    if a.order != b.order:
        return bool(a.order < b.order)

    return bool(a.seq < b.seq)


@njit
def push(requests: Any, heap: Ints, s: Any, i: int) -> None:
    """Add a request to the queue, a heap. Its key must not change while it is there."""
    r = requests[i]
    r.ready = 0.0
    k = s.waiting
    while k > 0:
        parent = (k - 1) // 2
        if not before(r, requests[heap[parent]]):
            break

        heap[k] = heap[parent]
        k = parent

    heap[k] = i
    s.waiting += 1


@njit
def pop(requests: Any, heap: Ints, s: Any) -> None:
    """Remove the first request, ``heap[0]``, from the queue."""
    s.waiting -= 1
    size = s.waiting
    i = heap[size]
    r = requests[i]
    k = 0

    while True:
        child = 2 * k + 1
        if child >= size:
            break
        if child + 1 < size and before(requests[heap[child + 1]], requests[heap[child]]):
            child += 1
        if not before(requests[heap[child]], r):
            break

        heap[k] = heap[child]
        k = child

    heap[k] = i


@njit(allocates=False)
def sort_up(values: Any, size: int) -> None:
    """Sort the first numbers of an array (Shell 1959). numba takes 2 s to compile `np.sort`."""
    gap = size // 2
    # The last gap is 1, which sorts whatever is left; the ones before make it quick.
    while gap > 0:
        for k in range(gap, size):
            value, place = values[k], k
            while place >= gap and values[place - gap] > value:
                values[place] = values[place - gap]
                place -= gap

            values[place] = value

        gap //= 2


@njit
def next_arrival(requests: Any, s: Any, by_arrival: Ints) -> int:
    """Return the next request that has arrived by now, or -1 if there is none."""
    if s.arrived == by_arrival.shape[0]:
        return -1

    i = by_arrival[s.arrived]
    if requests[i].release > s.now:
        return -1

    s.arrived += 1
    return int(i)


@njit
def idle(requests: Any, s: Any, by_arrival: Ints, until: float) -> bool:
    """Move the clock to the next arrival, or of KV by a time; return whether there is one."""
    at = np.inf
    if s.arrived < by_arrival.shape[0]:
        at = requests[by_arrival[s.arrived]].release
    if s.landing < at:
        at = s.landing
        if at >= until:  # a request may come before it
            s.wake = at
            return False
    if at == np.inf:
        return False

    s.now = max(s.now, at)
    return True


@njit(allocates=False)
def goes_on(s: np.record, at: Worker) -> bool:
    """Begin another turn of a loop, if there is to be one.

    Where the columns might not have room for it, the loop returns as after its last turn: it
    allocates nothing, so that it need not count references to arrays.
    """
    left = at.coming.shape[0] - s.done
    if left == 0 or s.outcome != DONE or s.now >= at.until or s.turns == 0 or s.pulled > 0:
        return False
    if full(at.columns, s, left, left):
        s.turns = 0
        return False

    s.turns -= 1
    return True


@njit
def waits(requests: Records, s: np.record, at: Worker, about: int) -> bool:
    """Let time pass, since nothing can run. Return whether there is anything to wait for.

    ``about``: the request that should run, or -1 where requests are left, but none is here.
    """
    if idle(requests, s, at.coming, at.until):
        return True
    if at.until == np.inf and s.pulled == 0:  # else a request may change that
        s.outcome, s.about = STUCK if about >= 0 else LOST, about

    return False


@njit(allocates=False)
def turn(requests: Records, s: np.record, at: Worker) -> int:
    """Begin a turn with somebody here; return how many have just come, or -1 if a loop returns.

    They are the last of those that have arrived. KV that is there by now has landed.
    """
    while goes_on(s, at):
        s.landed = 0
        if s.moving > 0:
            ledger.land(requests, at.lines[1], s)

        first = s.arrived
        while next_arrival(requests, s, at.coming) >= 0:
            pass
        if s.running + s.waiting + s.arrived > first:
            return int(s.arrived - first)
        if not waits(requests, s, at, -1):
            break

    return -1


@njit
def run_batch(batches: Any, s: Any, duration: float) -> None:
    """Run the batch that has been formed: write its row, and move the clock to its end."""
    default = max(s.end, s.latest)
    b = batches[s.batches]
    b["start"] = s.origin + s.now  # not `b.start`: what compiled code returns has no attributes
    start = read_start(b["start"], default, s.origin)
    s.off_default = s.off_default or start != default
    s.now = s.end = start + duration
    b["entries"], b["evicted"] = s.entries, s.evicted
    s.settled = s.evicted
    s.batches += 1


@njit(allocates=False)
def note(r: Any, s: Any) -> bool:
    """Note the time of a token that the batch produced. Return whether it is the request's last."""
    if r.produced == 1:
        r.first_at = s.now

    if r.produced < r.output:
        return False

    r.gone = True
    r.finish = s.now
    if s.watch:
        s.outcome = EVENT

    return True


@njit
def drop_gone(requests: Any, running: Ints, s: Any) -> None:
    """Remove those that are gone from the running requests, and keep the order."""
    kept = 0
    for k in range(s.running):
        r = requests[running[k]]
        if r.gone:
            r.gone = False
        else:
            running[kept] = running[k]
            kept += 1

    s.running = kept


@njit
def after_batch(requests: Any, running: Ints, s: Any, finished: int) -> None:
    """Remove finished requests from the running ones, or count one more batch without any."""
    s.done += finished
    if finished > 0:
        s.since = 0
        drop_gone(requests, running, s)
        return

    s.since += 1
    # The longest request needs so many batches of its own, so that these are no sign of a loop.
    if s.since > MAX_STALLED_BATCHES + s.longest:
        s.outcome = STALLED
