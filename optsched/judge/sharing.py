"""The blocks of KV that requests share, are claimed and must be retained, compiled by numba.

The rules are those of docs/formulations.md, "Shared prefixes". A name is an owner and a depth
(`optsched.problem.prefixes`). Names that one request alone can have and never claims are not
counted: its memory is in the ledger anyway. For the others each worker counts the requests that
hold them, and keeps the number of its last batch in which somebody did. What must be retained is
written as differences over each worker's batches. Import this module lazily, since it loads numba.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.judge.life import record
from optsched.problem.columns import read_only
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit
from optsched.problem.memory import check_size
from optsched.problem.prefixes import write_names

Ints = NDArray[np.int64]
_names = njit(write_names, allocates=False)

SHARING = (
    ("twice", np.int64),  # blocks that its requests hold beyond the first of a name
    ("shared", np.int64),  # names that two or more of its requests hold
)
"""Fields of a worker's record."""


SHARED = record(
    ("shared", np.int64),  # KV tokens that two or more requests hold
    ("retained", np.int64),  # KV tokens that nobody holds
    ("left", np.int64),  # KV tokens of its worker once the finished requests have gone
)
"""Fields of a batch's record."""


class Sharing(NamedTuple):
    """The claims of a schedule, the names that matter, and the state of each on each worker.

    Names are numbers, which `optsched.problem.prefixes.write_names` finds along the `tree`: by
    request, how many blocks its parent has, too (``first``; those behind it are its own), the
    nearest ancestor that owns some of these (``above``, or -1), and ``place``, where the name of
    its own block d is ``place`` + d.

    Batches of a worker are numbered from 1, and ``began[w] + k`` is the place of the batch
    numbered k + 1 in `kept`, whose sums up to a place are the blocks retained in a batch.
    """

    reused: Ints  # by entry of the schedule, the tokens that it claims
    block: int  # tokens of a block
    tree: tuple[Ints, Ints, Ints]  # first, above and place of each request
    public: Ints  # by request, how many of its blocks count, from its first one on
    names: Ints  # scratch: the names of one request's blocks
    holders: Ints  # by worker and name, how many requests hold it now
    last_held: Ints  # by worker and name, the last batch in which one did, 0 if none has
    began: Ints  # by worker, how many batches are of the workers before it
    kept: Ints  # by batch, those of a worker after those of another: see above
    done: Any  # by batch, a record of `SHARED`


def sharing_of(
    instance: Instance, reused: Ints | None, request: Ints, worker: Ints, workers: int
) -> Sharing | None:
    """Return what a replay needs of an instance's prefixes, or None if it has none.

    `request` and `reused` are by entry of the schedule, `worker` by batch.
    """
    prefixes = instance.prefixes
    if prefixes is None:
        return None

    claims = np.zeros_like(request) if reused is None else reused
    # Blocks that another request has, too. A claim may reach beyond them: an evicted request may
    # find its own KV. A request that does not exist is refused later.
    public = prefixes.public.copy()
    entries = np.flatnonzero((claims > 0) & (request >= 0) & (request < instance.n))
    np.maximum.at(public, request[entries], claims[entries] // prefixes.block)
    # One beyond the request's own blocks is refused by the replay, and needs no names.
    public = np.minimum(public, np.maximum(prefixes.blocks, prefixes.first))
    # A request owns the names from its first own block on, so only these are counted for it.
    counted = public - prefixes.first
    names = int(counted.sum())
    # There are two numbers of 8 bytes for each worker and name.
    check_size(workers * names, 16, "blocks of KV", "larger prefix_block_tokens", "schedule")

    # Batches by worker, and within a worker in order: where each worker's begin.
    began = np.searchsorted(np.sort(worker), np.arange(workers))
    # In the order of the fields: after `public` come names, holders, last_held, began, kept, done.
    return Sharing(
        read_only(claims),
        prefixes.block,
        # Names are numbered request by request: that of an own block d is `place` + d.
        (prefixes.first, prefixes.above, np.cumsum(counted) - public),
        public,
        np.empty(int(public.max()), dtype=np.int64),
        np.zeros((workers, names), dtype=np.int64),
        np.zeros((workers, names), dtype=np.int64),
        began,
        np.zeros(len(worker) + 1, dtype=np.int64),
        np.zeros(len(worker), dtype=SHARED),
    )


@njit(allocates=False)
def hold(s: Sharing, i: int, w: int, low: int, high: int, machine: Any) -> None:
    """Let request i hold its blocks ``low <= d < high`` on worker w.

    `machine`: the worker's record, whose sums over names follow.
    """
    high = min(high, s.public[i])  # what is behind is its own alone, and not counted
    _names(s.tree, i, low, high, s.names)
    for d in range(low, high):
        holders = s.holders[w, s.names[d]]
        # Every holder but the first counts in `twice`. With its second one a name becomes shared.
        machine.twice += holders > 0
        machine.shared += holders == 1
        s.holders[w, s.names[d]] = holders + 1


@njit(allocates=False)
def release(s: Sharing, i: int, w: int, high: int, turn: int, machine: Any) -> None:
    """Let request i hold its blocks ``d < high`` no more, which it last did in batch `turn`.

    `turn` is the number of a batch of worker w, from 1. `machine`: the worker's record, which
    counts in ``twice`` all holders of a name but one, and in ``shared`` names with two or more.
    """
    high = min(high, s.public[i])  # what is behind is its own alone, and not counted
    _names(s.tree, i, 0, high, s.names)
    for d in range(high):
        name = s.names[d]
        holders = s.holders[w, name] - 1  # those that are left
        machine.twice -= holders > 0
        machine.shared -= holders == 1  # with one left the name is shared no more
        s.holders[w, name] = holders
        if holders == 0:
            s.last_held[w, name] = turn


@njit(allocates=False)
def claim(s: Sharing, i: int, w: int, high: int, turn: int, machine: Any) -> int:
    """Let request i claim its blocks ``d < high`` in the worker's batch `turn`, and hold them.

    Return the first block that nobody ever held, or -1. What others hold or compute in the batch is
    held already (`hold`). A block that nobody holds has been retained since somebody did: it counts
    in ``s.kept`` for the worker's batches between. Turns are numbered from 1; 0: nobody ever did.
    """
    high, missing = min(high, s.public[i]), -1  # -1: no block is missing
    _names(s.tree, i, 0, high, s.names)
    # From the last block back, so that the first that is missing is what stays.
    for d in range(high - 1, -1, -1):
        name = s.names[d]
        last_turn = s.last_held[w, name]
        if s.holders[w, name] == 0 and last_turn == 0:
            missing = d
        elif s.holders[w, name] == 0:
            # Retained in the batches after `last_turn` and before `turn`: a difference at each end.
            s.kept[s.began[w] + last_turn] += 1
            s.kept[s.began[w] + turn - 1] -= 1

    hold(s, i, w, 0, high, machine)
    return missing


def retained_of(s: Sharing, worker: Ints) -> Ints:
    """Return the KV tokens retained in each batch for the claims of a whole schedule."""
    retained = np.empty(len(worker), dtype=np.int64)
    # Claims are written by worker and turn; a stable sort by worker leads back to the batches.
    retained[np.argsort(worker, kind="stable")] = s.block * np.cumsum(s.kept[:-1])
    return retained
