"""Shared prefixes: which KV blocks of an instance's requests are the same.

Each request has a prefix parent, an earlier request or none, and the number of tokens that the
two sequences of prompt and output share from their beginning. What any two requests share is the
least of these numbers along the tree between them, and 0 where none leads from one to the other.
So what i shares with an earlier q is the smaller of what i shares with its parent and what the
parent shares with q. These two columns hold any set of sequences without loss: let the parent of i
be an earlier request p with which it shares most. If p and q share fewer or more tokens than i and
p, then i shares with q the smaller of both. If they share as many, i shares at least as many with
q, and no more, since it shares most with p.

KV is shared in whole blocks of B tokens from the beginning of a sequence. Two blocks are one block,
and have one name, if they and all before them hold the same tokens, that is, if their requests
share up to the end of the block. The *owner* of a name is the first request on the way to the root
that has it.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.problem.columns import MAX_TOKENS, first_of, same_length, whole_column, whole_number
from optsched.problem.errors import InputError

Ints = NDArray[np.int64]


class Prefixes:
    """The tree of an instance's shared prefixes, in blocks.

    Parameters
    ----------
    parent, shared, sizes : ndarray of int64, shape (n,)
        Parent of each request or -1, tokens shared with it, and tokens of prompt and output.
    block : int
        B: tokens of a block.
    """

    def __init__(self, parent: Ints, shared: Ints, sizes: Ints, block: int) -> None:
        self.parent, self.block = parent, block
        self.first: Ints = np.where(parent < 0, 0, shared // block)
        """Number of blocks that each request shares with its parent, shape (n,)."""
        self.blocks: Ints = sizes // block
        """Number of whole blocks of each request's sequence, shape (n,)."""

    @cached_property
    def public(self) -> Ints:
        """Number of blocks of each request that some other request has too, shape (n,).

        The way to any other request begins at the parent or at a child, so with none it shares more
        than with one of these.
        """
        public = self.first.copy()
        child = np.flatnonzero(self.parent >= 0)
        np.maximum.at(public, self.parent[child], self.first[child])
        return public

    @cached_property
    def above(self) -> Ints:
        """Nearest ancestor of each request that owns blocks on its path, or -1; shape (n,)."""
        above, first = self.parent.tolist(), self.first.tolist()
        for i, up in enumerate(above):
            # A request's own blocks are those behind the ``first`` ones, which its parent has, too.
            # An ancestor whose own blocks begin where those of i do, or later, owns none of i's.
            # Parents come before their children, so `above` of an ancestor is known already.
            while up >= 0 and first[up] >= first[i]:
                up = above[up]

            above[i] = up

        return np.array(above, dtype=np.int64)

    @property
    def distinct_blocks(self) -> int:
        """Number of different blocks of all requests."""
        return int((self.blocks - self.first).sum())


def write_names(tree: Any, i: int, low: int, high: int, names: Ints) -> None:
    """Write the names of request i's blocks from low to high, numbers; compiled where it is used.

    Block d has the name ``place[node] + d`` of the first `node` on its way up whose blocks begin at
    or before d. `tree`: `first`, `above` and `place` of each request.
    """
    first, above, place = tree
    node = i
    for d in range(high - 1, low - 1, -1):  # down, so that the way up is gone once
        while d < first[node]:
            node = above[node]

        names[d] = place[node] + d


def check_tree(instance: Any, put: Callable[[str, Any], None]) -> None:
    """Check the fields of shared prefixes of an instance, and put them in as columns."""
    block = instance.prefix_block_tokens
    if block is not None:
        block = whole_number(block, "prefix_block_tokens", 1, MAX_TOKENS)
        put("prefix_block_tokens", block)
        if block % instance.kv_block_tokens:
            raise InputError(
                f"prefix_block_tokens: found {block}; expected a multiple of kv_block_tokens "
                f"{instance.kv_block_tokens}"
            )

    parent, shared = instance.prefix_parent, instance.prefix_tokens
    if parent is None and shared is None:
        return
    if parent is None or shared is None:
        missing = "prefix_parent" if parent is None else "prefix_tokens"
        raise InputError(f"requests.{missing}: found nothing; expected both columns of prefixes")

    n = instance.n
    if isinstance(parent, (list, tuple)):
        parent = [-1 if p is None else p for p in parent]

    # A prompt and an output of the largest lengths may be shared as a whole: 2 MAX_TOKENS.
    parent = whole_column(parent, "requests.prefix_parent", -1, n - 1)
    shared = whole_column(shared, "requests.prefix_tokens", 0, 2 * MAX_TOKENS)
    same_length(n, {"prefix_parent": parent, "prefix_tokens": shared})
    sizes = instance.prompt_tokens + instance.output_tokens
    max_shared = np.where(parent < 0, 0, np.minimum(sizes, sizes[parent]))

    if (i := first_of(parent >= np.arange(n))) is not None:
        raise InputError(
            f"requests.prefix_parent: request {i}: found {parent[i]}; expected an earlier request, "
            "or null"
        )

    if (i := first_of(shared > max_shared)) is not None:
        expected = "0, since it has no prefix_parent"
        if parent[i] >= 0:
            expected = f"at most {max_shared[i]}, the prompt and output tokens of the shorter of "
            expected += "the two"

        raise InputError(
            f"requests.prefix_tokens: request {i}: found {shared[i]}; expected {expected}"
        )

    put("prefix_parent", parent)
    put("prefix_tokens", shared)


