"""A figure of shadow prices over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from optsched.show.plot.style import BLUE, axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_shadow_prices(prices: ArrayLike, ax: Axes | None = None) -> Axes:
    """Plot the price of one KV token over time.

    Parameters
    ----------
    prices : array_like, shape (pieces, 2)
        The first round and the price of each piece, as `optsched.bounds.shadow.shadow_prices`
        returns them. A price is in rounds of total latency for one token during one round.
    ax : Axes, optional
        The axes to draw on. By default new ones are made.

    Returns
    -------
    Axes
    """
    ax = axes(ax)
    rows = np.asarray(prices, dtype=np.float64).reshape(-1, 2)
    ax.step(rows[:, 0], rows[:, 1], where="post", color=BLUE, lw=1)
    ax.fill_between(rows[:, 0], rows[:, 1], step="post", color=BLUE, alpha=0.2, lw=0)
    ax.set_xlabel("time [rounds]")
    ax.set_ylabel("price of a KV token for a round\n[rounds of total latency]")
    ax.set_ylim(bottom=0)

    return ax
