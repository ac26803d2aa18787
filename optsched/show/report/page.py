"""The page of a report: tables as rows of cells, figures as JSON, everything escaped by jinja2."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from optsched.problem.markup import number
from optsched.problem.metrics import COMPARED, TABLE
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.version import __version__
from optsched.show.report.figures import distribution_figure, timeline_figure
from optsched.show.report.gather import MAX_DISTRIBUTIONS, MAX_TIMELINES, Report, Section, Verdict

Cell = dict[str, Any]

ENVIRONMENT = ("numpy", "numba", "jinja2", "plotly")


def render(report: Report) -> str:
    """Return the report as HTML."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)  # fmt: skip
    template = (Path(__file__).parent / "report.html.jinja").read_text(encoding="utf-8")
    figures: dict[str, Any] = {}
    sections = [_section(k, section, figures) for k, section in enumerate(report.sections)]
    drawn = bool(figures)
    return environment.from_string(template).render(
        title="optsched: " + ", ".join(section.name for section in report.sections),
        sections=sections,
        figures=figures,
        plotly=Markup(get_plotlyjs()) if drawn else "",
        origins=_origins(report),
        environment=[
            ("optsched", __version__),
            ("Python", platform.python_version()),
            ("system", f"{platform.system()} {platform.machine()}"),
            ("packages", ", ".join(f"{name} {version(name)}" for name in ENVIRONMENT)),
        ],
    )


def _section(k: int, section: Section, figures: dict[str, Any]) -> dict[str, Any]:
    unit = section.unit
    drawn = []
    for place, (label, found) in enumerate(section.schedules.items()):
        if place >= MAX_TIMELINES:
            break
        name = f"timeline-{k}-{place}"
        figures[name] = timeline_figure(found)
        drawn.append({"name": name, "label": label, "open": place == 0})
    left = len(section.schedules) - len(drawn)
    distribution = None
    if section.schedules:
        distribution = f"distribution-{k}"
        figures[distribution] = distribution_figure(
            dict(islice(section.schedules.items(), MAX_DISTRIBUTIONS))
        )
    notes = list(section.notes)
    if left > 0:
        notes.append(
            f"{left} more schedules are not drawn over time, and distributions are of the first "
            f"{MAX_DISTRIBUTIONS}; pass a schedule's own file to see it first"
        )
    return {
        "name": section.name or "unnamed",
        "sha256": section.sha256,
        "facts": section.facts,
        "results": _results(section, unit) if section.results else None,
        "comparisons": [_comparison(section, data, unit) for data in section.comparisons],
        "certificates": section.certificates,
        "timelines": drawn,
        "distribution": distribution,
        "notes": notes,
    }


def _header(text: str, unit: str = "") -> dict[str, str]:
    return {"text": text, "unit": unit}


def _metric_header(name: str, section: Section) -> dict[str, str]:
    metric = TABLE[name]
    return _header(metric.words, metric.unit_words(section.time_unit))


def _cell(value: Any, text: str | None = None) -> Cell:
    """Return a cell: what is shown, and the number that it sorts by."""
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    sort = ""
    if numeric:
        with suppress(OverflowError):  # an integer beyond all floats
            sort = repr(float(value))
    return {
        "text": number(value) if text is None else text,
        "sort": sort,
        "numeric": numeric or value is None,
    }


def _results(section: Section, unit: str) -> dict[str, Any]:
    headers = [
        *map(_header, ("file", "command", "by", "objective")), _header("value", unit),
        _header("bound", unit), *map(_header, ("gap", "status", "schedule", "bound's proof")),
    ]  # fmt: skip
    rows = []
    for data in section.results:
        gap = data.get("gap")
        verdicts: dict[str, Verdict] = data["verdicts"]
        proof = verdicts.get("certificate")
        if (
            proof is None or proof.state != "rejected"
        ):  # a certificate may prove less than the bound
            proof = verdicts.get("bound") or proof
        rows.append([
            _cell(data["file"]), _cell(data.get("command")),
            _cell(data.get("policy") or data.get("method") or "–"),
            _cell(data.get("objective_name") or "–"), _cell(data.get("objective")),
            _cell(data.get("bound")), _cell(gap, "–" if gap is None else f"{gap:.2%}"),
            _cell(data.get("status") or "–"), _verdict(verdicts.get("schedule")),
            _verdict(proof),
        ])  # fmt: skip
    return {"headers": headers, "rows": rows}