class Shares:
    """Requests that were placed, and which of them a request shares most with.

    A place is a number that the caller gives a request. For each node of the tree, `best` has the
    max tokens that it shares with a placed request, and that one's place. Along the way from a
    request to the root, `on_way` is what the request shares with the node: it never rises. So a
    request looks at the nodes until `on_way` is no more than what it shares already. Once placed,
    it is the best of these nodes, up to one that has as good a one: the nodes above share as much
    with that.
    """

    def __init__(self, instance: Any, sizes: Ints) -> None:
        self.parent: list[int] = instance.prefix_parent.tolist()
        self.with_parent: list[int] = instance.prefix_tokens.tolist()
        self.sizes: list[int] = sizes.tolist()
        self.best: dict[int, tuple[int, int]] = {}

    def best_of(self, i: int) -> tuple[int, int]:
        """Return the max tokens that a request shares with a placed one, and its place or -1."""
        node, on_way, shared, place = i, self.sizes[i], 0, -1
        while node >= 0 and on_way > shared:
            # With the best request of a node i shares no more than what leads from i to the node.
            of_node, place_of_node = self.best.get(node, (0, -1))
            if min(of_node, on_way) > shared:
                shared, place = min(of_node, on_way), place_of_node

            on_way, node = min(on_way, self.with_parent[node]), self.parent[node]

        return shared, place

    def add(self, i: int, place: int) -> None:
        """Place a request: it is the best of the nodes above, up to one that has as good a one."""
        node, on_way = i, self.sizes[i]
        while node >= 0 and on_way > self.best.get(node, (0, -1))[0]:
            self.best[node] = on_way, place
            on_way, node = min(on_way, self.with_parent[node]), self.parent[node]


def tree_of_some(instance: Any, who: Ints) -> tuple[Ints, Ints]:
    """Return the two columns of a tree of some requests that share as much as they did.

    `who`: the requests in their new order, which need not be that of the instance.
    """
    placed = Shares(instance, instance.prompt_tokens + instance.output_tokens)
    parent, shared = np.zeros((2, len(who)), dtype=np.int64)
    for place, i in enumerate(who.tolist()):
        shared[place], parent[place] = placed.best_of(i)
        placed.add(i, place)

    return parent, shared


class Tree(NamedTuple):
    """The tree of some sequences: parent or -1, and the number of ids shared with it.

    `whole` is, of the earlier sequences that are the beginning of each, the last of the most ids,
    or -1. `nodes` is the number of different beginnings.
    """

    parent: Ints
    shared: Ints
    whole: Ints
    nodes: int


def tree_of(sequences: Iterable[Sequence[Hashable]], sizes: Sequence[int]) -> Tree:
    """Return the tree of sequences of ids, such as tokens or hashes of blocks, in their order.

    Two ids at one place are the same if all before them are. The parent is, of the earlier
    sequences that share most, the first of the largest size. It takes one step for each id.

    Parameters
    ----------
    sequences : iterable of sequences
        The ids of each request from its beginning.
    sizes : sequence of int
        Tokens of each request.
    """
    # A node is a beginning, numbered from 0, the empty one. A child is that with one id more.
    children: dict[tuple[int, Hashable], int] = {}
    longest = [-1]  # by node, the first of the largest sequences that begin so, or -1
    ends: dict[int, int] = {}  # by node, the last sequence that is this beginning and no more
    parent, shared, whole = list[int](), list[int](), list[int]()

    for i, ids in enumerate(sequences):
        # Walk down. `depth` counts the ids that some earlier sequence has at the same place.
        node, depth, path = 0, 0, [0]
        for name in ids:
            child = children.get((node, name))
            if child is None:
                child = children[node, name] = len(longest)
                longest.append(-1)
            elif depth == len(path) - 1:  # and not below a node that is new
                depth += 1

            node = child
            path.append(node)

        parent.append(longest[path[depth]])
        shared.append(depth)
        # The sequence that ends furthest down the path: this one begins with all of it.
        whole.append(next((ends[node] for node in reversed(path) if node in ends), -1))
        if len(path) > 1:  # an empty sequence is the beginning of all, and would tell nothing
            ends[path[-1]] = i

        for node in path:
            if longest[node] < 0 or sizes[longest[node]] < sizes[i]:
                longest[node] = i

    columns = [np.array(column, dtype=np.int64) for column in (parent, shared, whole)]
    return Tree(columns[0], columns[1], columns[2], len(longest) - 1)
