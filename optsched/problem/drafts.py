"""Speculative decoding: how many tokens the decode steps of requests yield.

A decode step of a request processes its newest token and up to k drafts of those that follow. It
yields one token more than the drafts that are accepted. The accepted drafts of each whole step are
a column of the instance, and cut the output into *runs*: the first token, which the prefill
yields, and then the tokens of one step after the other. A step of c tokens yields the rest of the
run at which the request is, or c tokens if that is more. So what a step yields depends on the
tokens produced alone, after evictions and steps with fewer drafts, too.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.problem.columns import first_of, same_length, whole_column
from optsched.problem.errors import InputError

MAX_DRAFTS = 1_000
"""Largest number of drafts of a step."""

Accepted = tuple[tuple[int, ...], ...]


class Drafts(NamedTuple):
    """What compiled loops know of drafts.

    `tokens`: of a whole decode step. `rest`: ``rest[first[i] + p]`` tokens are left of its run when
    request i has produced p.
    """

    tokens: int
    first: NDArray[np.int64]
    rest: NDArray[np.int64]


def check_accepted(accepted: Any, output: NDArray[np.int64], drafts: int | None) -> Accepted:
    """Return a column of accepted drafts as tuples, checked."""
    name = "requests.accepted"
    if drafts is None:
        raise InputError(f"{name}: found a column; expected it beside num_speculative_tokens")

    same_length(len(output), {"accepted": accepted})
    rows = [row if isinstance(row, Sequence) else np.asarray(row).tolist() for row in accepted]
    # All rows are checked as one column, where those of request i are offsets[i]:offsets[i + 1].
    offsets = np.cumsum([0, *map(len, rows)])

    def item(entry: int) -> str:
        i = int(np.searchsorted(offsets, entry, side="right")) - 1
        return f"request {i}, step {entry - offsets[i]}"

    flat = whole_column(list(chain.from_iterable(rows)), name, 0, drafts, item=item)
    sums = np.concatenate([[0], np.cumsum(flat + 1)])  # a step yields one token more than accepted
    yields = sums[offsets[1:]] - sums[offsets[:-1]]
    if (i := first_of(yields < output - 1)) is not None:
        raise InputError(
            f"{name}: request {i}: found steps that yield {yields[i]} tokens; expected at least "
            f"{output[i] - 1}, its output_tokens but the first"
        )

    return tuple(tuple(row) for row in np.split(flat, offsets[1:-1]))


def runs_of(
    output: NDArray[np.int64], drafts: int, accepted: Accepted | None
) -> list[NDArray[np.int64]]:
    """Return the tokens of the runs after the first token of each request.

    `drafts`: k, of a step. Without a column every draft is accepted.
    """
    runs = []
    for i, o in enumerate(output.tolist()):
        # Where runs end, in tokens after the first, whether or not the output is as long: with all
        # accepted every k + 1 tokens, up to the first that is at the end or behind it.
        if accepted is None:
            ends = np.arange(drafts + 1, o + drafts, drafts + 1)
        else:
            ends = np.cumsum(np.array(accepted[i], dtype=np.int64) + 1)

        # The last run is the first that reaches the end of the output, which cuts it off.
        count = int(np.searchsorted(ends, o - 1)) + 1 if o > 1 else 0
        runs.append(np.diff(np.minimum(ends[:count], o - 1), prepend=0))

    return runs


def drafts_of(output: NDArray[np.int64], drafts: int, accepted: Accepted | None) -> Drafts:
    """Return what compiled loops know of drafts."""
    lengths = np.concatenate(runs_of(output, drafts, accepted))
    # One entry per token but each request's first: the end of its run, less its own place.
    rest = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum())
    first = np.cumsum(output - 1) - output  # 1 less than where the output begins, since p >= 1
    return Drafts(drafts + 1, first, rest)
