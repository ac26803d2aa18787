"""How much of the KV capacity a request takes: windows of attention, and whole blocks.

The capacity counts tokens whose KV is held in all layers of a model. Layers whose attention slides
over a window keep the KV of a request's last tokens alone. Of one behind the window the others
alone hold KV, which is a part of a token. The sum over a request is rounded up.
"""

import re
from typing import Any, NamedTuple

from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError


class KvWindow(NamedTuple):
    """Of all `layers` of a model, `sliding` ones keep the KV of the last `tokens` alone.

    As a text it is ``128:12/24``: 128 tokens, in 12 of 24 layers.
    """

    tokens: int
    sliding: int
    layers: int

    def __str__(self) -> str:
        return f"{self.tokens}:{self.sliding}/{self.layers}"


NO_WINDOW = KvWindow(0, 0, 1)
"""The window of a model whose layers all keep everything."""


def kv_window_of(given: Any) -> KvWindow | None:
    """Return a window, or that of a text or three numbers, checked; None where no layer slides."""
    if given is None:
        return None

    found = re.fullmatch(r"(\d{1,10}):(\d{1,4})/(\d{1,4})", given) if type(given) is str else None
    numbers = given if found is None else map(int, found.groups())
    try:
        window = KvWindow(*numbers)
    except TypeError:  # not three things: what has no window is refused below
        window = NO_WINDOW

    right = all(type(x) is int for x in window) and 1 <= window.tokens <= MAX_TOKENS
    if not (right and 0 <= window.sliding <= window.layers <= 9_999):
        raise InputError(
            f"kv_window: found {given!r:.60}; expected tokens, sliding layers and all layers, as "
            "in '128:12/24'"
        )

    return window if window.sliding else None


def room_of(tokens: Any, block: int, window: KvWindow) -> Any:
    """Return the KV tokens of the capacity that a request takes with so many tokens held.

    An array gives one for each of its values. Compiled loops call it, too.
    """
    if window.sliding:
        # Of a token behind the window the sliding layers hold nothing. What is taken off is rounded
        # down, so that what is held is rounded up.
        behind = (tokens > window.tokens) * (tokens - window.tokens)
        tokens = tokens - behind * window.sliding // window.layers

    return tokens if block == 1 else -(-tokens // block) * block


def most_tokens(capacity: int, block: int, window: KvWindow) -> int:
    """Return the largest number of tokens, up to `MAX_TOKENS`, whose `room_of` is no more."""
    whole = capacity - capacity % block
    # What a full window leaves of the capacity, and how many layers keep all tokens.
    behind, full = whole - window.tokens, window.layers - window.sliding
    if window.sliding and behind >= 0:
        # b tokens behind the window take ceil(b full / layers), which is no more than what is
        # left of the capacity iff b full / layers is.
        whole = window.tokens + behind * window.layers // full if full else MAX_TOKENS

    return min(whole, MAX_TOKENS)
