"""The prefix cache of an engine: its whole KV blocks, found by name, compiled by numba.

Names are those of `optsched.problem.prefixes`. A *copy* is a block that holds what its name says:
some requests *use* it, or it is *idle* and may be taken away. As in vLLM, equal blocks that two
requests compute are two copies, unless the cache merges them. Blocks without a name need no place
here. An engine takes an empty one before it takes an idle copy, so counting them is enough.

Idle copies stand in lines, in the order in which they were let go, those of a request from its last
block to its first. The first copy of the last line that has any is taken away first. A copy of a
name is therefore never idle in front of all copies of a deeper name: whatever begins a cached
sequence is cached, and the end of what is found can be searched by halves. Each rule of eviction
keeps to that:

- *LRU* has one line.
- *Next use* has a line for each request, in the order of their releases, in which a copy waits for
  the next one that will find it, and a last line for copies that nobody will. What a deeper block
  waits for comes no sooner than what the blocks before it wait for.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.judge import memory
from optsched.judge.life import Ints, Records, record
from optsched.judge.memory import kv_of
from optsched.judge.replay import Limits
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit
from optsched.problem.memory import check_size
from optsched.problem.prefixes import Prefixes, write_names

Smalls = NDArray[np.int32]
_names = njit(write_names, allocates=False)

STATE = (  # fields of an engine's state
    ("idle", np.int64),  # copies that nobody uses
    ("last", np.int64),  # no line behind it has a copy
    ("blank", np.int64),  # the first place for a copy that is free, or -1
    ("row", np.int64),  # the first row of the table that is free
    ("kept", np.int64),  # idle copies that are not to be taken away for an admission
    ("oldest", np.int64),  # the first of them, or the head of the line
    ("changed", np.bool_),  # what is cached, since waiting requests were sorted by it
)

COPY = record(
    ("name", np.int64),  # -1: none, since its tokens were never computed
    ("users", np.int64),
    ("twin", np.int64),  # the next copy of its name, or the next free place; -1: none
    ("before", np.int64),  # its neighbours in its line
    ("behind", np.int64),
    ("idle_at", np.float64),
)


class Cache(NamedTuple):
    """The cache of one worker.

    Names are those of `optsched.problem.prefixes.write_names`. Lines have their heads behind all
    copies. ``table[row, d]`` is the copy that a running request uses, and the free rows are linked
    by their first entries. `noted` has by name the rank of the first request that will find it and
    has not finished.
    """

    block: int
    merge: bool
    ttl: float
    tree: tuple[Ints, Ints, Ints]  # first, above and place of each request
    copies: Records
    heads: int
    lines: int
    holder: Smalls  # the oldest copy of each name, or -1
    table: Smalls
    names: Ints  # room for the names of a request
    noted: Smalls
    ranked: Ints  # requests by rank
    later: Smalls  # rank of the next user of a request's block, from ``begin`` on
    begin: Ints
    leader: Smalls  # by name, room to note who computes a block for all


Store = Cache | None  # None: nothing is cached


def caches_of(
    instance: Instance,
    requests: Records,
    state: Records,
    workers: int,
    seats: int,
    rule: tuple[str, float],
    merge: bool,
    served: tuple[int, ...] | None = None,
) -> list[Cache]:
    """Return an empty cache for each worker of an instance with prefixes, whose state begins so.

    `rule`: how copies are taken away, and the time to live. With the next use, copies are merged:
    two of one name would wait for the same request, which takes one.
    `served`: in which order requests are expected to use blocks; None: that of their releases.
    """
    prefixes: Prefixes = instance.prefixes  # type: ignore[assignment]
    eviction, ttl = rule
    n, block = instance.n, prefixes.block
    all_blocks = int(prefixes.blocks.sum())
    size = max(1, min(instance.kv_capacity // block, all_blocks))
    longest = max(1, int(prefixes.blocks.max()))
    seats, foreseen = min(n, seats), eviction == "next-use"
    needed = workers * (48 * size + 12 * prefixes.distinct_blocks + 4 * seats * longest)
    needed += 4 * all_blocks * foreseen
    check_size(needed, 1, "bytes of KV blocks", "larger prefix_block_tokens", "prefix_caching")
    place = np.cumsum(prefixes.blocks - prefixes.first) - prefixes.blocks
    lines = n + 2 if foreseen else 1
    begin = np.cumsum(prefixes.blocks) - prefixes.blocks
    ranked = np.arange(n)  # of use to next-use eviction alone, which needs all arrivals
    if foreseen:
        ranked = np.lexsort((ranked, instance.release)) if served is None else np.array(served)

    noted = np.zeros(prefixes.distinct_blocks if foreseen else 0, np.int32)
    later = np.empty(all_blocks if foreseen else 0, dtype=np.int32)
    names = np.empty(longest, dtype=np.int64)
    tree = (prefixes.first, prefixes.above, place)
    if foreseen:
        noted[:] = lines - 1
        found = (instance.prompt_tokens - 1) // block
        _foresee(tree, names, ranked, found, begin, noted, later)

    caches = []
    for _ in range(workers):
        copies = np.zeros(size + lines, dtype=COPY)
        copies["twin"][:size] = np.append(np.arange(1, size), -1)
        copies["before"][size:] = copies["behind"][size:] = np.arange(size, size + lines)
        table = np.empty((seats, longest), dtype=np.int32)
        table[:, 0] = np.arange(1, seats + 1)
        holder = np.full(prefixes.distinct_blocks, -1, dtype=np.int32)
        caches.append(
            Cache(
                block, merge or foreseen, ttl, tree, copies, size, lines, holder, table,
                names.copy(), noted.copy(), ranked, later, begin, np.empty_like(holder),
            )
        )  # fmt: skip

    requests["rank"][ranked] = np.arange(n)
    state["oldest"] = size
    return caches


@njit
def _foresee(
    tree: tuple[Ints, Ints, Ints], names: Ints, ranked: Ints,
    found: Ints, begin: Ints, noted: Smalls, later: Smalls,
) -> None:  # fmt: skip
    """Note the first user of each name, and write the next user of each request's blocks."""
    # From the last request back, so that what is noted of a name is always its next user.
    for rank in range(ranked.shape[0] - 1, -1, -1):
        i = ranked[rank]
        _names(tree, i, 0, found[i], names)
        for d in range(found[i]):
            later[begin[i] + d] = noted[names[d]]
            noted[names[d]] = rank


