"""MC-SF's admission in a given order, with three brakes: the rule that the offline search adjusts.

Let N be the number of requests in the system.

*Prefills together.* Every batch that prefills pays `prefill_base` and delays all decodes. So
waiting requests are admitted only if ``together = q + r sqrt(N)`` of them fit at once.

*Fewer at a time.* With few requests in the system, a batch of all of them is too long for a small
sum of latencies. N identical requests are best served about ``sqrt(N f / w)`` at a time, where f is
the fixed cost of a batch and w a request's own part of it. So at most ``c + d sqrt(N)`` run.

*Let others finish first.* A prefill of x seconds delays every request that runs. If the m-th of
them completes in less than m x seconds, the sum of latencies is smaller when the prefill comes
after it. So a request waits while some m-th completion is less than ``p m x`` away, times the share
of the requests in the system that run. Those behind it may pass it.

A prompt longer than a batch may be comes as the only one of its batch, if prompts may be split.
`optsched.problem.schedule.in_parts` then makes several batches of it.

The brakes may differ between requests. Those of the last one that has arrived count.

Import this module lazily: it loads numba.
"""

from typing import Any

import numpy as np

from optsched.bounds.timeline import Floats, Ints
from optsched.costs.cost import CostModel
from optsched.judge.life import EMPTY, add_decode, add_prefill, advance, batch_time, new_requests
from optsched.judge.memory import fits, kv_of, project
from optsched.judge.replay import Limits, limits_of
from optsched.policies.engine import common
from optsched.policies.runner import own_work
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit
from optsched.problem.sorting import sort_up

BRAKES = ("q", "r", "c", "d", "p")
"""The parameters of the rule. The module's text says what they do."""
_FIELDS = (
    ("release", np.float64),
    ("key", np.float64),  # of the order; ties: by arrival
    ("prefill", np.float64),  # time that its prefill adds to a batch
    ("decode", np.float64),  # and its decode steps
    ("finish", np.float64),
    *((name, np.float64) for name in BRAKES),
)
_STATE = (
    ("total", np.float64),  # sum of the completion times so far
    ("joined", np.int64),  # requests that the batch being formed admits
    ("changed", np.bool_),  # something has, since admission was last tried
    ("enough", np.float64),  # the loop ends once ``total`` exceeds it, or
    ("stop", np.int64),  # once so many have arrived
)


Saved = tuple[Any, Ints, Ints, Any, Ints]
"""A moment of a run: the loop's state, who waits, who runs, their records, and the KV ahead."""


