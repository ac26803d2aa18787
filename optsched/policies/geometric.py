"""GSA and GBA of Feng, Yang and Zhang 2026: slices of geometric length in a staggered pipeline."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left

from optsched.policies import policy
from optsched.policies.base import Batch, View
from optsched.policies.helpers import admit, decode_all, kv_after
from optsched.problem.columns import check_whole

PAPER = "Feng, Yang and Zhang 2026, abstract"


@policy("gsa", "slices of 1, 2, 4, ... tokens, from the prompt again after each", paper=PAPER)
def gsa(*, factor: int = 2, staggered: bool = True) -> Geometric:
    """Return the policy of geometric slices, which knows no output lengths.

    In phase k every unfinished request runs for up to ``factor**k`` tokens; one that needs more
    loses them and waits for phase k + 1. docs/policies/intervals.md says what is the paper's and
    what ours. Not `staggered`, requests start as soon as the KV of all that run fits at the end of
    each slice.
    """
    return Geometric(factor, staggered, by_length=False)


@policy(
    "gba",
    "classes of geometric output length, the shortest first, each in a staggered pipeline",
    clairvoyant=True,
    paper=PAPER,
)
def gba(*, factor: int = 2, staggered: bool = True) -> Geometric:
    """Return the policy of geometric batches, the counterpart of `gsa` that knows lengths.

    Phase k serves the requests of predicted outputs in (``factor**(k - 1)``, ``factor**k``], in a
    pipeline of slices of ``factor**k`` tokens, as `gsa` does.
    """
    return Geometric(factor, staggered, by_length=True)


class Geometric:
    """The policy object of `gsa` and `gba`, which starts requests at phase 0 or `by_length`.

    A pipeline of K requests with slices of T tokens starts its j-th request, counted from 0, at
    the T j / K-th batch of the phase, rounded down. At any time the m-th youngest of those that
    run has then produced at most T m / K tokens, rounded up: of w batches in a row, those that
    start requests number at least w K / T, rounded down. K is the number of requests for which
    the sum over m fits into KV with the mean prompt of the phase, found by bisection. With equal
    prompts the pipeline therefore never overflows. With unequal ones a request also waits until
    the KV of all that run fits at the end of each slice.
    """

    evict_mode = "restart"
    hybrid = True

    def __init__(self, factor: int, staggered: bool, by_length: bool) -> None:
        check_whole(factor, "factor", 2)
        self.factor, self.staggered, self.by_length = factor, staggered, by_length
        self.clairvoyant = by_length
        self._phase: dict[int, int] = {}  # of each request that has arrived
        self._now = -1  # the phase that goes on
        self._width = 1  # K of that phase
        self._batch = 0  # batches of that phase so far
        self._starts = 0  # requests that it should have started before the next one

    def batch(self, view: View) -> Batch:
        """See `Policy.batch`.

        Requests at the end of their slices leave for the next phase. Then the latest leave until
        all decodes fit, a new phase begins if nothing runs, and requests of the phase are admitted.
        """
        for i in view.waiting:
            if i not in self._phase:
                length = math.ceil(view.remaining[i]) if self.by_length else 1
                self._phase[i] = self._phase_of(length)

        at_end = [i for i in view.running if view.generated[i] >= self._slice(self._phase[i])]
        for i in at_end:
            self._phase[i] += 1

        # `last`: also requests with one prompt token left, whose KV came from another machine.
        # `staying`: the tokens of those that go on, by request.
        staying = {i: c for i, c in decode_all(view, last=True).items() if i not in at_end}
        evicted, running = at_end.copy(), [i for i in view.running if i not in at_end]
        while kv_after(view, staying, evicted) > view.kv_capacity:
            evicted.append(running.pop())
            staying.pop(evicted[-1], None)

        line = sorted(view.waiting, key=lambda i: (self._phase[i], view.arrival[i], i))
        # A phase begins when nothing runs, in a batch that evicts nobody either: these would not
        # be in line yet, from which the width follows.
        if not running and line and not evicted and self._phase[line[0]] != self._now:
            self._begin_phase(view, line)

        line = [i for i in line if self._phase[i] == self._now]
        tokens = self._admit_due(view, staying, running, line, evicted)
        self._batch += bool(tokens)  # a batch that only evicts takes no time
        return Batch(tokens, evicted)

    def _slice(self, phase: int) -> int:
        return self.factor**phase

    def _phase_of(self, length: int) -> int:
        """Return the first phase whose slice is not shorter than a length."""
        return next(phase for phase in itertools.count() if self._slice(phase) >= length)

    def _begin_phase(self, view: View, line: list[int]) -> None:
        """Begin the phase of the first in line, and find its K, the width of the pipeline."""
        self._now, self._batch, self._starts = self._phase[line[0]], 0, 0
        prompts = [int(view.prompt_tokens[i]) for i in line if self._phase[i] == self._now]
        length, mean = self._slice(self._now), -(-sum(prompts) // len(prompts))
        # One request always runs. KV grows with the width, so `bisect_left` counts how many of the
        # widths 2, 3, ... fit: its key is 1, which it looks for, where a width does not.
        widths = range(2, view.kv_capacity // view.kv_of(mean) + 1)
        self._width = 1 + bisect_left(
            widths, 1, key=lambda width: _held(view, mean, length, width) > view.kv_capacity
        )

    def _admit_due(
        self,
        view: View,
        tokens: dict[int, int],
        running: list[int],
        line: list[int],
        evicted: list[int],
    ) -> dict[int, int]:
        """Return the batch with the requests of a phase that are due to start, as far as they fit.

        The first that is not due or does not fit ends the admissions. In batch b of the phase,
        from 0, the j-th start is due if j T < (b + 1) K, with slices of T tokens and a width of K.
        `tokens`: the batch so far. `line`: who may start, in order.
        """
        length = self._slice(self._now)
        # If nothing runs, since outputs were short, the next start need not wait: skip batches.
        if not running:
            self._batch = max(self._batch, self._starts * length // self._width)

        # Starts of earlier batches for which nobody was there, or fitted, are over (T, b and K of
        # the text above are `length`, `_batch` and `_width`).
        self._starts = max(self._starts, self._batch * self._width // length)
        for i in line:
            due = self._starts * length < (self._batch + 1) * self._width
            if (self.staggered and not due) or not self._fits(view, [*running, i], length):
                break

            wider = admit(view, tokens, [i], evicted)
            if len(wider) == len(tokens):  # the batch has no room for it
                break

            tokens, running = wider, [*running, i]
            self._starts += 1

        return tokens

    def _fits(self, view: View, requests: list[int], length: int) -> bool:
        """Return whether KV suffices until the end of each request's slice.

        Together the requests hold most in a batch that ends a slice, `ahead` batches from now. A
        single request always fits: what it holds counts at most as the capacity.
        """
        produced = {i: int(view.generated[i]) if view.decoding[i] else 0 for i in requests}
        prompt = {i: int(view.prompt_tokens[i]) for i in requests}
        return len(requests) == 1 or all(
            sum(
                min(view.kv_of(prompt[i] + produced[i] + ahead - 1), view.kv_capacity)
                for i in requests
                if length - produced[i] >= ahead
            )
            <= view.kv_capacity
            for ahead in {length - tokens for tokens in produced.values()}
        )


def _held(view: View, prompt: int, length: int, width: int) -> int:
    """Return the KV of K requests, the m-th of which has produced ceil(length m / K) tokens.

    K is `width`. The KV is the sum over m = 1 .. K of B ceil((a + ceil(length m / K)) / B) with
    blocks of B tokens and a = prompt - 1 + offset. The inner rounding changes nothing, since a is
    an integer, so each term is B floor((length m + (a + B) K - 1) / (B K)).
    """
    block = view.kv_block_tokens
    before = prompt - 1 + view.kv_offset
    first = length + (before + block) * width - 1  # the term of m = 1
    return block * _sum_of_floors(width, length, first, block * width)


def _sum_of_floors(count: int, step: int, first: int, divisor: int) -> int:
    """Return the sum over i = 0 .. count - 1 of (first + step i) // divisor, for integers >= 0.

    The number of its turns is that of Euclid's algorithm: whole multiples of the divisor are
    summed directly. What is left counts lattice points below a line, and is the same count with
    the axes exchanged.
    """
    total, sign = 0, 1
    while count > 0:
        total += sign * (step // divisor * (count * (count - 1) // 2) + first // divisor * count)
        step, first = step % divisor, first % divisor
        highest = (step * (count - 1) + first) // divisor
        # Points (i, j), 1 <= j <= highest, j <= (first + step i) / divisor: for each j all i but
        # the first ceil((j divisor - first) / step) of them. With j - 1 in place of j and ceilings
        # written as floors, these are a sum of the same form, which the next turn takes off.
        if highest == 0:
            break

        total += sign * count * highest
        sign = -sign
        count, step, first, divisor = highest, divisor, divisor - first + step - 1, step

    return total
