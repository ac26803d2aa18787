"""Small HTML tables for notebooks. All text in them is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_LEFT = "text-align:left"
_RIGHT = "text-align:right"


def number(value: Any) -> str:
    """Return a value as readers see it."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if value != value or value in (float("inf"), -float("inf")):
        return "–"
    if isinstance(value, int) or float(value).is_integer():
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


def framed(answer: Any) -> str:
    """Return an answer's `to_frame` as an HTML table under its `repr`: its ``_repr_html_``."""
    frame = answer.to_frame()
    return table(repr(answer), list(frame), frame.astype(object).to_numpy().tolist())


def _cell(value: Any) -> str:
    text = isinstance(value, str)
    return f'<td style="{_LEFT if text else _RIGHT}">{escape(number(value))}</td>'
