"""What each request pays of prefills that are shared: charges, which the bounds call, too.

docs/formulations.md, "Charges of shared prefixes", has the proof. A block of KV is a *name*. Its
*users* have it in their prompts, and its *makers* in what they decode. The first batches in which
a name is filled do its work once, before any of its users has its first token, and no earlier than
the first user's arrival. So each name's work is paid in equal parts by its users within D of
the first one, and a request's release is the earliest arrival behind anything that it pays.

- What is behind the last block that a request may claim it computes itself, and pays whole.
  Where a prompt ends with a block it thus pays for it, and nobody else does. Several may compute
  that block in one batch, which then holds it once.
- For a name that has a maker nobody pays.
- *Alone*, a request takes the time of all names whose users arrive when it does or later.
- Only it can hold the tokens behind all that it shares with others; these are *private*.

*Sessions.* Where requests are released when others end, ``arrival`` has their earliest releases,
which are known only when it is known what requests take alone. So that goes by precedence: alone, a
request takes the time of all names whose other users come after it. Requests of one line follow one
another (`Sessions.line`), so no batch has KV of two of them, and a name that only one line has is
private to each of its requests.

Names are not listed. Paths of blocks end, part or meet a prompt's end at few depths, so a node
stands for all blocks of one owner between two of those.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from optsched.bounds.checker.fields import PREFIX_FIELDS, further_fields

FINE = 1 << 20
"""Tokens and squares that are paid are multiples of 1 / FINE."""


class Charge(NamedTuple):
    """What one request pays.

    ``release`` is the request at whose arrival it is released, and ``lag`` the time from then to
    its own arrival. It pays the own work of ``tokens`` and of ``squares``, the sum of y^2 - x^2
    over stretches from token x to y of the prompt, both times FINE; alone it takes that of
    ``alone_tokens`` and ``alone_squares``. Of ``tokens``, ``distinct`` ones are no other's in the
    KV of any batch that computes them. ``private`` tokens of its prompt's KV are of no other,
    or it is -1 if it shares tokens that it decodes.
    """

    release: int
    lag: int
    tokens: int
    squares: int
    distinct: int
    alone_tokens: int
    alone_squares: int
    private: int


class _Tree:
    """The nodes of an instance's names. Node v has the blocks from ``low[v]`` to ``high[v]``.

    Request i shares its first ``first[i]`` blocks with its parent, and owns those from there on.
    ``depths`` has by request the numbers of blocks at which a node has to end. ``up[v]`` is the
    node before v on the way from the first block, or -1. A node comes after the one above it.
    """

    def __init__(self, parent: list[int], first: list[int], depths: list[set[int]]) -> None:
        # The next ancestor that owns some of the blocks that a request shares. Parents come first.
        self.first, self.owner_above = first, parent.copy()
        for i, ancestor in enumerate(parent):
            while ancestor >= 0 and first[ancestor] >= first[i]:
                ancestor = self.owner_above[ancestor]

            self.owner_above[i] = ancestor

        ends: list[set[int]] = [set() for _ in parent]  # by owner, where its nodes end
        for i, depths_of_request in enumerate(depths):
            for depth in depths_of_request - {0}:
                ends[self._owner(i, depth)].add(depth)

        self.number: dict[tuple[int, int], int] = {}  # by owner and end
        self.up, self.low, self.high = list[int](), list[int](), list[int]()
        for owner, ends_of_owner in enumerate(ends):
            # The node above, which ends where the owner's own blocks begin. It is there: ``first``
            # is one of a request's depths, and owners come in order.
            before = self.node_at(owner, first[owner])
            for low, high in pairwise([first[owner], *sorted(ends_of_owner)]):
                self.number[owner, high] = len(self.up)
                self.up.append(before)
                self.low.append(low)
                self.high.append(high)
                before = self.number[owner, high]

    def _owner(self, i: int, depth: int) -> int:
        """Return the request that owns the block of request i that ends at a depth."""
        while self.first[i] >= depth:
            i = self.owner_above[i]

        return i

    def node_at(self, i: int, depth: int) -> int:
        """Return the node of request i that ends at a depth, or -1 at depth 0."""
        return self.number[self._owner(i, depth), depth] if depth else -1

    def way_up(self, v: int) -> Iterator[int]:
        """Yield a node and those above it."""
        while v >= 0:
            yield v
            v = self.up[v]


class Shared:
    """What an instance's requests share, from which follows what each of them pays.

    Arrivals are in any unit of time, which need not be seconds. Who of two came first goes by the
    instance's own arrivals: rounded down to a coarse unit they may be equal, and a block would
    count as not begun at an arrival by which it was nearly done.
    """

    def __init__(self, instance: Any, arrival: list[int]) -> None:
        n, sessions = len(arrival), instance.sessions
        came = instance.release_times.tolist() if sessions is None else arrival
        block = int(instance.prefix_block_tokens or instance.kv_block_tokens)
        prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
        parent, shared = [-1] * n, [0] * n
        if instance.prefix_parent is not None and instance.prefix_tokens is not None:
            parent, shared = instance.prefix_parent.tolist(), instance.prefix_tokens.tolist()

        # By request, how many blocks it shares with its parent, its prompt fills, it may claim (its
        # last token it computes itself), and it has filled in the end (the last token has no KV).
        first = [0 if p < 0 else t // block for p, t in zip(parent, shared, strict=True)]
        whole = [s // block for s in prompt]
        claimed = [(s - 1) // block for s in prompt]
        made = [(s + o - 1) // block for s, o in zip(prompt, output, strict=True)]
        # How many of its blocks another may have, too: what it shares, or a child shares with it.
        public = first.copy()
        for i, up in enumerate(parent):
            if up >= 0:
                public[up] = max(public[up], first[i])

        tree = _Tree(parent, first, [set(x) for x in zip(first, whole, claimed, made, strict=True)])
        prompt_ends = [tree.node_at(i, depth) for i, depth in enumerate(whole)]
        output_ends = [tree.node_at(i, depth) for i, depth in enumerate(made)]

        # By node, who came first of its users, and how many make it: those who have it in the end
        # less those who have it in their prompts. Each counts at its end, then all are added up.
        # For a node that nobody uses stands n, after all others.
        earliest, makers = [(max(came) + 1, n)] * len(tree.up), [0] * len(tree.up)
        ending = set()  # nodes that end with a prompt, which pays for them alone
        for i, (prompt_end, output_end) in enumerate(zip(prompt_ends, output_ends, strict=True)):
            if prompt_end >= 0:
                earliest[prompt_end] = min(earliest[prompt_end], (came[i], i))
                makers[prompt_end] -= 1
            if output_end >= 0:
                makers[output_end] += 1
            if whole[i] > claimed[i]:  # its prompt ends with a block, which it may not claim
                ending.add(prompt_end)

        for v in range(len(tree.up) - 1, -1, -1):
            if (up := tree.up[v]) >= 0:
                earliest[up] = min(earliest[up], earliest[v])
                makers[up] += makers[v]

        self.first_users = list[int]()
        if sessions is not None:
            # By node, the user that all its other users come after, or -1.
            self.first_users = _merge_up(
                tree,
                prompt_ends,
                list(range(n)),
                lambda i, k: i if sessions.precedes(i, k) else k if sessions.precedes(k, i) else -1,
            )
            # What only requests of one line have is private to each (module's text, Sessions).
            lines = _merge_up(tree, output_ends, sessions.line, lambda i, k: i if i == k else -1)
            public = [
                max((tree.high[v] for v in tree.way_up(end) if lines[v] < 0), default=0)
                for end in output_ends
            ]

        self.arrival, self.came, self.block, self.prompt = arrival, came, block, prompt
        self.whole, self.claimed, self.public = whole, claimed, public
        self.up, self.earliest, self.makers, self.ending = tree.up, earliest, makers, ending
        self.claim_ends = [tree.node_at(i, depth) for i, depth in enumerate(claimed)]
        self.low, self.high = [x * block for x in tree.low], [x * block for x in tree.high]
        # By node, the arrival of its first user; a node without users has one after all others.
        clock = [*arrival, max(arrival) + 1]
        self.since = [clock[i] for _, i in earliest]

    def charges(self, within: int) -> list[Charge]:
        """Return what each request pays, if ``within`` is the D above."""
        payers = [0] * len(self.up)
        for i, arrival in enumerate(self.arrival):
            for v in self._claimable_since(i, arrival - within):
                payers[v] += 1

        return [self._charge(i, within, payers) for i in range(len(self.arrival))]

    def _charge(self, i: int, within: int, payers: list[int]) -> Charge:
        """Return what request i pays, within D of the first user of each name (``within``).

        ``payers`` has by node how many pay for it. Who was first goes by ``came``, which is in the
        instance's own unit (class's text), or with sessions ``arrival``. By request, ``whole`` is
        how many blocks its prompt fills, ``claimed`` how many it may claim (the last token of a
        prompt it computes itself), and ``public`` how many of its blocks another may have, too.
        """
        arrival, came, s, claimed = self.arrival[i], self.came[i], self.prompt[i], self.claimed[i]
        # Behind the last block that it may claim it pays all.
        claimable, first_users = claimed * self.block, self.first_users
        tokens, squares = FINE * (s - claimable), FINE * (s**2 - claimable**2)
        # The prompt ends with a block (whole > claimed) that another has, too (public > claimed):
        # both may compute it in one batch, so that its tokens are not distinct.
        distinct = 0 if self.whole[i] > claimed < self.public[i] else tokens
        alone, alone_squares = s - claimable, s**2 - claimable**2
        # Of itself and of the first users of what it pays the earliest, by ``came`` and number.
        release = (came, i)

        for v in self._claimable_since(i, arrival - within):
            # Output tokens make this node, too, so nobody is charged for it.
            if self.makers[v] > 0:
                continue
            low, high, earliest = self.low[v], self.high[v], self.earliest[v]
            # Alone it has to make what no request before it can have made. (``first_users`` is
            # empty without sessions.)
            nobody_before = first_users[v] == i if first_users else earliest[0] >= came
            if nobody_before:
                alone, alone_squares = alone + high - low, alone_squares + high**2 - low**2
            # Where a prompt ends, its request pays alone.
            if v not in self.ending:
                part = FINE * (high - low) // payers[v]
                tokens, distinct = tokens + part, distinct + part
                squares += FINE * (high**2 - low**2) // payers[v]
                release = min(release, earliest)

        # It shares what it decodes (-1) if its public blocks reach beyond its prompt.
        lag, private = arrival - self.arrival[release[1]], max(s - self.public[i] * self.block, -1)
        return Charge(release[1], lag, tokens, squares, distinct, alone, alone_squares, private)

    def _claimable_since(self, i: int, begin: int) -> Iterator[int]:
        """Yield the nodes that request i may claim whose first user came at ``begin`` or later."""
        v = self.claim_ends[i]
        # Nodes further up are used earlier, so from the first one before ``begin`` on all are out.
        while v >= 0 and self.since[v] >= begin:
            yield v
            v = self.up[v]


def charges_of(instance: Any, arrival: list[int], within: int) -> list[Charge] | None:
    """Return what each request pays (`Shared`); None where no KV can be shared.

    Arrivals and ``within``, the D above, are in one unit of time.
    """
    if not further_fields(instance) & PREFIX_FIELDS:
        return None

    return Shared(instance, arrival).charges(within)


def _merge_up(
    tree: _Tree, ends: list[int], value: list[int], join: Callable[[int, int], int]
) -> list[int]:
    """Return by node the values of the requests that end at it or below, joined.

    ``join`` returns -1 for two values that do not join, and then that of the node is -1. Where no
    request ends, it is the number of requests.
    """
    none = len(value)
    joined = [none] * len(tree.up)

    def add(v: int, new: int) -> None:
        """Join a value to that of a node, if there are both."""
        if v < 0 or new == none:
            return

        old = joined[v]
        if old == none:
            joined[v] = new
        else:
            joined[v] = -1 if min(old, new) < 0 else join(old, new)

    for i, v in enumerate(ends):
        add(v, value[i])
    # A node comes after the one above it, so it is complete when it is passed on.
    for v in range(len(tree.up) - 1, -1, -1):
        add(tree.up[v], joined[v])

    return joined
