"""Predictions of the output tokens that a request has left, as it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.problem.columns import (
    INT64_MAX,
    MAX_TOKENS,
    plain_numbers,
    real_column,
    whole_column,
    whole_number,
)
from optsched.problem.errors import InputError


@dataclass(frozen=True, eq=False)
class Forecast:
    """For each request, how many output tokens are left, predicted again every few tokens.

    ``remaining[offsets[i] + k]`` is what is predicted for request i once it has produced
    ``every * k`` tokens, k = 0 before it starts. A policy is shown that entry only then, and
    `tokens_left` carries it over the tokens produced since. A request of o output tokens needs
    ceil(o / every) entries; more are allowed and never read, so that their number need not tell
    the length.

    Parameters
    ----------
    every : int
        Tokens from one prediction of a request to the next, >= 1.
    offsets : array_like of int, shape (n + 1,)
        From 0, rising: request i has the entries ``offsets[i]:offsets[i + 1]``, at least one.
    remaining : array_like of float, shape (offsets[n],)
        Tokens left, >= 0.

    Raises
    ------
    InputError
        A value that cannot be; for an entry with its request and the tokens it is after.
    """

    every: int
    offsets: NDArray[np.int64]
    remaining: NDArray[np.float64]

    def __post_init__(self) -> None:
        put = object.__setattr__.__get__(self)
        name = "requests.forecast"
        put("every", whole_number(self.every, f"{name}.every", 1, INT64_MAX))
        offsets = whole_column(self.offsets, f"{name}.offsets", 0, INT64_MAX, item="entry")
        put("offsets", offsets)
        if len(offsets) == 0 or offsets[0] != 0:
            raise InputError(f"{name}.offsets: must begin with 0")
        if (np.diff(offsets) < 1).any():
            i = int(np.argmax(np.diff(offsets) < 1))
            raise InputError(
                f"{name}.offsets: request {i}: {offsets[i]} to {offsets[i + 1]} holds no entry; "
                "at least one per request is right"
            )

        def item(entry: int) -> str:
            if entry >= offsets[-1]:
                return f"entry {entry}"
            i = int(np.searchsorted(offsets, entry, side="right")) - 1
            return f"request {i} after {self.every * (entry - int(offsets[i]))} tokens"

        put("remaining", real_column(self.remaining, f"{name}.remaining", 0, MAX_TOKENS, item=item))
        if len(self.remaining) != offsets[-1]:
            raise InputError(
                f"{name}.remaining: has {len(self.remaining)} values, but offsets end at "
                f"{offsets[-1]}"
            )

    @property
    def n(self) -> int:
        """Number of requests."""
        return len(self.offsets) - 1

    @property
    def first(self) -> NDArray[np.float64]:
        """Predicted output tokens before a request starts, shape (n,)."""
        return self.remaining[self.offsets[:-1]]

    def left(self, i: int, seen: int, produced: int) -> float:
        """Return `tokens_left` of request ``i``."""
        return tokens_left(self.every, self.offsets, self.remaining, i, seen, produced)

    def subset(self, index: ArrayLike) -> Forecast:
        """Return the forecast of the requests at ``index``, in that order."""
        pick = np.arange(self.n)[np.asarray(index)]
        lengths = np.diff(self.offsets)[pick]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        entries = np.arange(offsets[-1]) + np.repeat(self.offsets[pick] - offsets[:-1], lengths)
        return Forecast(self.every, offsets, self.remaining[entries])

    def check(self, output_tokens: NDArray[np.int64]) -> None:
        """Check that every token of the outputs has its entry.

        Raises
        ------
        InputError
            Another number of requests, or one with too few entries.
        """
        if self.n != len(output_tokens):
            raise InputError(
                f"requests.forecast: has {self.n} requests, but output_tokens has "
                f"{len(output_tokens)}; columns must be of equal length"
            )
        needed = (output_tokens - 1) // self.every + 1
        short = np.diff(self.offsets) < needed
        if short.any():
            i = int(np.argmax(short))
            raise InputError(
                f"requests.forecast: request {i}: has {self.offsets[i + 1] - self.offsets[i]} "
                f"entries; its {output_tokens[i]} output tokens need {needed[i]}, one for every "
                f"{self.every}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of an instance file."""
        return {
            "every": self.every,
            "offsets": self.offsets.tolist(),
            "remaining": plain_numbers(self.remaining),
        }


def tokens_left(
    every: int,
    offsets: NDArray[np.int64],
    remaining: NDArray[np.float64],
    i: int,
    seen: int,
    produced: int,
) -> float:
    """Return how many output tokens request ``i`` is thought to have left.

    Plain arithmetic on a `Forecast`'s columns, so that compiled code uses it as it stands.

    Parameters
    ----------
    seen : int
        Most tokens that the request has ever produced: a run that starts again is told no less
        than the last one was.
    produced : int
        Tokens that it has produced now, <= ``seen``.

    Returns
    -------
    float
        The latest prediction less what was produced since it was made, and at least 1: a request
        that still runs has a token left.
    """
    entry = seen // every
    return max(1.0, every * entry + remaining[offsets[i] + entry] - produced)
