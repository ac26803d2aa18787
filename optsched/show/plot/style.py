"""Common parts of all figures: colours that colour-blind readers can tell apart, axes, files."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.files.outputs import write_bytes
from optsched.problem.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
PURPLE, BLACK, YELLOW, GREY = "#CC79A7", "#222222", "#F0E442", "#BDBDBD"
"""The palette of Okabe and Ito, and a grey."""

COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, BLACK, YELLOW)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")

SUFFIXES = (".png", ".svg", ".pdf")
"""The suffixes of the kinds of image files that `save` writes."""


def series_style(k: int) -> dict[str, Any]:
    """Return colour, marker and dashes of series ``k``. The first 32 series all differ."""
    return {
        "color": COLOURS[k % len(COLOURS)],
        "marker": MARKERS[k % len(MARKERS)],
        "linestyle": DASHES[k // len(COLOURS) % len(DASHES)],
    }


def line_style(k: int) -> dict[str, Any]:
    """Return colour and dashes of series ``k``, for lines without markers."""
    return {name: value for name, value in series_style(k).items() if name != "marker"}


def curves(ax: Axes, series: Mapping[str, Sequence[tuple[float, float]]], **more: Any) -> None:
    """Draw lines through points, each series that has some in its own style."""
    for k, (name, points) in enumerate(series.items()):
        if points:
            ax.plot(*zip(*points, strict=True), label=plain(name), **series_style(k), **more)


def shade(k: int, count: int) -> str:
    """Return the colour of part ``k`` of ``count`` ordered parts."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](k / (count - 1) if count > 1 else 0.5))


def axes(ax: Axes | None, size: tuple[float, float] = (8.0, 4.5)) -> Axes:
    """Return the axes ``ax``, or new axes in a figure of ``size`` in inches if there are none."""
    if ax is not None:
        return ax

    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def figure(size: tuple[float, float] = (8.0, 4.5)) -> Figure:
    """Return a figure for files, which has no window and is not in matplotlib's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def plain(text: object, limit: int = 48) -> str:
    """Return a text as a label: on one line, without mathematics, of at most ``limit`` letters."""
    words = " ".join(str(text).split())
    if len(words) > limit:
        words = words[: limit - 1] + "…"
    if words.startswith("_"):  # legends leave out labels that begin so
        words = f" {words}"

    return words.replace("$", r"\$")


def thinned(n: int, count: int) -> list[int]:
    """Return at most ``count`` of the indices 0..n-1, evenly spread and with both ends."""
    if n <= count:
        return list(range(n))

    return sorted({round(k * (n - 1) / (count - 1)) for k in range(count)})


def plain_ticks(axis: Axis) -> None:
    """Write the ticks of a logarithmic axis as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    factor = high / low if low > 0 else math.inf
    # The narrower the range, the more ticks within a power of ten.
    subs: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    if factor >= 8:
        subs = (1.0,) if factor >= 50 else (1.0, 2.0, 5.0)

    axis.set_major_locator(LogLocator(base=10, subs=subs))
    plain_number = FuncFormatter(lambda value, _: f"{value:g}")
    axis.set_major_formatter(plain_number if high < 1e7 and low > 1e-5 else LogFormatter())
    axis.set_minor_formatter(NullFormatter())


def logarithmic(ax: Axes, *, bottom: float | None = None) -> None:
    """Make both axes logarithmic, with plain numbers at their ticks."""
    ax.set(xscale="log", yscale="log")
    ax.set_ylim(bottom=bottom)
    plain_ticks(ax.xaxis)
    plain_ticks(ax.yaxis)


def legend(ax: Axes, entries: int | None = None, **options: Any) -> None:
    """Put the legend inside the axes if it has few entries, and beside them otherwise.

    `entries`: how many it is taken to have; by default as many as it has.
    """
    count = len(ax.get_legend_handles_labels()[0]) if entries is None else entries
    if not count:
        return
    if count > 4:
        options = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), **options}

    ax.legend(fontsize="small", frameon=count <= 4, **options)


def labelled(ax: Axes, *, grid: Any = "both", **labels: Any) -> Axes:
    """Return axes with labels (``xlabel``, ``ylabel``), pale lines along `grid`, and a legend."""
    ax.set(**labels)
    ax.grid(alpha=0.3, axis=grid)
    legend(ax)
    return ax


def check_suffix(path: str | Path) -> None:
    """Check that a file's name says which kind of image it is."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(
            f"{path}: found the suffix {Path(path).suffix!r}; expected a name ending in "
            f"{', '.join(SUFFIXES)}"
        )


def save(drawn: Figure, path: str | Path, *, dpi: int = 150) -> None:
    """Write a figure to a file, atomically. The same figure always gives the same bytes."""
    import matplotlib as mpl

    check_suffix(path)
    kind = Path(path).suffix.lower()[1:]
    # What would differ from one time, or one version of matplotlib, to the next is left out.
    changing: Any = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}[kind]
    stream = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "optsched", "svg.fonttype": "none"}):
        drawn.savefig(stream, format=kind, dpi=dpi, metadata={changing: None})

    write_bytes(stream.getvalue(), path)
