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
    ("move_time", np.float64),  # how long the move takes; infinite: somebody says when it ends
    ("move_start", np.float64),  # infinite before the move
    ("move_end", np.float64),  # 0: nothing is on its way
)
"""Fields of a request."""

MOVES = (
    ("moving", np.int64),  # running requests whose KV is on its way
    ("next_landing", np.float64),  # when the first of it is there; infinite: none is on its way
    ("pulled", np.int64),  # requests to which KV began to come in this turn: the loop returns then
    ("landed", np.int64),  # requests whose KV has come in this turn and that decode next
)
"""Fields of a worker's state."""


def hand_over(r: Any, moved_tokens: int, takes: float, at: float) -> None:
    """Let a request begin here whose KV is elsewhere, so many tokens of its prompt.

    If this is the whole prompt, its first token has been made there, at time ``at``.
    """
    r.cached, r.produced = moved_tokens, int(moved_tokens == r.prompt)
    r.away, r.move_time, r.move_start = True, takes, np.inf
    r.first_at = at if r.produced else np.inf


@njit(allocates=False, forceinline=True)
def is_here(r: Any) -> bool:
    """Whether no KV is on its way to a running request, so that it may be in a batch."""
    return bool(r.move_end == 0.0)


@njit(allocates=False, forceinline=True)
def is_elsewhere(r: Any) -> bool:
    """Whether a waiting request needs no prefill, since its KV comes once it has room."""
    return bool(r.away)


@njit(allocates=False, forceinline=True)
def prefills_next(r: Any) -> bool:
    """Whether the next step of a request is a prefill."""
    return not (r.decoding or r.away or r.move_end > 0.0)


@njit(allocates=False)
def kv_on_its_way(requests: Any, running: Ints, s: Any, limits: Limits) -> tuple[int, int]:
    """Return to how many requests KV is on its way, and how much KV that is."""
    kv = 0
    # Most of the time nothing comes, and then nobody need be looked at.
    for k in range(s.running if s.moving > 0 else 0):
        r = requests[running[k]]
        kv += kv_of(r.cached, limits) if r.move_end > 0.0 else 0

    return s.moving, kv


@njit(allocates=False)
def may_pull(r: Any, s: Any, lost: int = 0) -> bool:
    """Whether a request may be admitted now, as far as the move of its KV is concerned.

    What is evicted is there until the next batch begins, so a move should wait for that batch. It
    does if the batch is sure to come, as it is while other KV is on its way. `lost`: evictions that
    are not counted yet.
    """
    return not (r.away and s.moving > 0 and s.evicted + lost > s.settled)


@njit(allocates=False)
def pull(r: Any, s: Any) -> None:
    """Let the KV of a request that has just been given room begin to come, if it is elsewhere."""
    if not r.away:
        return

    r.away = False
    r.move_start = s.now
    r.move_end = s.now + r.move_time
    s.moving += 1
    s.pulled += 1
    s.next_landing = min(s.next_landing, r.move_end)


@njit(allocates=False)
def land(requests: Any, running: Ints, s: Any) -> None:
    """Let requests go on whose KV is there by now, and count those that decode next.

    A request without an output token still has its last prompt token to compute.
    """
    s.landed = s.moving = 0
    s.next_landing = np.inf
    for k in range(s.running):
        r = requests[running[k]]
        if 0.0 < r.move_end <= s.now:
            r.move_end = 0.0
            r.decoding = r.produced > 0
            s.landed += r.decoding
        elif r.move_end > 0.0:
            s.moving += 1
            s.next_landing = min(s.next_landing, r.move_end)


@njit(allocates=False)
def look_up_prefix(r: Any, i: int, cache: Store) -> None:
    """Note what a waiting request would find in the cache now."""
    if cache is not None:
        r.cached = 0
        # The last token of the input is computed in any case, since it gives the next one.
        blocks_of_rest = (r.prompt + r.produced - 1) // cache.block
        r.cached = cache.block * blocks.cached_blocks(cache, i, blocks_of_rest)


@njit(allocates=False)
def forget_prefix(r: Any, cache: Store) -> None:
    """Forget what a request would find, since it waits on."""
    if cache is not None:
        r.cached = 0


@njit(allocates=False)
def admission_kv(r: Any, i: int, s: Any, tokens: int, limits: Limits, cache: Store) -> int:
    """Return the KV that an admission takes with room for so many tokens, found ones included."""
    kv = kv_of(tokens, limits)
    if cache is not None:
        kv += blocks.kv_correction(s, cache, i, r.cached // cache.block)

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
def none_is_here(requests: Records, running: Ints, s: Any) -> bool:
    """Whether KV is on its way to every running request that stays, so that no batch can begin."""
    for k in range(s.running):
        r = requests[running[k]]
        if not r.leaving and r.move_end == 0.0:
            return False

    return True
