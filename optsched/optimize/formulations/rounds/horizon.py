"""How far in time an exact model of the round model has to reach, with proofs.

The module also has a quick feasible schedule. Its value is the upper bound that the windows of
start times need.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from optsched.bounds.blocks import blocks_of
from optsched.bounds.checker.requests import srpt_completions
from optsched.bounds.timeline import Ints
from optsched.optimize.formulations.base import check_prompts
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, from_starts

# The most requests for which `start_windows` computes a volume bound without each one of them.
_SRPT_LIMIT = 300
MAX_ROUNDS = 1 << 27
"""The max length of an array of rounds (8 bytes each)."""


@dataclass(frozen=True, eq=False)
class RoundData:
    """An instance in rounds as exact models need it, without the long gaps between arrivals.

    A start of the model plus `shift` (shape (n,)) is a start of the instance. A request's `block`
    has ended by its `deadline` in every optimal schedule. `first_kv` tokens are held while the
    first token is produced, and one more in each later round.
    """

    instance: Instance
    arrival: Ints
    shift: Ints
    block: Ints
    deadline: Ints
    first_kv: Ints

    @property
    def prompt(self) -> Ints:
        """Prompt tokens s_i, shape (n,)."""
        return self.instance.prompt_tokens

    @property
    def output(self) -> Ints:
        """Output tokens o_i, shape (n,)."""
        return self.instance.output_tokens

    @property
    def hybrid_off(self) -> bool:
        """Whether no round may hold both a prefill and a decode."""
        return self.instance.hybrid_batching is False

    @property
    def end(self) -> int:
        """Round by which every optimal schedule has ended."""
        return int(self.deadline.max())

    def tel(self, starts: Ints) -> int:
        """Return the total end-to-end latency of starts in the model's time, in rounds."""
        return int((starts + self.output - self.arrival).sum())

    def schedule(self, starts: Ints) -> Schedule:
        """Return the schedule of the instance whose starts are these in the model's time."""
        return from_starts(starts + self.shift, self.instance)


def round_data(instance: Instance) -> RoundData:
    """Return what exact models read, after checking that they can model the instance.

    The gaps between the blocks of `optsched.bounds.blocks` are cut out of time.
    docs/formulations.md, "How far to look", proves that every optimal schedule has finished a block
    before the next begins. A schedule that has costs the same with the gaps and without them, and
    is feasible with them if it is without.
    """
    if not instance.in_rounds:
        raise UsageError(
            "formulation: found hindsight for an instance in seconds; expected infermax, or an "
            "instance in rounds (`optsched import --rounds SECONDS` makes one)"
        )

    expected = "at least the largest prompt, as hindsight processes a prompt in one round"
    check_prompts(instance, f"; expected {expected}")
    blocks = blocks_of(instance)
    return RoundData(
        instance=instance,
        arrival=instance.release_times - blocks.shift,
        shift=blocks.shift,
        block=blocks.of,
        deadline=blocks.end[blocks.of],
        first_kv=instance.prompt_tokens + instance.kv_offset,
    )


def search_data(instance: Instance) -> RoundData:
    """Return what the search reads, after checking that it ignores nothing of the instance.

    Its compiled loops let a run hold one more token in each round, and know the capacity alone.
    """
    if not instance.kv_by_token:
        raise UsageError("search: found kv_block_tokens or a kv_window; expected neither")
    if instance.limits.as_dict() or instance.hybrid_batching is False:
        raise UsageError(
            "search: found limits on batches; expected none (the method placement takes them)"
        )

    data = round_data(instance)
    _check_rounds(data)  # it refuses too long a time axis
    return data


def _check_rounds(data: RoundData) -> int:
    """Return the length of an array of rounds in which a last request may yet be placed.

    A start is at most `RoundData.end`, so its rounds end by that plus the largest output. There is
    a place for round 0, too, and one to spare.
    """
    rounds = data.end + int(data.output.max()) + 2
    if rounds > MAX_ROUNDS:
        raise UsageError(
            f"formulation: found a time axis of up to {rounds:.2g} rounds in hindsight; expected "
            f"at most {MAX_ROUNDS:.2g} (fewer requests or smaller outputs)"
        )

    return rounds


