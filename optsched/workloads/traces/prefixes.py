"""The prefixes that a trace's requests share, from the ids of blocks or tokens that it has."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.prefixes import tree_of
from optsched.workloads.traces.base import Block

OUTPUTS = ("none", "granted")
"""What of earlier outputs a prompt may repeat where a trace has ids of prompts alone."""


def prefix_columns(kept: Block, tokens: int, outputs: str, slack: bool) -> dict[str, Any]:
    """Return the columns of shared prefixes of a trace's requests, in their order.

    An id stands for a whole block of so many ``tokens``; a last, partial one is left out. With
    ``granted`` outputs, a request whose ids begin with all whole blocks of an earlier prompt goes
    on behind it, and shares its output as far as its own prompt goes. Where the trace names the
    request that each follows, only that one's. With ``slack`` two requests share all tokens but one
    of the first block in which they differ, as far as both go: all that ids of blocks may hide.
    """
    ids, prompt = kept.ids, kept.prompt_tokens
    assert ids is not None
    whole, end = prompt // tokens, prompt.copy()
    if tokens == 1:  # ids of tokens, and then those of the output may be there
        end = np.maximum(end, [len(one) for one in ids])
        whole = end = np.minimum(end, prompt + kept.output_tokens)

    sequences = [tuple(one[:k]) for one, k in zip(ids, whole.tolist(), strict=True)]
    ends = end + kept.output_tokens if outputs == "granted" and tokens > 1 else end
    tree = tree_of(sequences, ends.tolist())
    parent, above = tree.parent.copy(), np.maximum(tree.parent, 0)
    shared = tree.shared * tokens

    if slack:
        shared = np.minimum(shared + tokens - 1, np.minimum(end, ends[above]))
    if outputs == "granted" and tokens > 1:
        follows = tree.whole if kept.follows is None else _named(kept, sequences)
        granted = np.where(follows < 0, 0, np.minimum(ends[np.maximum(follows, 0)], prompt))
        parent = np.where(granted > shared, follows, parent)
        shared = np.maximum(shared, granted)

    shared = np.where(parent < 0, 0, shared)
    return {"prefix_parent": np.where(shared > 0, parent, -1), "prefix_tokens": shared}


def _named(kept: Block, sequences: list[tuple[Any, ...]]) -> NDArray[np.int64]:
    """Return the earlier request that each follows by name, if its ids begin with all of that's."""
    assert kept.follows is not None
    place: dict[Any, int] = {}
    found = np.full(len(sequences), -1)
    for i, (own, other) in enumerate(kept.follows):
        q = place.get(other, -1)
        if q >= 0 and sequences[i][: len(sequences[q])] == sequences[q]:
            found[i] = q

        place[own] = i

    return found
