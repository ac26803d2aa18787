"""Where KV is: what a request holds, what it finds in the cache, and what is on its way to it.

The loops decide who is admitted and who leaves, and ask here what that takes. KV *comes* to a
request that was prefilled on another machine once it has room; until it is there, the request is
one of those that run but is in no batch and cannot be evicted. The cache of shared prefixes is
`optsched.policies.engine.blocks`; where nothing is cached, it is None, and compiles to nothing.
"""

from typing import Any

import numpy as np

from optsched.judge.life import Ints, Records
from optsched.judge.memory import kv_of
from optsched.judge.replay import Limits
from optsched.policies.engine import blocks
from optsched.policies.engine.blocks import Store
from optsched.problem.kernel import njit

MOVE = (
    ("away", np.bool_),  # its KV is on another machine, and comes once there is room
    ("takes", np.float64),  # how long that takes
    ("moved_at", np.float64),  # when it began
    ("ready", np.float64),  # when it is over; 0: nothing comes
)
"""Fields of a request."""

MOVES = (
    ("moving", np.int64),  # running requests whose KV comes, and
    ("landing", np.float64),  # when the first of them is there
    ("pulled", np.int64),  # how many began to come in the last turn, after which the loop returns
    ("landed", np.int64),  # those whose KV has just come and that decode next
)
"""Fields of a worker's state."""


def hand_over(r: Any, cached: int, takes: float, at: float) -> None:
    """Let a request begin here with KV that is elsewhere: so many tokens of its prompt."""
    r.cached, r.produced = cached, int(cached == r.prompt)
    r.away, r.takes, r.moved_at = True, takes, np.inf
    r.first_at = at if r.produced else np.inf


@njit(allocates=False, forceinline=True)
def is_here(r: Any) -> bool:
    """Whether no KV is on its way to a running request, so that it may be in a batch."""
    return bool(r.ready == 0.0)


@njit(allocates=False, forceinline=True)
def comes(r: Any) -> bool:
    """Whether a waiting request needs no prefill, since its KV comes once it has room."""
    return bool(r.away)


@njit(allocates=False, forceinline=True)
def prefills(r: Any) -> bool:
    """Whether the next step of a request is a prefill."""
    return not (r.decoding or r.away or r.ready > 0.0)


@njit(allocates=False)
def kv_on_its_way(requests: Any, running: Ints, s: Any, limits: Limits) -> tuple[int, int]:
    """Return how many requests KV is on its way to, and how much it is."""
    kv = 0
    # Most of the time nothing comes, and then nobody need be looked at.
    for k in range(s.running if s.moving > 0 else 0):
        r = requests[running[k]]
        kv += kv_of(r.cached, limits) if r.ready > 0.0 else 0

    return s.moving, kv


@njit(allocates=False)
def may_come(r: Any, s: Any, lost: int = 0) -> bool:
    """Whether KV may come now: what is evicted is there until the next batch begins.

    That batch is sure to come if KV is on its way already. `lost`: evictions to come.
    """
    return not (r.away and s.moving > 0 and s.evicted + lost > s.settled)


@njit(allocates=False)
def pull(r: Any, s: Any) -> None:
    """Let KV that is elsewhere come to a request, which has just been given room."""
    if not r.away:
        return

    r.away = False
    r.moved_at = s.now
    r.ready = s.now + r.takes
    s.moving += 1
    s.pulled += 1
    s.landing = min(s.landing, r.ready)


@njit(allocates=False)
def land(requests: Any, running: Ints, s: Any) -> None:
    """Let requests whose KV is there go on, and note how many of them decode next."""
    s.landed = s.moving = 0
    s.landing = np.inf
    for k in range(s.running):
        r = requests[running[k]]
        if 0.0 < r.ready <= s.now:
            r.ready = 0.0
            r.decoding = r.produced > 0
            s.landed += r.decoding
        elif r.ready > 0.0:
            s.moving += 1
            s.landing = min(s.landing, r.ready)


@njit(allocates=False)
def look_up(r: Any, i: int, cache: Store) -> None:
    """Note what a waiting request would find in the cache now."""
    if cache is not None:
        r.cached = 0
        # The last token of the input is computed in any case, since it gives the next one.
        blocks_of_rest = (r.prompt + r.produced - 1) // cache.block
        r.cached = cache.block * blocks.find(cache, i, blocks_of_rest)


@njit(allocates=False)
def forget(r: Any, cache: Store) -> None:
    """Forget what a request would find, since it waits on."""
    if cache is not None:
        r.cached = 0


@njit(allocates=False)
def admission_kv(r: Any, i: int, s: Any, tokens: int, limits: Limits, cache: Store) -> int:
    """Return the KV that admitting a request takes, with so many tokens, found ones included."""
    kv = kv_of(tokens, limits)
    if cache is not None:
        kv += blocks.extra(s, cache, i, r.cached // cache.block)

    return kv


@njit(allocates=False)
def admit(r: Any, i: int, s: Any, tokens: int, limits: Limits, cache: Store) -> None:
    """Give a request room for so many tokens beside those that it finds, or let its KV come."""
    if cache is not None:
        r.reused = r.cached
        blocks.seat(r, i, s, cache, r.cached // cache.block, limits)
    if tokens > 0:
        blocks.take(r, i, s, tokens, limits, cache)
    pull(r, s)


@njit(allocates=False)
def all_come(requests: Records, running: Ints, s: Any) -> bool:
    """Whether KV comes to every running request that is not gone, so that no batch can begin."""
    for k in range(s.running):
        r = requests[running[k]]
        if not r.gone and r.ready == 0.0:
            return False

    return True
