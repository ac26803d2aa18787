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
    ("idle", np.int64),  # number of copies that nobody uses
    ("last_line", np.int64),  # no line behind it has a copy
    ("free_copy", np.int64),  # the first free place for a copy, or -1
    ("free_row", np.int64),  # the first free row of the table
    ("kept", np.int64),  # number of idle copies within their time to live
    ("oldest", np.int64),  # the first of them, or the head of the line
    ("changed", np.bool_),  # what is cached, since waiting requests were sorted by it
)

COPY = record(
    ("name", np.int64),  # -1: none, since its tokens were never computed
    ("users", np.int64),
    ("twin", np.int64),  # the next copy of its name; of a free place, the next one; -1: none
    ("before", np.int64),  # its neighbours in its line, a ring that is closed by the line's head
    ("behind", np.int64),
    ("idle_at", np.float64),
)


class Cache(NamedTuple):
    """The cache of one worker.

    Names are those of `optsched.problem.prefixes.write_names`. ``copies[heads + line]`` is the head
    of a line, behind all places for copies. ``table[row, d]`` is the copy that the running request
    with this row uses as its block d, and the free rows are linked by their first entries. A
    request's rank is its place in the order in which requests are expected. `noted` has by name the
    rank of the first request that will find it and has not finished, as far as has been looked.
    """

    block: int
    merge: bool
    ttl: float
    # Of each request: `first`, the number of blocks that its parent has, too; `above`, the nearest
    # ancestor with own blocks among these, or -1; `place`, to which d is added for the name of its
    # own block d.
    tree: tuple[Ints, Ints, Ints]
    copies: Records
    heads: int
    lines: int
    holder: Smalls  # the oldest copy of each name, or -1
    table: Smalls
    names: Ints  # room for the names of a request
    noted: Smalls
    ranked: Ints  # requests by rank
    later: Smalls  # ``later[first_later[i] + d]``: rank of the next user of request i's block d
    first_later: Ints
    leader: Smalls  # by name, for `vllm_v1` to note which request computes a block for all


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
    """Return an empty cache for each worker of an instance with prefixes.

    The requests' ranks and the state's first idle copy are written. `seats`: max requests that run.
    `rule`: the eviction, ``"lru"``, ``"ttl"`` (LRU with a time to live) or ``"next-use"``, and the
    time to live; 0: none. `merge`: whether equal blocks become one copy. With next use they always
    do: two of one name would wait for the same request, which takes one. `served`: the order in
    which requests are expected to use blocks; None: that of their releases.
    """
    prefixes: Prefixes = instance.prefixes  # type: ignore[assignment]
    eviction, ttl = rule
    n, block = instance.n, prefixes.block
    all_blocks = int(prefixes.blocks.sum())
    size = max(1, min(instance.kv_capacity // block, all_blocks))  # places for copies
    longest = max(1, int(prefixes.blocks.max()))
    seats, by_next_use = min(n, seats), eviction == "next-use"
    # Bytes of a copy, of holder, noted and leader, of the table, and of `later`.
    needed = workers * (48 * size + 12 * prefixes.distinct_blocks + 4 * seats * longest)
    needed += 4 * all_blocks * by_next_use
    check_size(needed, 1, "bytes of KV blocks", "larger prefix_block_tokens", "prefix_caching")
    # Each request's own blocks begin at `first` and get the next numbers: block d has place + d.
    place = np.cumsum(prefixes.blocks - prefixes.first) - prefixes.blocks
    # By next use there is a line for each rank, from 0, one that stays empty, and the last one.
    lines = n + 2 if by_next_use else 1
    first_later = np.cumsum(prefixes.blocks) - prefixes.blocks
    ranked = np.arange(n)  # only next-use eviction looks at it, and it needs to know all arrivals
    if by_next_use:
        ranked = np.lexsort((ranked, instance.release)) if served is None else np.array(served)

    noted = np.zeros(prefixes.distinct_blocks if by_next_use else 0, np.int32)
    later = np.empty(all_blocks if by_next_use else 0, dtype=np.int32)
    names = np.empty(longest, dtype=np.int64)
    tree = (prefixes.first, prefixes.above, place)
    if by_next_use:
        noted[:] = lines - 1  # the last line: nobody will find the name
        # The last prompt token is computed in any case, so a block that ends with it is not found.
        findable = (instance.prompt_tokens - 1) // block
        _note_next_users(tree, names, ranked, findable, first_later, noted, later)

    caches = []
    for _ in range(workers):
        copies = np.zeros(size + lines, dtype=COPY)
        # All places are free, and so are all rows of the table: each names the next one, and the
        # first is 0, as in a new state.
        copies["twin"][:size] = np.append(np.arange(1, size), -1)
        # Every line is empty: its head is its own neighbour.
        copies["before"][size:] = copies["behind"][size:] = np.arange(size, size + lines)
        table = np.empty((seats, longest), dtype=np.int32)
        table[:, 0] = np.arange(1, seats + 1)
        holder = np.full(prefixes.distinct_blocks, -1, dtype=np.int32)
        # The tree, `ranked`, `later` and `first_later` never change, so the workers share them. The
        # last field, `leader`, is written before it is read.
        caches.append(
            Cache(
                block, merge or by_next_use, ttl, tree, copies, size, lines, holder, table,
                names.copy(), noted.copy(), ranked, later, first_later, np.empty_like(holder),
            )
        )  # fmt: skip

    requests["rank"][ranked] = np.arange(n)
    state["oldest"] = size  # the head of the only line that has a time to live
    return caches


@njit
def _note_next_users(
    tree: tuple[Ints, Ints, Ints], names: Ints, ranked: Ints,
    findable: Ints, first_later: Ints, noted: Smalls, later: Smalls,
) -> None:  # fmt: skip
    """Note the rank of the first user of each name, and of the next user of each request's blocks.

    `findable`: how many blocks each request can find. `noted` and `later` are written.
    """
    # From the last request back, so that what is noted of a name is always its next user.
    for rank in range(ranked.shape[0] - 1, -1, -1):
        i = ranked[rank]
        _names(tree, i, 0, findable[i], names)
        for d in range(findable[i]):
            later[first_later[i] + d] = noted[names[d]]
            noted[names[d]] = rank


@njit(allocates=False)
def name_of(cache: Cache, i: int, d: int) -> int:
    """Return the name of request i's block d."""
    _names(cache.tree, i, d, d + 1, cache.names)
    return int(cache.names[d])


@njit(allocates=False)
def cached_blocks(cache: Cache, i: int, limit: int) -> int:
    """Return how many of request i's first blocks are cached, up to a limit.

    A block is cached if ``cache.holder`` has a copy of its name (-1: none). An owner's own blocks
    are those from ``first`` on, block d by the name place + d, and ``above`` owns earlier ones.
    """
    first, above, places = cache.tree
    node, high = i, limit
    # If a block is cached, so are those before it (see the module's text). The last one belongs to
    # the deepest owner on the path whose first block is cached. Walk up to that owner, and halve
    # there: block `low` is cached, block `high` is not.
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

    # With next use on several workers this fails: the request that a copy waits for may be sent to
    # another worker. So count block by block. LRU has one line.
    if high > 0 and cache.lines > 2:
        _names(cache.tree, i, 0, high, cache.names)
        for d in range(high):
            if cache.holder[cache.names[d]] < 0:
                return d

    return high


@njit(allocates=False)
def kv_correction(s: np.record, cache: Cache, i: int, blocks: int) -> int:
    """Return what to add to request i's own KV for its admission, if it finds so many blocks.

    Blocks that others use need no room. Idle copies within their time to live are not taken away
    for an admission, so they take room, but for those that the request itself finds. If nothing
    runs, they may go: else nobody might ever be admitted.
    """
    # Numbers of blocks: those kept but not found by the request, and those that others use.
    kept, used = s.kept if s.running > 0 else 0, 0
    _names(cache.tree, i, 0, blocks, cache.names)
    for d in range(blocks):
        copy = cache.copies[cache.holder[cache.names[d]]]
        used += copy.users > 0
        # Idle, and within its time to live. Where nothing runs, `kept` is 0 and stays so.
        kept -= kept > 0 and copy.users == 0 and copy.idle_at + cache.ttl > s.now

    return (kept - used) * cache.block


@njit(allocates=False)
def seat(r: np.record, i: int, s: np.record, cache: Cache, blocks: int, limits: Limits) -> None:
    """Give request i a row of the table, and let it use the first blocks, which it has found."""
    row = r.row = int(s.free_row)
    s.free_row = cache.table[row, 0]  # free rows are linked by their first entries
    if blocks == 0:
        return

    _names(cache.tree, i, 0, blocks, cache.names)
    r.allocated = blocks * cache.block
    # The blocks themselves are counted when a copy gets its first user, so only an offset is new.
    s.held += kv_of(r.allocated, limits) - r.allocated
    for d in range(blocks):
        c = cache.holder[cache.names[d]]
        _use_copy(s, cache, c)
        cache.table[row, d] = c


@njit(allocates=False)
def _store_blocks(
    r: np.record, i: int, s: np.record, cache: Cache, named: int, limits: Limits
) -> None:
    """Name the blocks that request i now completes, from block `named` on; evict idle copies.

    What has been allocated to it is in ``r.allocated``, and counts in ``s.held``, the KV in use.
    """
    # Idle copies stay as long as there are empty blocks.
    while s.held + cache.block * s.idle > limits.kv_capacity:
        _evict_copy(s, cache)

    complete = r.allocated // cache.block
    if complete == named:
        return

    s.changed = True
    _names(cache.tree, i, named, complete, cache.names)
    for d in range(named, complete):
        name = cache.names[d]
        c = cache.holder[name]
        if c >= 0 and cache.merge:  # give the own block back, and use the copy that is there
            s.held -= cache.block
            _use_copy(s, cache, c)
        else:
            c = _add_copy(s, cache, name)

        cache.table[r.row, d] = c


@njit(allocates=False, forceinline=True)
def _add_copy(s: np.record, cache: Cache, name: int) -> int:
    """Add a copy of a name, with one user; return it."""
    if s.free_copy < 0:
        _evict_copy(s, cache)

    # Only now, since the eviction may have taken the last copy of this name.
    new, oldest = s.free_copy, cache.holder[name]
    # `twin` links the free places, and from the oldest on the copies of one name.
    s.free_copy = cache.copies[new].twin
    copy = cache.copies[new]
    copy.name, copy.users, copy.twin = name, 1, -1
    if oldest < 0:
        cache.holder[name] = new
        return int(new)

    # The oldest copy is the one that is found, so a new one stands behind all others.
    last = oldest
    while cache.copies[last].twin >= 0:
        last = cache.copies[last].twin

    cache.copies[last].twin = new
    return int(new)


@njit(allocates=False)
def take(r: np.record, i: int, s: np.record, tokens: int, limits: Limits, cache: Store) -> None:
    """Allocate KV for more tokens of request i, and name the blocks that they fill."""
    before = r.allocated
    memory.take(s, r, tokens, limits)
    if cache is not None:
        _store_blocks(r, i, s, cache, before // cache.block, limits)


@njit(allocates=False)
def free(requests: Records, i: int, s: np.record, limits: Limits, cache: Store) -> None:
    """Free the KV of request i. Its cached blocks stay, idle, until their room is needed."""
    if cache is not None:
        _release_blocks(requests, i, s, cache)

    memory.free(s, requests[i], limits)


@njit(allocates=False)
def _release_blocks(requests: Records, i: int, s: np.record, cache: Cache) -> None:
    """Let request i use its blocks no more, and give its row of the table back.

    `memory.free` will then free all of its KV. So blocks that others still use are added to what is
    held. Blocks that were allocated for a batch in which it then had no part lose their name.
    """
    r = requests[i]
    row, computed = int(r.row), r.cached // cache.block  # blocks whose tokens were computed
    # The last block stands first in the line: no block may go before those that follow it.
    for d in range(r.allocated // cache.block - 1, -1, -1):
        c = cache.table[row, d]
        copy = cache.copies[c]
        copy.users -= 1
        if copy.users > 0:
            s.held += cache.block
            continue
        if d >= computed:
            _remove_name(cache, c)

        _append_idle(s, cache, c, _idle_line(requests, i, cache, copy.name, d))

    # The row is the first free one, and what is cached may have changed for those that wait.
    cache.table[row, 0] = s.free_row
    s.free_row, r.row, s.changed = row, -1, True


@njit(allocates=False)
def _idle_line(requests: Records, i: int, cache: Cache, name: int, d: int) -> int:
    """Return the line in which a copy stands that request i lets go, its block d."""
    r = requests[i]
    # Nobody can find a copy without a name. By next use it joins those that nobody will use, which
    # are taken away first; under LRU the last line is the only one.
    if name < 0:
        return cache.lines - 1
    if cache.lines == 1:  # LRU
        return 0

    user, has_finished = cache.noted[name], True  # a rank
    # The noted user may have finished by now, so the note moves on to the next who has not.
    # The last line is no rank: nobody is left there.
    while user < cache.lines - 1 and has_finished:
        other = requests[cache.ranked[user]]
        has_finished = other.produced == other.output
        if has_finished:
            user = cache.later[cache.first_later[cache.ranked[user]] + d]

    cache.noted[name] = user
    # An evicted request comes back and finds the copy, perhaps as the first.
    return int(user if r.produced == r.output else min(user, r.rank))


@njit(allocates=False)
def _use_copy(s: np.record, cache: Cache, c: int) -> None:
    """Let one more request use a copy. The first user takes it from its line, and its KV counts."""
    copy = cache.copies[c]
    if copy.users == 0:
        _remove_idle(s, cache, c)
        s.held += cache.block

    copy.users += 1


@njit(allocates=False)
def _append_idle(s: np.record, cache: Cache, c: int, line: int) -> None:
    """Put a copy that nobody uses at the end of a line."""
    copy, head = cache.copies[c], cache.heads + line
    # In the ring the head stands behind the last copy, and its own `before` is that last one.
    copy.before, copy.behind = cache.copies[head].before, head
    cache.copies[copy.before].behind = c
    cache.copies[head].before = c
    s.idle += 1
    s.last_line = max(s.last_line, line)  # no line behind it has a copy
    if cache.ttl > 0:  # LRU, with one line
        copy.idle_at = s.now
        s.kept += 1
        if s.oldest == head:  # no other copy is within its time to live
            s.oldest = c


@njit(allocates=False)
def _remove_idle(s: np.record, cache: Cache, c: int) -> None:
    """Take a copy out of its line, since somebody uses it or it is taken away."""
    copy = cache.copies[c]
    cache.copies[copy.before].behind = copy.behind
    cache.copies[copy.behind].before = copy.before
    s.idle -= 1
    # Beyond its time to live `expire` has counted it out already.
    if cache.ttl > 0 and copy.idle_at + cache.ttl > s.now:
        s.kept -= 1
        if s.oldest == c:
            s.oldest = copy.behind


@njit(allocates=False)
def _evict_copy(s: np.record, cache: Cache) -> None:
    """Evict the first copy of the last line that has any."""
    # An empty line's head is its own neighbour.
    while cache.copies[cache.heads + s.last_line].behind == cache.heads + s.last_line:
        s.last_line -= 1

    c = cache.copies[cache.heads + s.last_line].behind
    _remove_idle(s, cache, c)
    _remove_name(cache, c)
    # Its place is the first of the free ones, which are linked by `twin`.
    cache.copies[c].twin = s.free_copy
    s.free_copy = c


@njit(allocates=False)
def _remove_name(cache: Cache, c: int) -> None:
    """Let nobody find a copy by its name any more."""
    copy = cache.copies[c]
    if copy.name < 0:  # it has none
        return

    # Take it out of the list of copies of its name, which are linked by `twin` from the oldest on.
    other = cache.holder[copy.name]
    if other == c:
        cache.holder[copy.name] = copy.twin
    else:
        while cache.copies[other].twin != c:
            other = cache.copies[other].twin

        cache.copies[other].twin = copy.twin

    copy.name = -1


@njit(allocates=False)
def expire(s: np.record, cache: Cache) -> None:
    """Count as kept no longer the copies that have been idle for the time to live.

    They stay until they are evicted. Copies become idle in the order of the line.
    """
    while s.oldest != cache.heads and cache.copies[s.oldest].idle_at + cache.ttl <= s.now:
        s.oldest = cache.copies[s.oldest].behind
        s.kept -= 1