class Server:
    """An instance in seconds that can be served repeatedly, under different orders and brakes.

    Requests are numbered by arrival, and ``by_arrival`` has their numbers in the instance.
    """

    def __init__(self, instance: Instance, cost: CostModel, by_arrival: Ints) -> None:
        prompt, output = instance.prompt_tokens[by_arrival], instance.output_tokens[by_arrival]
        self._requests = new_requests(prompt, output, _FIELDS)
        self._requests["release"] = instance.release[by_arrival]
        # With one output token there is only a prefill; what more tokens add is decode steps.
        self._requests["prefill"] = own_work(prompt, np.ones_like(prompt), cost)
        self._requests["decode"] = own_work(prompt, output, cost) - self._requests["prefill"]
        self._instance = instance
        self._by_arrival, self._numbers = by_arrival, np.arange(instance.n)
        # The rule evicts nobody, so what an eviction would mean does not matter.
        self._limits = limits_of(instance, "recompute")
        self._cost = cost.array
        self._columns = common.new_columns(instance)
        # A row of requests' numbers each: those that wait, run, and join the batch being formed.
        self._lists = np.empty((3, instance.n + 1), dtype=np.int64)
        self.begin()

    def begin(self, first: int = 0) -> None:
        """Go back to the moment before an arrival that finds nobody (of request `first`)."""
        self._state = common.new_state(_STATE, self._instance)
        self._state["changed"] = True
        self._state["arrived"] = self._state["done"] = first
        self._usage = np.zeros(4096, dtype=np.int64)  # `_serve` lengthens it
        self._reset(slice(first, None))

    def _reset(self, part: slice) -> None:
        """Let some requests be as before their arrival."""
        for name in ("cached", "produced", "decoding"):
            self._requests[name][part] = 0

    def adjust(self, part: slice, key: Floats, brakes: Floats) -> None:
        """Set the keys and the brakes of some requests that have not arrived.

        Who waits is admitted in ascending order of `key`. `brakes` (shape (5, requests)) are in the
        order of `BRAKES`.
        """
        for name, values in zip(("key", *BRAKES), (key, *brakes), strict=True):
            self._requests[name][part] = values

    def run(self, arrivals: int, stop: int, enough: float) -> float:
        """Go on until the first `arrivals` requests are done, or until `stop` have arrived.

        Return the sum of completion times, in seconds. It is infinite once it exceeds `enough`, or
        if a prompt does not fit into the limits.
        """
        # The loop changes the state, the lists and the requests in place.
        fixed = self._numbers[:arrivals], self._limits, self._cost
        changing = self._state, self._columns, self._lists, self._usage
        state = self._state[0]
        state["enough"], state["stop"] = enough, stop
        self._columns, self._usage = _serve(self._requests, *fixed, *changing)
        ended = state["done"] == arrivals or state["arrived"] >= stop
        return float(state["total"]) if ended and state["total"] <= enough else np.inf

    def save(self) -> Saved:
        """Return the present moment, for `restore`. It has no requests but those that are here."""
        s = self._state[0]
        waiting, running = self._lists[0, : s["waiting"]], self._lists[1, : s["running"]]
        # Nobody is here for more batches than the longest output, so the KV ahead ends there.
        usage = self._usage[s["batches"] : s["batches"] + s["longest"] + 2]
        present = self._requests[np.append(waiting, running)]
        return self._state.copy(), waiting.copy(), running.copy(), present, usage.copy()

    def restore(self, saved: Saved) -> None:
        """Go back to a moment of this run."""
        state, waiting, running, present, usage = saved
        # Whoever came since then is new again; all others that are here were saved.
        self._reset(slice(state[0]["arrived"], self._state[0]["arrived"]))
        self._state = state.copy()
        self._requests[np.append(waiting, running)] = present
        self._lists[0, : len(waiting)], self._lists[1, : len(running)] = waiting, running
        # The KV ahead is what was saved, and nothing later.
        self._usage[state[0]["batches"] :] = 0
        self._usage[state[0]["batches"] :][: len(usage)] = usage

    @property
    def arrived(self) -> int:
        """How many requests have arrived."""
        return int(self._state[0]["arrived"])

    def work_until(self, token: float) -> float:
        """Return when the work that is present would be done, if nobody else came.

        Each request takes its own work, and `token` seconds more for each token that it has left.
        """
        s = self._state[0]
        present = np.append(self._lists[0, : s["waiting"]], self._lists[1, : s["running"]])
        r = self._requests[present]
        output, produced = r["output"], r["produced"]
        # The share of the decode steps that is left: a prefill makes the first token, steps others.
        decodes = (output - np.maximum(produced, 1)) / np.maximum(output - 1, 1)
        work = np.where(produced == 0, r["prefill"], 0.0) + r["decode"] * decodes
        return float(s["now"] + (work + token * (output - produced)).sum())

    @property
    def finish(self) -> Floats:
        """When each request completed in the last run, in seconds."""
        return self._requests["finish"].copy()

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Return batch_offsets, request and tokens of the last run's schedule."""
        batches = self._columns.batches[: self._state[0]["batches"]]
        entries = self._columns.entries[:, : self._state[0]["entries"]].astype(np.int64)
        request = self._by_arrival[entries[common.REQUEST]]
        return np.append(0, batches["entries"]), request, entries[common.TOKENS]


@njit
def _insert(requests: Any, wait: Ints, s: Any, i: int) -> int:
    """Insert a request among those that wait, in order of key, then of arrival. Return its place.

    ``wait`` has them, and ``s``, the loop's state, their number, which rises by one.
    """
    key = requests[i].key
    low, high = 0, s.waiting
    while low < high:
        middle = (low + high) // 2
        other = requests[wait[middle]].key
        if other < key or (other == key and wait[middle] < i):
            low = middle + 1
        else:
            high = middle

    for k in range(s.waiting, low, -1):
        wait[k] = wait[k - 1]

    wait[low] = i
    s.waiting += 1
    return low


@njit
def _next_completions(requests: Any, s: Any, running: Ints, cost: Floats) -> Floats:
    """Return when each running request completes if no request joins, in seconds from now.

    The times are sorted. All batches are taken to last as long as the next one would.
    """
    steps = np.empty(s.running, np.int64)
    sums = EMPTY
    for k in range(s.running):
        r = requests[running[k]]
        steps[k] = r.output - r.produced
        sums = add_decode(sums, r.cached)

    sort_up(steps, s.running)
    return steps * batch_time(cost, sums)