def serial_schedule(instance: Instance) -> Schedule:
    """Return a feasible schedule: `serial_starts` of an instance."""
    data = round_data(instance)
    return data.schedule(serial_starts(data))


def serial_starts(data: RoundData) -> Ints:
    """Return starts in the model's time: each request in turn at its earliest feasible one.

    It is the best of the orders by arrival, output and KV volume. It is feasible under all limits,
    since a request alone on the machine breaks none that `round_data` accepts.
    """
    index, arrival = np.arange(data.instance.n), data.arrival
    keys = (arrival,), (arrival, data.output), (arrival, data.instance.volume)
    return min((place(data, np.lexsort((index, *key))) for key in keys), key=data.tel)


def place(data: RoundData, order: ArrayLike) -> Ints:
    """Start each request at its earliest feasible start, block by block in the given order.

    ``order`` has the requests' indices. Each starts at the end of those placed before it at the
    latest, so blocks keep deadlines.
    """
    from optsched.optimize.search.placement import place_in_order

    end = _check_rounds(data)
    starts = np.empty(data.instance.n, dtype=np.int64)
    order = np.asarray(order)
    grouped = order[np.argsort(data.block[order], kind="stable")]

    if not (data.instance.limits.as_dict() or data.hybrid_off):
        # A copy, as the search has one: for a read-only array the loop would be compiled again.
        output = data.output.copy()
        # The loop counts a run's tokens from 1, on top of what is held before the first one. It has
        # a row of rounds for each worker, of which there is one, and fills in who runs where.
        columns = data.arrival, output, data.first_kv - 1, data.instance.kv_capacity
        use = np.zeros((1, end), dtype=np.int64)
        place_in_order(grouped, *columns, use, starts, np.zeros_like(starts))
        return starts

    # Under limits, by the readable machine.
    machine = Machine(data, end)
    for i in grouped.tolist():
        starts[i] = machine.earliest(i, int(data.arrival[i]))
        machine.add(i, int(starts[i]))

    return starts


class Machine:
    """What the placed requests use in every round; it finds earliest starts under limits.

    By round: the KV tokens, the running requests, the prompt tokens processed (`prefill`), and how
    many requests prefill (`prefills`).
    """

    def __init__(self, data: RoundData, end: int) -> None:
        self.data = data
        self.kv, self.running, self.prefill, self.prefills = np.zeros((4, end), dtype=np.int64)

    def add(self, i: int, start: int) -> None:
        """Let request i run from a start on."""
        data = self.data
        rounds = slice(start + 1, start + 1 + int(data.output[i]))
        self.kv[rounds] += data.first_kv[i] + np.arange(data.output[i])
        self.running[rounds] += 1
        self.prefill[start + 1] += data.prompt[i]
        self.prefills[start + 1] += 1

    def earliest(self, i: int, start: int) -> int:
        """Return the first feasible start from ``start`` on.

        A request holds first_kv tokens in its first round, and one more in each later one. So in a
        round t with ``free`` tokens it may be in one of its first f = free - first_kv + 1 rounds.
        If it does not fit in t, it is in a later one, so it must start at t - max(f, 0) or later.
        The search goes on from the largest of these starts, since no earlier one is feasible.
        """
        output, first_kv = int(self.data.output[i]), int(self.data.first_kv[i])
        own_kv = first_kv + np.arange(output)
        while True:
            others_kv = self.kv[start + 1 : start + 1 + output]
            misfits = np.flatnonzero(others_kv + own_kv > self.data.instance.kv_capacity)
            later = start

            if misfits.size:
                fitting_rounds = self.data.instance.kv_capacity - others_kv[misfits] - first_kv + 1
                later = int((start + 1 + misfits - np.maximum(fitting_rounds, 0)).max())

            later = max(later, self._past_limits(i, start, output))
            if later <= start:
                return start

            start = later

    def _past_limits(self, i: int, start: int, output: int) -> int:
        """Return a start before which the instance's limits allow none from ``start`` on.

        It is ``start`` if they allow this one. Round ``start + 1 + k`` is the k-th of the run, from
        0 on.
        """
        limits = self.data.instance.limits
        rounds = slice(start + 1, start + 1 + output)
        running, prefill, prefills = (
            use[rounds] for use in (self.running, self.prefill, self.prefills)
        )
        decodes = running - prefills
        own_tokens = np.ones(output, dtype=np.int64)
        own_tokens[0] = self.data.prompt[i]

        # Place k is the k-th round of the run; its first one prefills.
        blocked = running + 1 > (limits.max_running or np.inf)
        blocked |= prefill + decodes + own_tokens > (limits.max_batch_tokens or np.inf)
        blocked[0] |= prefill[0] + own_tokens[0] > (limits.max_prefill_tokens or np.inf)
        if self.data.hybrid_off:
            blocked[0] |= decodes[0] > 0
            # Others' prefills in its round k + 1 forbid a decode there, but not a prefill: its own
            # first round may be that one, so the round to get past is the one before.
            blocked[:-1] |= prefills[1:] > 0

        # A run that begins after the last blocked round has this round's number as its start.
        return start + 1 + int(np.flatnonzero(blocked)[-1]) if blocked.any() else start


