"""Predictions of the output tokens that a request has left, renewed while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.problem.columns import (
    INT64_MAX,
    MAX_TOKENS,
    first_of,
    plain_numbers,
    real_column,
    whole_column,
    whole_number,
)
from optsched.problem.errors import InputError


@dataclass(frozen=True, eq=False)
class Forecast:
    """Predicted output tokens left of every request, renewed every few tokens.

    ``remaining[offsets[i] + k]`` is the prediction for request i once it has produced
    ``every * k`` tokens; k = 0 is before it starts. A policy sees that entry from then on, and
    `tokens_left` takes off the tokens produced since. A request of o output tokens needs
    ceil(o / every) entries. More entries are allowed and never read, so that their number need
    not reveal the length.

    Parameters
    ----------
    every : int
        Tokens from one prediction of a request to the next, >= 1.
    offsets : array_like of int, shape (n + 1,)
        Rising from 0: request i has the entries ``offsets[i]:offsets[i + 1]``, one or more.
    remaining : array_like of float, shape (offsets[n],)
        Output tokens left, >= 0.
    """

    every: int
    offsets: NDArray[np.int64]
    remaining: NDArray[np.float64]

    def __post_init__(self) -> None:
        put = object.__setattr__.__get__(self)  # the fields of a frozen object are set this way
        name = "requests.forecast"
        put("every", whole_number(self.every, f"{name}.every", 1, INT64_MAX))
        offsets = whole_column(self.offsets, f"{name}.offsets", 0, INT64_MAX, item="entry")
        put("offsets", offsets)

        if len(offsets) == 0 or offsets[0] != 0:
            raise InputError(
                f"{name}.offsets: found {offsets[:1].tolist()} at the beginning; expected 0"
            )

        if (i := first_of(np.diff(offsets) < 1)) is not None:
            raise InputError(
                f"{name}.offsets: request {i}: found no entry from {offsets[i]} to "
                f"{offsets[i + 1]}; expected one or more"
            )

        def item(entry: int) -> str:
            if entry >= offsets[-1]:  # behind all requests: the length is checked below
                return f"entry {entry}"

            i = int(np.searchsorted(offsets, entry, side="right")) - 1
            return f"request {i} after {self.every * (entry - int(offsets[i]))} tokens"

        put("remaining", real_column(self.remaining, f"{name}.remaining", 0, MAX_TOKENS, item=item))
        if len(self.remaining) != offsets[-1]:
            raise InputError(
                f"{name}.remaining: found {len(self.remaining)} values; expected {offsets[-1]}, "
                "where the offsets end"
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
        """Return the predicted output tokens left of a request, >= 1; see `tokens_left`.

        Parameters
        ----------
        i : int
        seen : int
            Maximum number of tokens that it has ever had produced, over all its runs.
        produced : int
            Tokens produced in the current run, <= ``seen``.
        """
        return tokens_left(self.every, self.offsets, self.remaining, i, seen, produced)

    def subset(self, index: ArrayLike) -> Forecast:
        """Return the forecast of some of the requests.

        Parameters
        ----------
        index : array_like of int or bool
            Indices of the requests, in the order wanted, or a mask of shape (n,).
        """
        pick = np.arange(self.n)[np.asarray(index)]
        lengths = np.diff(self.offsets)[pick]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # Where each new entry is in the old column: its new place, and how far its request moved.
        entries = np.arange(offsets[-1]) + np.repeat(self.offsets[pick] - offsets[:-1], lengths)

        return Forecast(self.every, offsets, self.remaining[entries])

    def check(self, output_tokens: NDArray[np.int64]) -> None:
        """Check that there is a prediction for every output token.

        Parameters
        ----------
        output_tokens : ndarray of int64, shape (n,)
            Output lengths of the requests.
        """
        if self.n != len(output_tokens):
            raise InputError(
                f"requests.forecast: found {self.n} requests; expected {len(output_tokens)}, as "
                "many as output_tokens has"
            )

        needed = (output_tokens - 1) // self.every + 1
        if (i := first_of(np.diff(self.offsets) < needed)) is not None:
            raise InputError(
                f"requests.forecast: request {i}: found {self.offsets[i + 1] - self.offsets[i]} "
                f"entries; expected {needed[i]} for {output_tokens[i]} output tokens, one for "
                f"every {self.every}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as it stands in the JSON object of an instance file."""
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
    """Return how many output tokens request ``i`` is predicted to have left.

    This is plain arithmetic on the columns of a `Forecast`, so that compiled code can use it.

    `seen`: maximum number of tokens that the request has ever had produced, over all its runs. It
    decides which prediction is the latest: a run that starts again loses none.
    """
    entry = seen // every
    # That prediction was made when `every * entry` tokens had been produced. It may have been too
    # small, but a request that runs has one token left at least.
    return max(1.0, every * entry + remaining[offsets[i] + entry] - produced)