@njit
def _is_worth_waiting(prefill: float, completions: Floats) -> bool:
    """Whether to wait for m completions costs less than to delay m requests by a prefill."""
    m = 0
    while m < completions.shape[0] and completions[m] >= (m + 1) * prefill:
        m += 1

    return m < completions.shape[0]


@njit
def _admit(
    requests: Any,
    s: Any,
    wait: Ints,
    joining: Ints,
    usage: Ints,
    limits: Limits,
    brakes: Any,
    completions: Floats,
) -> None:
    """Admit the first requests that wait, or none unless enough of them fit at once.

    They go from `wait` to `joining`, and the batches of their runs are filled in `usage`. After the
    j-th of these a request holds base + j tokens. The first `kept` places of `wait` have those who
    go on waiting: k is never behind `kept`, so no place is written before it was read. `brakes` has
    the q, r, c, d and p of the module's text, and `completions` those of who runs, ascending, in
    seconds from now, or nobody's if p is 0.
    """
    # Those that run decode in one batch, a token each, so they are no more than a batch may have.
    size = np.sqrt(s.running + s.waiting)
    max_running = min(
        float(limits.max_running), brakes.c + brakes.d * size, float(limits.max_batch_tokens)
    )
    # In a hybrid batch those that run take a token each.
    beside = s.running if limits.hybrid else 0
    max_tokens = min(limits.max_prefill_tokens, limits.max_batch_tokens - beside)
    # ``now`` is the number of batches so far: the place in `usage` of the one being formed.
    waiting, running, now = s.waiting, s.running, s.batches
    # p times the share that runs: a request waits while some m-th completion is less than this
    # times m x away, with a prefill of x seconds.
    patience = brakes.p * running / max(1, running + waiting)
    joined = tokens = kept = k = 0

    # Where nobody would run, one may join whatever the brakes: else nothing would ever happen.
    while k < waiting and (running + joined < max_running or running + joined == 0):
        i = wait[k]
        r = requests[i]
        # It is put off, and those behind it may pass: a shorter prefill may be worth it now.
        if patience > 0 and _is_worth_waiting(patience * r.prefill, completions):
            wait[kept] = i
            kept += 1
            k += 1
            continue

        # Longer than any batch may be, it joins as the only one, and `in_parts` divides it.
        base = r.prompt - 1
        alone = limits.chunked and joined == 0 and r.prompt > limits.max_batch_tokens
        if r.prompt > max_tokens - tokens and not alone:
            break
        # Nobody passes for want of room, or a long request might never have any.
        if not fits(usage, now, base, r.output, limits):
            break

        project(usage, now, base, r.output, 1, limits)
        joining[joined] = i
        tokens += r.prompt
        joined += 1
        k += 1

    # Whoever is behind the one that ended the loop goes on waiting, in the same order.
    blocked = k < waiting and requests[wait[k]].prompt + tokens > limits.max_prefill_tokens
    while k < waiting:
        wait[kept] = wait[k]
        kept += 1
        k += 1

    s.waiting = kept
    # Too few are not worth a batch's fixed cost, so all go back until something changes, and leave
    # the projection (-1). Where the limit on prefills keeps others out, waiting brings no more.
    if joined < brakes.q + brakes.r * size and running > 0 and not blocked:
        for k in range(joined):
            r = requests[joining[k]]
            project(usage, now, r.prompt - 1, r.output, -1, limits)
            _insert(requests, wait, s, joining[k])

        joined = 0
        s.changed = False

    s.joined = joined


@njit
def _form_batch(
    requests: Any, s: Any, running: Ints, decodes: int, joining: Ints, entries: Ints
) -> Any:
    """Write the entries of a batch. Return its sums, which its time depends on.

    The first `decodes` of those that run decode, and those that join prefill their whole prompts.
    ``running`` and ``joining`` are lists of requests, and ``s`` is the loop's state.
    """
    sums = EMPTY
    for k in range(decodes):
        i = running[k]
        common.add_entry(entries, s, i, 1)
        sums = add_decode(sums, requests[i].cached)

    for k in range(s.joined):
        i = joining[k]
        prompt = requests[i].prompt
        common.add_entry(entries, s, i, prompt)
        sums = add_prefill(sums, prompt, 0)  # 0: nothing of it is cached

    return sums


