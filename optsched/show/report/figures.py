"""The figures of a report: matplotlib's, as SVG with words for what is under the mouse."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from optsched.judge.timeline import PHASES, Timeline
from optsched.show import plot
from optsched.show.plot import style
from optsched.show.plot.policies import DISTRIBUTIONS
from optsched.show.plot.timelines import IDLE, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG = "http://www.w3.org/2000/svg"
# Characters that XML forbids.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def timeline_figure(found: Timeline, name: str) -> str:
    """Return the figure of a schedule: requests, KV memory and batches over one axis of time."""
    canvas = style.figure((13.0, 9.5))
    panels = canvas.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1])
    drawings = (plot.plot_gantt, plot.plot_kv, plot.plot_batches)
    for draw, ax in zip(drawings, panels, strict=True):
        draw(found, ax=ax).label_outer()
        # Boxes have a name (gid) and stay shapes, which can have titles. Other layers have
        # thousands of steps, of which an image is smaller.
        for layer in ax.collections:
            layer.set_rasterized(layer.get_gid() is None)

    return _svg(canvas, name, _titles_of_boxes(found) if rows_of(found) is not None else {})


def _titles_of_boxes(found: Timeline) -> dict[str, list[str]]:
    """Return words for the boxes of a Gantt chart, by phase, in the order of its boxes."""
    words: dict[str, list[str]] = {}
    for phase, name in enumerate(PHASES):
        words[name] = []
        for k in np.flatnonzero(found.span_phase == phase):
            i = int(found.span_request[k])
            tokens = "" if name in IDLE else f", {found.span_tokens[k]} processed"
            words[name].append(
                f"{found.name_of(i)}: {name}, {found.span_start[k]:.7g} to "
                f"{found.span_end[k]:.7g} {found.unit}; prompt {found.instance.prompt_tokens[i]}, "
                f"output {found.instance.output_tokens[i]} tokens{tokens}"
            )

    return words


def distribution_figure(schedules: Mapping[str, Timeline], name: str) -> str:
    """Return the distributions of latency, TTFT and TPOT by schedule, side by side."""
    canvas = style.figure((13.0, 3.6))
    evaluations = {label: found.evaluation for label, found in schedules.items()}
    panels = canvas.subplots(1, 3, sharey=True)
    for metric, ax in zip(DISTRIBUTIONS, panels, strict=True):
        plot.plot_distribution(evaluations, metric, ax=ax).label_outer()
        # All panels have the same lines, and so one legend beside them.
        if legend := ax.get_legend():
            legend.remove()

    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return _svg(canvas, name)


def picture(kind: str, drawn: Mapping[str, Any], name: str, height: float = 4.5) -> str:
    """Return one picture by the name that its function has after ``plot_``."""
    canvas = style.figure((13.0, height))
    getattr(plot, f"plot_{kind}")(**drawn, ax=canvas.subplots())
    return _svg(canvas, name)


def _svg(canvas: Figure, name: str, words: Mapping[str, list[str]] | None = None) -> str:
    """Return a figure as an SVG element with titles; identifiers have its name, to be unique.

    `words`: the titles of an artist's boxes, by its identifier in the figure.
    """
    import matplotlib as mpl

    stream = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with (
        mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}),
        warnings.catch_warnings(),
    ):
        # The browser has the glyph, since text is kept as text.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        canvas.savefig(stream, format="svg", metadata=metadata, dpi=200)

    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(_xml(stream.getvalue()))
    for artist, titles in (words or {}).items():
        boxes = root.findall(f".//{{{_SVG}}}g[@id='{artist}']/{{{_SVG}}}path")
        for box, title in zip(boxes, titles, strict=True):
            ElementTree.SubElement(box, f"{{{_SVG}}}title").text = _xml(title)

    return ElementTree.tostring(root, encoding="unicode")


def _xml(text: str) -> str:
    """Return a text with a mark for each character that XML forbids, even where it is escaped."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