@njit(allocates=False)
def name_of(cache: Cache, i: int, d: int) -> int:
    """Return the name of request i's block d."""
    _names(cache.tree, i, d, d + 1, cache.names)
    return int(cache.names[d])


@njit(allocates=False)
def find(cache: Cache, i: int, most: int) -> int:
    """Return how many of request i's first blocks are cached, up to a number."""
    node, high, (first, above, places) = i, most, cache.tree
    # What is cached begins at the root, so its end lies among the blocks of one owner, the deepest
    # whose first block is cached. There it is found by halves.
    while high > 0:
        low, place = min(first[node], high), places[node]
        if low < high and cache.holder[place + low] >= 0:
            while high - low > 1:
                middle = (low + high) // 2
                if cache.holder[place + middle] >= 0:
                    low = middle
                else:
                    high = middle

            break

        high, node = low, above[node]

    if high > 0 and cache.lines > 2:  # a router may have sent who was waited for elsewhere
        _names(cache.tree, i, 0, high, cache.names)
        for d in range(high):
            if cache.holder[cache.names[d]] < 0:
                return d

    return high


@njit(allocates=False)
def extra(s: np.record, cache: Cache, i: int, blocks: int) -> int:
    """Return the KV that admitting request i takes beyond its own, if it finds so many blocks.

    It is less than 0 by the blocks that others use, and more by idle ones that are kept.
    """
    kept, used = s.kept if s.running > 0 else 0, 0
    _names(cache.tree, i, 0, blocks, cache.names)
    for d in range(blocks):
        one = cache.copies[cache.holder[cache.names[d]]]
        used += one.users > 0
        kept -= kept > 0 and one.users == 0 and one.idle_at + cache.ttl > s.now

    return (kept - used) * cache.block


@njit(allocates=False)
def seat(r: np.record, i: int, s: np.record, cache: Cache, blocks: int, limits: Limits) -> None:
    """Give request i a row of the table, and let it use the blocks that it has found."""
    row = r.row = int(s.row)
    s.row = cache.table[row, 0]
    if blocks == 0:
        return

    _names(cache.tree, i, 0, blocks, cache.names)
    r.allocated = blocks * cache.block
    s.held += kv_of(r.allocated, limits) - r.allocated
    for d in range(blocks):
        c = cache.holder[cache.names[d]]
        _use(s, cache, c)
        cache.table[row, d] = c


@njit(allocates=False)
def _fill(r: np.record, i: int, s: np.record, cache: Cache, whole: int, limits: Limits) -> None:
    """Make room for what request i has been given, and name the blocks that it fills with it."""
    # Idle copies stay as long as there are empty blocks, and go only for want of room.
    while s.held + cache.block * s.idle > limits.kv_capacity:
        _take_away(s, cache)

    full = r.allocated // cache.block
    if full == whole:
        return

    s.changed = True
    _names(cache.tree, i, whole, full, cache.names)
    for d in range(whole, full):
        name = cache.names[d]
        c = cache.holder[name]
        if c >= 0 and cache.merge:
            s.held -= cache.block
            _use(s, cache, c)
        else:
            if s.blank < 0:
                _take_away(s, cache)

            new, s.blank = s.blank, cache.copies[s.blank].twin
            one = cache.copies[new]
            one.name, one.users, one.twin = name, 1, -1
            if c < 0:
                cache.holder[name] = new
            else:
                # The oldest copy is the one that is found, so a new one stands behind all others.
                while cache.copies[c].twin >= 0:
                    c = cache.copies[c].twin

                cache.copies[c].twin = new

            c = new

        cache.table[r.row, d] = c