@njit
def _stand_still(requests: Any, s: Any, running: Ints, usage: Ints, limits: Limits) -> None:
    """Delay the KV of running requests by a batch, since they are not in the one being formed.

    Each leaves the projection (-1), and comes back a batch later (1).
    """
    for k in range(s.running):
        r = requests[running[k]]
        base, steps = r.prompt + r.produced - 1, r.output - r.produced
        project(usage, s.batches, base, steps, -1, limits)
        # In the batch that it misses it holds what it held before.
        usage[s.batches + 1] += kv_of(base, limits)
        project(usage, s.batches + 1, base, steps, 1, limits)


@njit
def _produce(requests: Any, s: Any, members: Ints, count: int, running: Ints, kept: int) -> int:
    """Let the first `count` members of a batch produce a token. Return how many run then.

    Those that go on are written to `running` from place `kept` on. It may be `members` itself: no
    place is written before it was read.
    """
    for k in range(count):
        i = members[k]
        r = requests[i]
        advance(r, 1 if r.decoding else r.prompt)

        if r.produced == r.output:
            r.finish = s.now
            s.total += s.now
            s.done += 1
            s.changed = True
        else:
            running[kept] = i
            kept += 1

    return kept


@njit
def _serve(
    requests: Any,
    by_arrival: Ints,
    limits: Limits,
    cost: Floats,
    state: Any,
    columns: common.Columns,
    lists: Ints,
    usage: Ints,
) -> tuple[common.Columns, Ints]:
    """Go on with the rule until all of `by_arrival` are done, or the state's limits end it.

    `usage` is the KV after each batch if all that run go on, and `columns` gets the batches made.
    Return both: where they were too short, longer arrays have taken their places. `lists` has those
    that wait, by key, those that run, and those that join the batch being formed.
    """
    s, n = state[0], by_arrival.shape[0]
    wait, running, joining = lists
    nobody = np.empty(0)

    while s.done < n and s.arrived < s.stop and s.total <= s.enough:
        # The brakes are those of the last one that has arrived.
        brakes = requests[by_arrival[max(0, s.arrived - 1)]]
        i = common.next_arrival(requests, s, by_arrival)  # -1: nobody else has arrived by now
        while i >= 0:
            brakes = requests[i]
            place = _insert(requests, wait, s, i)
            # Admission is tried again only if it may end in another way: one far behind in the line
            # changes nothing, unless those before it may be put off (p > 0). Far is beyond q + r n
            # for n requests in all, which is no less than `together` in the module's text.
            if place <= brakes.q + brakes.r * requests.shape[0] or brakes.p > 0:
                s.changed = True

            i = common.next_arrival(requests, s, by_arrival)

        if s.running == 0 and s.waiting == 0:
            common.idle(requests, s, by_arrival, np.inf)
            continue

        # A run that begins now has its last KV at place `batches` + `longest` of `usage`, so one
        # place more is needed. The second one is spare.
        usage = common.lengthen(usage, s.batches + s.longest + 2)
        s.joined = 0
        # Where nothing has changed since nobody was admitted, nobody would be now.
        if s.waiting > 0 and (s.changed or s.running == 0):
            completions = nobody
            if brakes.p > 0:  # else nobody asks for them
                completions = _next_completions(requests, s, running, cost)

            _admit(requests, s, wait, joining, usage, limits, brakes, completions)
            # Nobody runs and nobody can: a prompt is beyond a limit.
            if s.joined == 0 and s.running == 0:
                break

        # Without hybrid batching, a batch of prefills lets those that run stand still. Below, 0 is
        # for evictions, of which the rule has none.
        decodes = s.running if limits.hybrid or s.joined == 0 else 0
        if common.lacks_room(columns, s, decodes + s.joined, 0):
            columns = common.with_room(columns, s, decodes + s.joined, 0)

        sums = _form_batch(requests, s, running, decodes, joining, columns.entries)
        s.now += batch_time(cost, sums)
        if decodes == 0:
            _stand_still(requests, s, running, usage, limits)

        columns.batches[s.batches].entries = s.entries
        s.batches += 1
        # Those that decode come first in `running`, and those that joined behind them.
        kept = s.running if decodes == 0 else _produce(requests, s, running, decodes, running, 0)
        s.running = _produce(requests, s, joining, s.joined, running, kept)

    return columns, usage
