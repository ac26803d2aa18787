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

# Outcomes of a loop.
DONE = 0  # nothing is wrong so far
STUCK = 1  # nothing runs, nothing can be admitted, nothing arrives
LOOP = 2  # cleared twice in the same state
STALLED = 3  # too many batches or clearings without a completion
EVENT = 4  # it is watched for completions, and a request has finished in the last batch
LOST = 5  # nobody waits or runs, nothing arrives, and a request has not finished

MAX_FIRST_ENTRIES = 1 << 24
"""Max entries of a schedule that are allocated before it begins."""
# A loop makes so many turns before the first look at the clock. Later looks are about so many
# seconds apart.
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
    ("leaving", np.bool_),  # is to be removed from the running requests: evicted or finished
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
    ("settled", np.int64),  # ``evicted`` at the last batch: the KV of later ones is still there
    ("since_progress", np.int64),  # batches since the last completion (`Online`: since the last
    # token that was new)
    ("longest", np.int64),  # output
    ("turns", np.int64),  # turns that are left until the loop returns to look at the clock
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

    `coming`: the requests assigned so far, by release. `until`: the time at which the loop returns.
    `usage`: the KV projected after each batch, for loops that look ahead. `lines`: one list of
    requests in each row. In most loops row 0 is the queue, a heap, and row 1 the running requests.
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
    state["next_landing"], state["origin"] = np.inf, instance.clock_origin
    return state


def new_columns(instance: Instance, rows: int = 2) -> Columns:
    """Return empty columns, long enough for a schedule with few evictions and split prefills.

    Copying an array that grows, to new pages each time, costs more than the loop.
    """
    entries = min(int(instance.output_tokens.sum() * 1.125) + 4096, MAX_FIRST_ENTRIES)
    table: Any = np.empty((rows, entries), dtype=np.int32)
    # Batches and evictions are often fewer than this, and their columns are cheap to lengthen.
    return Columns(np.zeros(1024, dtype=BATCH), table, np.zeros(256, np.int64))


def one_batch_columns(requests: int) -> Columns:
    """Return columns for a loop that is asked for one batch of at most so many requests."""
    entries: Any = np.empty((2, requests), dtype=np.int32)
    return Columns(np.zeros(0, dtype=BATCH), entries, np.empty(requests, np.int64))


def part_of(job: Job, requests: Any, state: Any, columns: Columns, *, split: bool) -> Part:
    """Return the batches that a compiled loop made; raise `LoopError` if it did not end.

    `split`: whether the policy splits prefills.
    """
    s, problem = state[0], job.problem
    if s.outcome != DONE:
        about = int(s.about)  # a request, or -1
        reason = {
            STUCK: "nothing runs and it can never be admitted",
            LOOP: "the running requests were cleared twice in the same state",
            STALLED: "no request completed for too long",
            LOST: "it has not finished, and neither waits nor runs: the policy has lost it",
        }[int(s.outcome)]
        # A policy that splits no prefill may be stuck since a limit is below the request's whole
        # input. Then the error names the limit.
        if s.outcome == STUCK and not split:
            size = int(requests["prompt"][about] + requests["produced"][about])
            reason = beyond_limits(problem, size) or reason

        raise endless(job, about, int(s.batches), float(s.now), reason)

    batches, entries = columns.batches[: s.batches], columns.entries[:, : s.entries]
    processed = batches["entries"], entries[REQUEST], entries[TOKENS]
    evictions = batches["evicted"], columns.evicted[: s.evicted]
    reused = entries[REUSED] if len(entries) > REUSED else None
    return Part(batches["start"], *processed, *evictions, bool(s.off_default), reused)


