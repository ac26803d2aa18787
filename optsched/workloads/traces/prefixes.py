"""The prefixes that a trace's requests share, from the ids of blocks or tokens that it has."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import InputError
from optsched.problem.prefixes import tree_of
from optsched.problem.sessions import first_of_group
from optsched.workloads.traces.base import Block, Findings

OUTPUTS = ("none", "granted")
"""What of earlier outputs a prompt may repeat where a trace has ids of prompts alone."""


def check_ids(kept: Block, tokens: int, findings: Findings) -> None:
    """Refuse a trace without lists of ids, and tell the findings of ids that cannot be of blocks.

    Ids need not be there where prompts are known to go on behind earlier answers. `tokens`: how
    many tokens an id stands for.
    """
    if kept.ids is None and kept.follows is not None:
        return
    if kept.ids is None:
        raise InputError(
            f"{findings.path}: found no ids of blocks or tokens; expected them, such as hash_ids, "
            "for shared prefixes"
        )

    for line, ids in zip(kept.line.tolist(), kept.ids, strict=True):
        if not isinstance(ids, list):
            raise findings.at(
                line, f"ids: found {ids!r:.40}; expected a list, one a block or token"
            )

    if tokens == 1:  # ids of tokens come again behind any other
        return

    # One for each whole block, and perhaps one for what is left (the division that rounds up).
    counts, whole = np.array([len(ids) for ids in kept.ids]), kept.prompt_tokens // tokens
    odd = np.flatnonzero((counts < whole) | (counts > -(-kept.prompt_tokens // tokens)))
    if len(odd):
        words = f"the prompt has not as many ids as blocks of {tokens} tokens (see ids_tokens)"
        findings.odd(words, int(kept.line[odd[0]]), len(odd))

    # An id of a block stands for all tokens up to its end, so the one before it is the same always.
    before: dict[Any, Any] = {}
    for line, ids in zip(kept.line.tolist(), kept.ids, strict=True):
        if any(before.setdefault(name, up) != up for up, name in pairwise([None, *ids])):
            words = "an id stands behind another id than before, and is not shared there"
            findings.odd(words, line, 1, harmless=True)


def prefix_columns(kept: Block, tokens: int, outputs: str, slack: bool) -> dict[str, Any]:
    """Return the columns of shared prefixes of a trace's requests, in their order.

    An id stands for a whole block of so many ``tokens``; a last, partial one is left out. With
    ``granted`` outputs, a request whose ids begin with all whole blocks of an earlier prompt goes
    on behind it, and shares its output as far as its own prompt goes. Where the trace names the
    request that each follows, only that one's. With ``slack`` two requests share all tokens but one
    of the first block in which they differ, as far as both go: all that ids of blocks may hide.

    Without ids a prompt begins with the prompt and the output of the last one of its name.
    """
    ids, prompt, output = kept.ids, kept.prompt_tokens, kept.output_tokens
    if ids is None:
        earlier = _followed(kept, [()] * len(prompt))
        before = (prompt + output)[np.maximum(earlier, 0)]
        tokens_shared = np.where(earlier < 0, 0, np.minimum(before, prompt))
        return {"prefix_parent": earlier, "prefix_tokens": tokens_shared}

    # `whole` ids of each request count. They stand for its tokens up to `end`, but for those of a
    # last block that is not full.
    whole, end = prompt // tokens, prompt.copy()
    if tokens == 1:  # ids of tokens, and then those of the output may be there
        end = np.maximum(end, [len(row) for row in ids])
        whole = end = np.minimum(end, prompt + output)

    # `sizes`: how many tokens of each request a later one may share.
    sequences = [tuple(row[:k]) for row, k in zip(ids, whole.tolist(), strict=True)]
    # Ids of tokens may be there of outputs, too, so only with ids of blocks outputs are granted.
    grants_outputs = outputs == "granted" and tokens > 1
    sizes = end + output if grants_outputs else end
    tree = tree_of(sequences, sizes.tolist())
    # `above` is the parent to index by. Where there is none it is 0, and nothing is shared below.
    parent, above = tree.parent.copy(), np.maximum(tree.parent, 0)
    shared = tree.shared * tokens

    if slack:
        shared = np.minimum(shared + tokens - 1, np.minimum(end, sizes[above]))
    if grants_outputs:
        # Of each request an earlier one, all of whose ids are its own first ids, or -1.
        follows = tree.whole if kept.follows is None else _followed(kept, sequences)
        granted = np.where(follows < 0, 0, np.minimum(sizes[np.maximum(follows, 0)], prompt))
        parent, shared = _join((parent, shared), (follows, granted))

    shared = np.where(parent < 0, 0, shared)
    return {"prefix_parent": np.where(shared > 0, parent, -1), "prefix_tokens": shared}


def _join(*links: tuple[NDArray[np.int64], NDArray[np.int64]]) -> tuple[Any, Any]:
    """Return one tree of several links: each request's parent, or -1, and the tokens shared.

    Each of `links` has two columns: an earlier request, or -1, and the tokens shared with it. Links
    join groups of requests, those of most tokens first. What two groups share is the link that
    joins them, so of their first requests the earlier one becomes the parent of the later one. Any
    two requests then share the least of the links between them. A tree that has all links cannot
    have less.
    """
    pairs = list[tuple[int, int, int]]()  # shared tokens, a request and an earlier one
    for earlier, shares in links:
        for i in np.flatnonzero(earlier >= 0).tolist():
            pairs.append((int(shares[i]), i, int(earlier[i])))

    # `up` leads from each request to an earlier one of its group, and from the first to itself.
    parent = np.full(len(links[0][0]), -1)
    shared, up = np.zeros_like(parent), list(range(len(parent)))
    for share, i, q in sorted(pairs, reverse=True):
        low, high = sorted((first_of_group(up, i), first_of_group(up, q)))
        if low < high:
            parent[high] = up[high] = low
            shared[high] = share

    return parent, shared


def _followed(kept: Block, sequences: list[tuple[Any, ...]]) -> NDArray[np.int64]:
    """Return the earlier request that each follows by name, if its ids begin with all of that's.

    It is -1 where there is none. `sequences`: the ids of each that count.
    """
    assert kept.follows is not None
    last: dict[Any, int] = {}  # by name, the last request so far
    followed = np.full(len(sequences), -1)
    for i, (name, other) in enumerate(kept.follows):
        q = -1 if other is None else last.get(str(other), -1)
        if q >= 0 and sequences[i][: len(sequences[q])] == sequences[q]:
            followed[i] = q

        last[str(name)] = i

    return followed
