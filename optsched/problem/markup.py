"""Small tables for notebooks in HTML, and for papers in LaTeX. All text in them is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

_LEFT = "text-align:left"
_RIGHT = "text-align:right"


def number(value: Any) -> str:
    """Return a value as readers see it: a dash for None and for what is not finite.

    Numbers have four digits or one decimal, and commas between thousands. Texts stay.
    """
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if not math.isfinite(value):
        return "–"
    if float(value).is_integer():
        return f"{int(value):,}"

    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def facts(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    """Return an HTML table of names and values under a title, without those that are None."""
    body = "".join(
        f'<tr><th style="{_LEFT}">{escape(name)}</th>'
        f'<td style="{_LEFT}">{escape(number(value))}</td></tr>'
        for name, value in rows
        if value is not None
    )
    return f"<div><strong>{escape(title)}</strong><table>{body}</table></div>"


def table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]], below: str = ""
) -> str:
    """Return an HTML table under a title, with text aligned left and numbers right."""
    head = "".join(f'<th style="{_LEFT}">{escape(header)}</th>' for header in headers)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f"<div><strong>{escape(title)}</strong><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>{escape(below)}</div>"
    )


def html_of_frame(answer: Any) -> str:
    """Return an answer's `to_frame` as an HTML table under its `repr`: its ``_repr_html_``."""
    frame = answer.to_frame()
    return table(repr(answer), list(frame), frame.astype(object).to_numpy().tolist())


def _cell(value: Any) -> str:
    text = isinstance(value, str)
    return f'<td style="{_LEFT if text else _RIGHT}">{escape(number(value))}</td>'


def latex(frame: DataFrame, columns: str) -> str:
    """Return a LaTeX table, which needs jinja2, with numbers and intervals in mathematics.

    `columns` is where its columns stand, such as ``"lrr"``.
    """
    cells = frame.astype(object).where(frame.notna(), None).map(_in_latex)
    head = cells.rename(columns=_escape_latex)
    return str(head.to_latex(index=False, escape=False, column_format=columns))


def _in_latex(value: Any) -> str:
    """Return a cell: numbers and intervals, such as ``1 to 2``, in mathematics, others as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        value = f"{value:.4g}"
    ends = str(value).split(" to ")
    if not all(_is_number(end) for end in ends):
        return _escape_latex(str(value))

    numbers = ", ".join(ends).replace("inf", "\\infty")
    return f"$[{numbers}]$" if len(ends) > 1 else f"${numbers}$"


def _is_number(text: str) -> bool:
    """Return whether a text is a number, which may be infinite, but not NaN."""
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


# What stands for each character that means something in LaTeX.
_LATEX = {c: f"\\{c}" for c in "_%&#${}"} | {
    "\\": "\\textbackslash ",
    "~": "\\textasciitilde ",
    "^": "\\textasciicircum ",
}


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)