@njit(allocates=False)
def take(r: np.record, i: int, s: np.record, tokens: int, limits: Limits, cache: Store) -> None:
    """Allocate KV for more tokens of request i, and name the blocks that they fill."""
    before = r.allocated
    memory.take(s, r, tokens, limits)
    if cache is not None:
        _fill(r, i, s, cache, before // cache.block, limits)


@njit(allocates=False)
def free(requests: Records, i: int, s: np.record, limits: Limits, cache: Store) -> None:
    """Free the KV of request i. What is cached of it stays as long as nobody needs its room."""
    if cache is not None:
        _leave(requests, i, s, cache)

    memory.free(s, requests[i], limits)


@njit(allocates=False)
def _leave(requests: Records, i: int, s: np.record, cache: Cache) -> None:
    """Let request i use its blocks no more. What stays held is added to what its KV will free.

    Blocks that were allocated for a batch in which it then has no part lose their name.
    """
    r = requests[i]
    row, computed = int(r.row), r.cached // cache.block
    # The last block stands first in the line: no block may go before those that follow it.
    for d in range(r.allocated // cache.block - 1, -1, -1):
        c = cache.table[row, d]
        one = cache.copies[c]
        one.users -= 1
        if one.users > 0:
            s.held += cache.block
            continue
        if d >= computed:
            _forget(cache, c)

        _let_go(s, cache, c, _line(requests, i, cache, one.name, d))

    cache.table[row, 0] = s.row
    s.row, r.row, s.changed = row, -1, True


@njit(allocates=False)
def _line(requests: Records, i: int, cache: Cache, name: int, d: int) -> int:
    """Return the line in which a copy waits that request i lets go, its block d."""
    r = requests[i]
    if name < 0:
        return cache.lines - 1
    if cache.lines == 1:
        return 0

    user, done = cache.noted[name], True
    # Who was noted may have finished by now, so the note moves on to the next who has not.
    while user < cache.lines - 1 and done:
        other = requests[cache.ranked[user]]
        done = other.produced == other.output
        if done:
            user = cache.later[cache.begin[cache.ranked[user]] + d]

    cache.noted[name] = user
    # Who is evicted comes back and finds the copy, perhaps as the first.
    return int(user if r.produced == r.output else min(user, r.rank))


@njit(allocates=False)
def _use(s: np.record, cache: Cache, c: int) -> None:
    """Let one more request use a copy."""
    one = cache.copies[c]
    if one.users == 0:
        _leave_line(s, cache, c)
        s.held += cache.block

    one.users += 1


@njit(allocates=False)
def _let_go(s: np.record, cache: Cache, c: int, line: int) -> None:
    """Put a copy that nobody uses at the end of a line."""
    one, head = cache.copies[c], cache.heads + line
    one.before, one.behind = cache.copies[head].before, head
    cache.copies[one.before].behind = c
    cache.copies[head].before = c
    s.idle += 1
    s.last = max(s.last, line)
    if cache.ttl > 0:
        one.idle_at = s.now
        s.kept += 1
        if s.oldest == head:
            s.oldest = c


@njit(allocates=False)
def _leave_line(s: np.record, cache: Cache, c: int) -> None:
    """Take a copy out of its line, since somebody uses it or it is taken away."""
    one = cache.copies[c]
    cache.copies[one.before].behind = one.behind
    cache.copies[one.behind].before = one.before
    s.idle -= 1
    if cache.ttl > 0 and one.idle_at + cache.ttl > s.now:
        s.kept -= 1
        if s.oldest == c:
            s.oldest = one.behind


@njit(allocates=False)
def _take_away(s: np.record, cache: Cache) -> None:
    """Take away the idle copy whose turn it is."""
    while cache.copies[cache.heads + s.last].behind == cache.heads + s.last:
        s.last -= 1

    c = cache.copies[cache.heads + s.last].behind
    _leave_line(s, cache, c)
    _forget(cache, c)
    cache.copies[c].twin = s.blank
    s.blank = c


@njit(allocates=False)
def _forget(cache: Cache, c: int) -> None:
    """Let nobody find a copy by its name any more."""
    one = cache.copies[c]
    if one.name < 0:
        return

    other = cache.holder[one.name]
    if other == c:
        cache.holder[one.name] = one.twin
    else:
        while cache.copies[other].twin != c:
            other = cache.copies[other].twin

        cache.copies[other].twin = one.twin

    one.name = -1


@njit(allocates=False)
def expire(s: np.record, cache: Cache) -> None:
    """Keep no longer what has been idle for the time to live."""
    while s.oldest != cache.heads and cache.copies[s.oldest].idle_at + cache.ttl <= s.now:
        s.oldest = cache.copies[s.oldest].behind
        s.kept -= 1