def without_idle(data: RoundData, starts: Ints) -> Ints:
    """Return the starts without the idle rounds after the last arrival; whole rounds move.

    Up to the last arrival a machine may have to be idle, so these rounds stay.
    """
    moved = starts.copy()
    # In order of starts: each moves by the idle rounds removed before it.
    busy_until, removed = int(data.arrival.max()), 0
    for i in np.argsort(starts, kind="stable").tolist():
        removed += max(int(starts[i]) - removed - busy_until, 0)
        moved[i] = starts[i] - removed
        busy_until = max(busy_until, int(moved[i] + data.output[i]))

    return moved


def volume_bound(data: RoundData, *, leave_out: int | None = None) -> int:
    """Return a lower bound on the total latency of the requests, or of all but one, in rounds.

    It is the larger one of the sum of outputs and of the volume bound
    (`optsched.bounds.volume.srpt`), in integers, with time in units of 1/M rounds. ``leave_out`` is
    a request, or None for all.
    """
    # On one machine that works off a unit of volume per unit of time, shortest remaining volume
    # first has the least total latency. The result is rounded up to whole rounds.
    capacity = data.instance.kv_capacity
    others = np.flatnonzero(np.arange(data.instance.n) != leave_out)
    release = [a * capacity for a in data.arrival[others].tolist()]
    volume = data.instance.volume[others].tolist()
    total = sum(srpt_completions(release, volume)) - sum(release)
    return max(int(data.output[others].sum()), -(-total // capacity))


def start_windows(data: RoundData, upper_bound: int | None = None) -> Ints:
    """Return the last start of each request that an optimal schedule can need.

    Every schedule of min total latency starts request i at or before min(F_i, U_i), as
    docs/formulations.md, "How far to look", proves:

    - F_i = D_i - o_i, where D_i is the deadline of the block of i, max_j a_j + sum_j o_j over the
      requests j of the block (`round_data`).
    - U_i = a_i - o_i + UB - LB_i. UB is the total latency of some feasible schedule, and LB_i a
      lower bound on that of the other requests: `volume_bound`, or for more than 300 requests the
      sum of the others' outputs, which takes O(n).

    Symmetry breaking that permutes equal requests keeps every window, since it changes neither
    totals nor idle rounds.
    """
    last = data.deadline - data.output
    if upper_bound is not None:
        if data.instance.n <= _SRPT_LIMIT:
            others = np.array([volume_bound(data, leave_out=i) for i in range(data.instance.n)])
        else:
            others = data.output.sum() - data.output

        last = np.minimum(last, data.arrival - data.output + upper_bound - others)

    return np.asarray(np.maximum(last, data.arrival), dtype=np.int64)