def _verdict(verdict: Verdict | None) -> Cell:
    if verdict is None:
        return _cell("–")
    return {**_cell(verdict.words), "state": verdict.state}


def _brief(verdict: Verdict) -> Verdict:
    """Return a verdict whose words fit into a column: none where all is well."""
    return verdict if verdict.state == "rejected" else replace(verdict, words="")


def _texts(value: Any) -> list[str]:
    """Return what a file holds for texts as a list of texts."""
    if value is None:
        return []
    return [str(text) for text in value] if isinstance(value, list) else [str(value)]


def _share(value: Any) -> str | None:
    number_like = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:.2%}" if number_like else None


def _comparison(section: Section, data: dict[str, Any], unit: str) -> dict[str, Any]:
    certified = section.certified
    ratios = ["best known", "bound"] + (["certified"] if certified is not None else [])
    headers = [_header("policy"), _header("kind"), _metric_header(TOTAL_LATENCY.name, section)]
    headers += [_header(f"/ {name}") for name in ratios]
    replayed = any(name.startswith("schedule of ") for name in data["verdicts"])
    if replayed:  # beside the ratios that it bears out, and within a narrow window
        headers.append(_header("schedule"))
    headers += [_metric_header(name, section) for name in COMPARED]
    headers.append(_header("decisions", "ms"))
    rows, notes = [], []
    for row in data["policies"]:
        for note in (*_texts(row.get("notes")), *_texts(row.get("error"))):
            notes.append(f"{row['policy']}: {note}")
        metrics = row.get("metrics") or {}
        tel = metrics.get(TOTAL_LATENCY.name)
        inside = row.get("ratio_to_bound") is not None or row.get("ratio_to_best_known") is not None
        kind = "clairvoyant" if row.get("clairvoyant") else ""
        if row.get("measured"):
            kind = "measured"
        cells = [
            _cell(row["policy"]), _cell(kind), _cell(tel),
            _ratio(row.get("ratio_to_best_known")), _ratio(row.get("ratio_to_bound")),
        ]  # fmt: skip
        if certified is not None:
            cells.append(_ratio(tel / certified if inside and tel is not None else None))
        if replayed:
            found = data["verdicts"].get(f"schedule of {row['policy']}")
            # Of a schedule that was not at hand there is nothing to say.
            short = None if found is None else _brief(found)
            cells.append(_verdict(short))
        cells += [_cell(metrics.get(name)) for name in COMPARED]
        wall = row.get("wall_s")
        cells.append(_cell(None if wall is None else 1000 * wall))
        rows.append(cells)
    notes += _texts(data.get("notes"))
    verdict = data["verdicts"].get("bound")
    bound, best = data.get("bound"), data.get("best_known")
    gap = _share(data.get("gap"))
    lines = [
        ("best known", f"{number(best)} {unit}, from {data.get('best_known_origin')}")
        if best is not None
        else ("best known", "none"),
        ("bound", f"{number(bound)} {unit}, from {data.get('bound_origin')}")
        if bound is not None
        else ("bound", "none"),
    ]
    if gap is not None:
        lines.append(("gap", gap))
    lines.append(("output lengths", str(data.get("predictor") or "–")))
    return {
        "file": data["file"],
        "lines": lines,
        "verdict": verdict,
        "headers": headers,
        "rows": rows,
        "notes": notes,
    }


def _ratio(value: float | None) -> Cell:
    return _cell(value, "–" if value is None else f"{value:.4f}")


def _origins(report: Report) -> dict[str, Any]:
    names = ("file", "format", "made by", "optsched", "cost model", "seed", "threads")
    headers = [
        *map(_header, names), _header("time", "s"), _header("versions"),
        _header("sha256 of the file"),
    ]  # fmt: skip
    rows = []
    for one in report.origins:
        spent: Sequence[float] = [
            t for t in (one["build_s"], one["solve_s"]) if isinstance(t, (int, float))
        ]
        made = " ".join(str(v) for v in (one["command"], one["method"] or one["policy"]) if v)
        versions = ", ".join(f"{name} {v}" for name, v in one["versions"].items())
        rows.append([
            _cell(one["file"]), _cell(one["format"]), _cell(made or "–"),
            _cell(one["optsched"] or "–"), _cell(one["cost_model"] or "–"), _cell(one["seed"]),
            _cell(one["threads"]), _cell(sum(spent) if spent else None), _cell(versions or "–"),
            _cell(one["sha256"]),
        ])  # fmt: skip
    return {"headers": headers, "rows": rows}