def in_turns(job: Job, state: Any, run: Callable[[], object]) -> None:
    """Run a compiled loop to its end, and look at the job's budget now and then.

    A compiled loop can be interrupted only by itself: it returns after some turns, and goes on.
    """
    turns = _FIRST_TURNS
    while True:
        state["turns"] = turns
        began_at = work_time()
        run()
        # A loop that still has turns left has returned for another reason: it is at its end.
        if state[0].turns > 0:
            return

        job.budget.check(f"policy {job.name!r} ran")
        slow = work_time() - began_at > _TURNS_S
        turns = max(1, turns // 2) if slow else 2 * turns


def skip_type_checks(function: Any) -> Callable[..., Any]:
    """Return a compiled function for many calls with arguments of the same types.

    numba looks at the types of all arguments in every call. A call for one arrival takes less time
    than that look.
    """
    if not hasattr(function, "overloads"):
        return function  # numba is switched off

    machine_code: list[Any] = []  # empty before the first call, then one entry point

    def call(*arguments: Any) -> Any:
        """Return what the function does; after the first call without a look at the types."""
        if machine_code:
            return machine_code[0](*arguments)

        from numba import typeof

        result = function(*arguments)
        machine_code.append(function.overloads[tuple(map(typeof, arguments))].entry_point)
        return result

    return call


class Loop(NamedTuple):
    """A loop that decides for a worker, and what it has of its own.

    ``run(requests, state, worker, ...)`` goes on to a time. Its last arguments are an entry of
    `own`, which has one entry for each worker, or one for all. Where it makes columns anew, it
    returns them. `released` is called with each request of a session and its release: it sets the
    fields of the request's record that follow from the release. `ahead`: how many batches the
    projection of KV reaches beyond those that the columns have room for; 0: nothing is projected.
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
        # `assigned`: how many so far, for ``seq`` in sessions, where releases give the order.
        self.assigned, self.requests, self.limits = 0, requests, limits
        self.states = states = [state.copy() for _ in range(workers)]
        self.loop = loop._replace(run=skip_type_checks(loop.run))
        # Views into the states, which the loops change: `clock` reads them quickly.
        self.done = [state["done"] for state in states]
        self.now = [state["now"] for state in states]
        self.finish = requests["finish"]
        self.finish[:] = np.inf
        rows = 3 if "reused" in requests.dtype.names else 2  # with a row `REUSED`, or without
        self.columns = [new_columns(job.instance, rows) for _ in states]
        # By worker, the requests that were assigned to it, the first `counts` of the row.
        self.queues = np.empty((workers, job.instance.n), dtype=np.int64)
        # A loop uses up to four lines (`Worker`).
        self.lines = np.empty((workers, 4, job.instance.n + 1), dtype=np.int64)
        # A first length of the projections of KV, which `step` lengthens.
        self.usage = [np.zeros(4 * loop.ahead, dtype=np.int64) for _ in states]
        self.counts = [0] * len(states)
        # Requests whose KV is elsewhere and has no room here yet, in the order of `receive`.
        self.not_pulled = dict[int, None]()

    def free_limits(self) -> Limits:
        """Return the limits that KV on its way elsewhere leaves."""
        limits, (kept_kv, kept_seats) = self.limits, self.kept
        if kept_seats == 0:
            return limits

        return limits._replace(
            kv_capacity=limits.kv_capacity - kept_kv, max_running=limits.max_running - kept_seats
        )

    def keep(self, worker: int, request: int, sign: int, at: float) -> None:
        """See `Workers.keep`."""
        super().keep(worker, request, sign, at)
        # The worker decides by the changed limits, so not about a time before the change.
        self.now[worker][0] = max(self.now[worker][0], at)

    def receive(self, worker: int, request: int, at: float, link: Link, takes: float) -> None:
        """See `Workers.receive`."""
        r = self.requests[request]
        ledger.hand_over(r, link.moved(int(r.prompt)), takes, at)
        # It has not finished, so at least one more token comes, whatever was predicted.
        if "estimate" in self.requests.dtype.names:
            r.estimate = max(r.estimate, r.produced + 1)

        self.not_pulled[request] = None
        self.assign(worker, request, at)

    def land(self, worker: int, request: int, at: float) -> None:
        """See `Workers.land`."""
        r, state = self.requests[request], self.states[worker][0]
        r.move_end = r.first_at = at
        state.next_landing = min(state.next_landing, at)
        state.wake = 0.0  # there is something to decide again

    def assign(self, worker: int, request: int, at: float | None = None) -> None:
        """See `Workers.assign`."""
        if at is not None:
            self.requests[request]["release"] = at
            if self.job.instance.after is None:
                # Its KV comes from elsewhere. So a batch of it may start later than the judge would
                # derive from its arrival, and the schedule must give the starts.
                self.states[worker]["off_default"] = True
            else:  # in sessions the order of releases is known only now
                self.requests[request]["seq"] = self.assigned
                self.assigned += 1
                self.loop.released(request, at)

            # The worker has something to decide when the request comes.
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
        limits, loop = self.free_limits(), self.loop

        def run() -> None:
            """Go on for some turns, and make room if that is why they ended."""
            columns = self.columns[worker]
            if loop.ahead:
                longest = len(columns.batches) + loop.ahead
                self.usage[worker] = lengthen(self.usage[worker], longest)

            usage, lines, cost = self.usage[worker], self.lines[worker], self.job.cost.array
            w = Worker(limits, cost, queue, until, columns, usage, lines)
            own = loop.own[worker % len(loop.own)]  # one for each worker, or one for all
            self.columns[worker] = loop.run(self.requests, state, w, *own) or columns
            # Its turns are used up, or the columns lack room: then the loop sets 0, too.
            if state[0].turns == 0:
                # A batch has at most one entry and one eviction of each request that is not done.
                size = len(queue) - state[0].done
                self.columns[worker] = with_room(self.columns[worker], state[0], size, size)

        if not watch:
            in_turns(self.job, state, run)
            return []

        # `pulled` may have ended the last call, and `wake` was when this one was due.
        state["watch"], state["pulled"], state["wake"] = watch, 0, 0.0
        in_turns(self.job, state, run)
        state["watch"] = False
        events = []
        # The loop returned since KV began to come, to requests whose `move_start` was infinite, and
        # whoever owns the workers must know of it (`Event.moves`).
        if state[0].pulled > 0:
            move_start = self.requests["move_start"]
            for i in [i for i in self.not_pulled if move_start[i] < np.inf]:
                del self.not_pulled[i]
                events.append(Event(i, float(move_start[i]), moves=True))
        if state[0].outcome == EVENT:
            state["outcome"] = DONE
            s, columns = state[0], self.columns[worker]
            # The last batch, whose entries follow those of the batch before it.
            first = columns.batches["entries"][s.batches - 2] if s.batches > 1 else 0
            processed = columns.entries[REQUEST, first : s.entries]
            ended = processed[self.requests["finish"][processed] == s.now]
            events += [Event(i, float(s.now)) for i in ended.tolist()]

        return events

    def parts(self) -> list[Part]:
        """See `Workers.parts`."""
        # A loop that has lost a request cannot name it. It is the first that has not finished.
        for state, queue, count in zip(self.states, self.queues, self.counts, strict=True):
            if state[0].outcome == LOST:
                state["about"] = next(i for i in queue[:count] if self.finish[i] == np.inf)

        return [
            part_of(self.job, self.requests, state, columns, split=self.limits.chunked)
            for state, columns in zip(self.states, self.columns, strict=True)
        ]


@njit
def lengthen(array: Any, needed: int) -> Any:
    """Return the array, or if it is too short a copy of at least twice its length, zeros behind."""
    if needed <= array.shape[0]:
        return array

    wider = np.zeros(max(needed, 2 * array.shape[0]), dtype=array.dtype)
    for k in range(array.shape[0]):
        wider[k] = array[k]

    return wider


@njit(allocates=False)
def lacks_room(columns: Columns, s: Any, entries: int, evicted: int) -> bool:
    """Return whether the columns lack room for a batch with so many entries and evictions."""
    return bool(
        s.batches == columns.batches.shape[0]
        or s.entries + entries > columns.entries.shape[1]
        or s.evicted + evicted > columns.evicted.shape[0]
    )


@njit
def with_room(columns: Columns, s: Any, entries: int, evicted: int) -> Columns:
    """Return columns with room for one more batch with so many entries and evictions.

    Those that lack it are replaced by longer copies.
    """
    table = columns.entries
    if s.entries + entries > table.shape[1]:
        # At least twice as long, so that all copies together take linear time.
        longer = max(s.entries + entries, 2 * table.shape[1])
        wider = np.empty((table.shape[0], longer), dtype=np.int32)
        for row in range(table.shape[0]):  # slices take seconds more to compile
            for k in range(s.entries):
                wider[row, k] = table[row, k]

        table = wider

    batches = lengthen(columns.batches, s.batches + 1)
    return Columns(batches, table, lengthen(columns.evicted, s.evicted + evicted))


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
def precedes(a: Any, b: Any) -> bool:
    """Return whether request a stands before request b in the queue."""
    if a.band != b.band:
        return bool(a.band < b.band)
    if a.key != b.key:
        return bool(a.key < b.key)

    return bool(a.place < b.place)


@njit(allocates=False)
def outranks(a: Any, b: Any) -> bool:
    """Return whether request a stands before request b in the scheduler's order."""
    if a.order != b.order:
        return bool(a.order < b.order)

    return bool(a.seq < b.seq)


@njit
def push(requests: Any, heap: Ints, s: Any, i: int) -> None:
    """Add a request to the queue, a heap. Its key must not change while it is there."""
    r = requests[i]
    r.move_end = 0.0  # nothing comes to a request that waits
    # Move the new entry up from the end, past all that stand behind it.
    k = s.waiting
    while k > 0:
        parent = (k - 1) // 2
        if not precedes(r, requests[heap[parent]]):
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
    # The last entry fills the gap. It moves down from the top, past all that stand before it.
    i = heap[size]
    r = requests[i]
    k = 0
    while True:
        child = 2 * k + 1
        if child >= size:
            break
        if child + 1 < size and precedes(requests[heap[child + 1]], requests[heap[child]]):
            child += 1
        if not precedes(requests[heap[child]], r):
            break

        heap[k] = heap[child]
        k = child

    heap[k] = i


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
    """Move the clock to the next arrival of a request or of KV; return whether there is one.

    KV that comes at ``until`` or later does not count; ``s.wake`` then says when it will be there.
    """
    next_event = np.inf
    if s.arrived < by_arrival.shape[0]:
        next_event = requests[by_arrival[s.arrived]].release
    if s.next_landing < next_event:
        next_event = s.next_landing
        if next_event >= until:  # a request that is not assigned yet may come before it
            s.wake = next_event
            return False
    if next_event == np.inf:
        return False

    s.now = max(s.now, next_event)
    return True


@njit(allocates=False)
def begin_turn(s: np.record, w: Worker) -> bool:
    """Begin another turn of a loop, unless it has to return; return whether there is one.

    A loop returns when all assigned requests are done, at an outcome or a time, after its last turn
    and when KV begins to come. Where the columns might not have room for a turn, it returns as
    after its last one: it allocates nothing, so that it need not count references to arrays.
    """
    open_requests = w.coming.shape[0] - s.done
    if open_requests == 0 or s.outcome != DONE or s.now >= w.until or s.turns == 0 or s.pulled > 0:
        return False
    if lacks_room(w.columns, s, open_requests, open_requests):
        s.turns = 0
        return False

    s.turns -= 1
    return True


@njit
def let_time_pass(requests: Records, s: np.record, w: Worker, about: int) -> bool:
    """Let time pass, since nothing can run. Return whether there is anything to wait for.

    ``about``: the request that should run, or -1 where requests are left, but none is here.
    """
    if idle(requests, s, w.coming, w.until):
        return True
    # It is stuck only if nobody else can come, and no KV has just begun to.
    if w.until == np.inf and s.pulled == 0:
        s.outcome, s.about = STUCK if about >= 0 else LOST, about

    return False


@njit(allocates=False)
def take_arrivals(requests: Records, s: np.record, w: Worker) -> int:
    """Begin a turn with somebody here: let requests arrive, and KV that is there by now land.

    Return how many requests have come, the last of ``coming[: s.arrived]``. -1: the loop returns.
    """
    while begin_turn(s, w):
        s.landed = 0
        if s.moving > 0:
            ledger.land(requests, w.lines[1], s)

        first = s.arrived
        while next_arrival(requests, s, w.coming) >= 0:
            pass  # `next_arrival` counts each of them

        newcomers = s.arrived - first
        if s.running + s.waiting + newcomers > 0:
            return int(newcomers)
        if not let_time_pass(requests, s, w, -1):  # -1: nobody is here who should run
            break

    return -1


@njit
def run_batch(batches: Any, s: Any, duration: float) -> None:
    """Run the batch that has been formed: write its row, and move the clock to its end."""
    # Where a schedule states no starts, the judge has a batch begin here: at the end of the last
    # one, or at the last release of its requests.
    default = max(s.end, s.latest)
    b = batches[s.batches]
    b["start"] = s.origin + s.now  # not `b.start`: what compiled code returns has no attributes
    # The judge will read the start from the file, with its rounding, so the clock does so too.
    start = read_start(b["start"], default, s.origin)
    s.off_default = s.off_default or start != default
    s.now = s.end = start + duration
    b["entries"], b["evicted"] = s.entries, s.evicted
    s.settled = s.evicted
    s.batches += 1


@njit(allocates=False)
def note_token(r: Any, s: Any) -> bool:
    """Note the time of a token that the batch produced; return whether it is the request's last.

    Then ``r.leaving`` is set, and `remove_leaving` takes it from the running requests later.
    """
    if r.produced == 1:
        r.first_at = s.now

    if r.produced < r.output:
        return False

    r.leaving = True
    r.finish = s.now
    if s.watch:
        s.outcome = EVENT

    return True


@njit
def remove_leaving(requests: Any, running: Ints, s: Any) -> None:
    """Remove from the running requests those that are leaving, and keep the order of the others."""
    kept = 0
    for k in range(s.running):
        r = requests[running[k]]
        if r.leaving:
            r.leaving = False
        else:
            running[kept] = running[k]
            kept += 1

    s.running = kept


@njit
def after_batch(requests: Any, running: Ints, s: Any, finished: int) -> None:
    """Remove finished requests from the running ones, or count one more batch without any."""
    s.done += finished
    if finished > 0:
        s.since_progress = 0
        remove_leaving(requests, running, s)
        return

    s.since_progress += 1
    # The longest request alone takes so many batches, which are no sign of an endless loop.
    if s.since_progress > MAX_STALLED_BATCHES + s.longest:
        s.outcome = STALLED
