"""The HTML page of a report: tables as rows of cells, escaped by jinja2, and figures as SVG.

A table is made of columns and rows (`_table`). A row is an object of a file. A column is its words,
its unit, and a function from a row to its cell, or to the value that the cell shows (`Column`).
`data` is the JSON object of a file, and `name` what the identifiers in a figure of it begin with.
"""

import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from optsched.analysis.comparison import MEANING, Column, policy_columns
from optsched.problem.markup import number
from optsched.problem.metrics import TABLE, time_words
from optsched.problem.objective import goal_of_file
from optsched.problem.version import __version__
from optsched.show.data import capacity_of, diagnosis_of, splits_of
from optsched.show.report.figures import distribution_figure, picture, timeline_figure
from optsched.show.report.gather import MAX_DISTRIBUTIONS, MAX_TIMELINES, Report, Section, Verdict

Cell = dict[str, Any]

ENVIRONMENT = ("numpy", "numba", "jinja2", "matplotlib")


def render(report: Report) -> str:
    """Return the report as HTML."""
    from jinja2 import Environment, StrictUndefined

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(autoescape=True, undefined=StrictUndefined, **options)
    template = (Path(__file__).parent / "report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title="optsched: " + ", ".join(section.name for section in report.sections),
        sections=[_section(k, section) for k, section in enumerate(report.sections)],
        origins=_origins(report),
        environment=[
            ("optsched", __version__),
            ("Python", platform.python_version()),
            ("system", f"{platform.system()} {platform.machine()}"),
            ("packages", ", ".join(f"{name} {version(name)}" for name in ENVIRONMENT)),
        ],
    )


def _section(k: int, section: Section) -> dict[str, Any]:
    """Return what the template shows of section ``k``."""
    schedules = section.schedules
    timelines = [
        {"label": label, "figure": timeline_figure(found, f"timeline-{k}-{place}")}
        for place, (label, found) in enumerate(islice(schedules.items(), MAX_TIMELINES))
    ]
    first = dict(islice(schedules.items(), MAX_DISTRIBUTIONS))
    notes, not_drawn = list(section.notes), len(schedules) - len(timelines)
    if not_drawn > 0:
        notes.append(
            f"{not_drawn} more schedules are not drawn over time, and distributions are of the "
            f"first {MAX_DISTRIBUTIONS}; pass a schedule's own file to see it first"
        )

    return {
        "name": section.name or "unnamed",
        "sha256": section.sha256,
        "verdict": _sentences(section),
        "facts": section.facts,
        "results": _results(section) if section.results else None,
        "comparisons": [_comparison(section, data) for data in section.comparisons],
        "others": [
            _OTHERS[data["format"]](data, f"other-{k}-{place}")
            for place, data in enumerate(section.others)
        ],
        "certificates": section.certificates,
        "timelines": timelines,
        "distribution": distribution_figure(first, f"distribution-{k}") if first else None,
        "notes": notes,
    }


def _sentences(section: Section) -> list[str]:
    """Return what the files say in short: of the best and the worst policy, and of the load."""
    sentences = []
    for data in section.comparisons:
        rows = [r for r in data["policies"] if r.get("meaning") and r.get("ratio_to_best_known")]
        rows.sort(key=itemgetter("ratio_to_best_known"))
        best_and_worst = [rows[0], rows[-1]] if len(rows) > 1 else rows
        words = goal_of_file(data).words.replace("TEL", "total latency")
        sentences += [
            f"{row['policy']} takes {row['meaning']} in {words}" for row in best_and_worst
        ]
        sentences += [f"{note[:1].upper()}{note[1:]}" for note in _texts(data.get("notes"))]

    verdicts = (data.get("verdict") for data in section.others)
    sentences += [f"{text[:1].upper()}{text[1:]}" for text in verdicts if text]
    return [f"{sentence}." for sentence in sentences]


def _table(columns: Sequence[Column], rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the headers of a table, and a cell for every row and column."""
    values = [[value(row) for _, _, value in columns] for row in rows]
    return {
        "headers": [{"text": text, "unit": unit} for text, unit, _ in columns],
        # A dict is a cell already.
        "rows": [[v if isinstance(v, dict) else _cell(v) for v in row] for row in values],
    }


def _cell(value: Any, text: str | None = None) -> Cell:
    """Return a cell: the text that it shows, and the number by which it sorts."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    sort_by = ""
    if is_number:
        with suppress(OverflowError):  # an integer beyond all floats
            sort_by = repr(float(value))

    shown = number(value) if text is None else text
    return {"text": shown, "sort": sort_by, "numeric": is_number or value is None}


def _verdict(verdict: Verdict | None) -> Cell:
    """Return the cell of a verdict, whose state gives it its colour."""
    if verdict is None:
        return _cell("–")

    return {**_cell(verdict.words), "state": verdict.state}


def _texts(value: object) -> list[str]:
    """Return a value from a file, which should be a text or a list of texts, as a list of texts."""
    if value is None:
        return []

    return [str(text) for text in value] if isinstance(value, list) else [str(value)]


def _results(section: Section) -> dict[str, Any]:
    """Return the table of results."""

    def proof(data: dict[str, Any]) -> Cell:
        verdicts: dict[str, Verdict] = data["verdicts"]
        # A certificate that holds may prove less than the bound, so that the verdict on the bound
        # says more. One that was rejected is shown as such.
        verdict = verdicts.get("certificate")
        if verdict is None or verdict.state != "rejected":
            verdict = verdicts.get("bound") or verdict

        return _verdict(verdict)

    columns: list[Column] = [
        ("file", "", lambda data: data["file"]),
        ("command", "", lambda data: data.get("command")),
        ("by", "", lambda data: data.get("policy") or data.get("method") or "–"),
        ("objective", "", lambda data: data.get("objective_name") or "–"),
        ("value", section.unit, lambda data: data.get("objective")),
        ("bound", section.unit, lambda data: data.get("bound")),
        ("holds for", "", lambda data: _holds_for(data) or "–"),
        ("gap", "", lambda data: _formatted(data.get("gap"), ".2%")),
        ("status", "", lambda data: data.get("status") or "–"),
        ("schedule", "", lambda data: _verdict(data["verdicts"].get("schedule"))),
        ("bound's proof", "", proof),
    ]
    return _table(columns, section.results)


def _holds_for(data: dict[str, Any]) -> str | None:
    """Return the schedules for which a file's bound holds, if it has one and says so."""
    scope = data.get("scope")
    return str(scope.get("words")) if isinstance(scope, dict) and "bound" in data else None


def _comparison(section: Section, data: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a comparison, with lines of its ends and its notes."""
    lines = []
    for name in ("best_known", "bound"):
        value, words = data.get(name), "none"
        if value is not None:
            words = f"{number(value)} {section.unit}, from {data.get(f'{name}_origin')}"

        lines.append((name.replace("_", " "), words))

    if data.get("bound") is not None and _holds_for(data):
        lines.append(("the bound holds for", str(_holds_for(data))))

    gap = data.get("gap")
    if isinstance(gap, (int, float)) and not isinstance(gap, bool):
        lines.append(("gap", f"{gap:.2%}"))

    lines.append(("output lengths", str(data.get("predictor") or "–")))
    notes = [
        f"{row['policy']}: {note}"
        for row in data["policies"]
        for note in (*_texts(row.get("notes")), *_texts(row.get("error")))
    ]
    rows = _rows_of_policies(data)
    return {
        "file": data["file"],
        "lines": lines,
        "verdict": data["verdicts"].get("bound"),
        "notes": notes,
        **_table(_columns_of_policies(section, data, rows), rows),
    }


def _rows_of_policies(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of policies, with the best known schedule and bounds as far as they are."""
    rows, best = list(data["policies"]), data.get("best")
    if isinstance(best, dict) and data.get("best_known_origin") not in [r["policy"] for r in rows]:
        rows.append(best)
    if isinstance(data.get("bounds"), dict) and data["bounds"]:
        rows.append({"policy": "bound", "metrics": data["bounds"]})

    return rows


def _capacity(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the picture and the table of a capacity. `name`: what identifiers in it begin with."""
    rates = data.get("searched") != "workers"
    what, direction = ("rate scale", "more") if rates else ("workers", "fewer")
    limit = data.get("impossible_rate_scale")
    if not rates:
        limit = data.get("workers", {}).get("impossible")

    impossible = "nothing is proved" if limit is None else f"{what} {number(limit)} or {direction}"
    unit = time_words(data.get("time_unit"))
    slos = ", ".join(f"{name} {number(slo)} {unit}" for name, slo in data.get("slos", {}).items())
    scope = data.get("scope")
    anyone = scope.get("words") if isinstance(scope, dict) else "any schedule"
    columns: list[Column] = [
        ("policy", "", lambda row: row["policy"]),
        ("kind", "", lambda row: "clairvoyant" if row.get("clairvoyant") else ""),
        (what, "", lambda row: row.get("rate_scale" if rates else "workers")),
        ("SLO attainment", "", lambda row: row.get("attainment")),
        ("missed " + ("from" if rates else "with"), "", lambda row: row.get("missed")),
        ("simulations", "s", lambda row: row.get("wall_s")),
    ]
    errors = ((row["policy"], row.get("error")) for row in data["policies"])
    return {
        "title": f"Capacity within SLOs ({data['file']})",
        "figures": [picture("capacity", capacity_of(data), name)],
        "lines": [
            ("attainment", f"{data['attainment']:g} of the requests within all their SLOs"),
            ("SLOs", slos or "columns of the instance"),
            (f"impossible for {anyone}", impossible),
        ],
        "notes": [f"{policy}: {error}" for policy, error in errors if error],
        **_table(columns, data["policies"]),
    }


def _splits(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a picture for each metric, and the intervals of all."""
    file, metrics = data["file"], [str(metric) for metric in data["metrics"]]
    figures = [
        picture("splits", splits_of(data, metric, file), f"{name}-{k}")
        for k, metric in enumerate(metrics)
    ]
    columns: list[Column] = [("split", "", itemgetter("pools"))]
    rows = [{"pools": row["pools"]} for row in data["splits"]]
    for metric in metrics:
        for key in ("bound", "found", "verdict"):
            column = f"{metric}: {key}"
            columns.append((column, "", itemgetter(column)))
            for row, split in zip(rows, data["splits"], strict=True):
                row[column] = split[metric][key]

    about = {"title": f"Splits ({file})", "figures": figures, "lines": [], "notes": []}
    return {**about, **_table(columns, rows)}


def _diagnosis(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return pictures of what changes gain, and of measured beside predicted times."""
    file, first = data["file"], data.get("first") or {}
    figures = [
        picture(*diagnosis_of(data, kind, file), f"{name}-{kind}", 6.0)
        for kind in ("changes", *data["curves"])
    ]
    keys = ("what", "kind", "gain", "low", "high", "how")
    rows = _table([(key, "", itemgetter(key)) for key in keys], data["changes"])
    goal = TABLE[data["objective_name"]].header("second", " ")
    error = "no measured times" if data["error"] is None else f"{data['error']:.1%} off"
    lines = [
        ("first", str(first.get("what", "nothing"))),
        ("gains are of", str(data["gains_of"])),
        ("server", str(data["server"])),
        ("twin", error),
        *((f"{goal}: {words}", number(data[key])) for words, key in _ENDS if data[key] is not None),
    ]
    title = f"What to change ({file})"
    return {"title": title, "figures": figures, "lines": lines, "notes": [], **rows}


_ENDS = (
    ("as it is", "served_value"),
    ("best known within its limits", "best_known"),
    ("bound", "bound"),
)
_OTHERS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "optsched-capacity": _capacity,
    "optsched-splits": _splits,
    "optsched-diagnosis": _diagnosis,
}


def _columns_of_policies(
    section: Section, data: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> list[Column]:
    """Return the columns of a comparison: those of all tables, and what the report has checked."""
    certified, verdicts = data.get("certified"), data["verdicts"]
    policy, kind, objective, *ratios_and_metrics = policy_columns(
        rows, section.time_unit, goal_of_file(data).name
    )
    ratios, metrics = ratios_and_metrics[:2], ratios_and_metrics[2:]  # first to the best known

    def to_ratio(column: Column) -> Column:
        words, unit, value = column
        return words, unit, lambda row: _formatted(value(row), ".4f")

    def to_certified(row: dict[str, Any]) -> Cell:
        # Only a row with a ratio is in the model of the bound.
        value = objective[2](row)
        has_ratio = any(ratio[2](row) is not None for ratio in ratios)
        known = certified and has_ratio and value is not None
        return _formatted(value / certified if known else None, ".4f")

    def schedule_verdict(row: dict[str, Any]) -> Cell:
        # A schedule that was not at hand has no verdict, and a good one needs no further words.
        verdict = verdicts.get(f"schedule of {row['policy']}")
        if verdict is not None and verdict.state != "rejected":
            verdict = verdict._replace(words="")

        return _verdict(verdict)

    columns = [policy, kind, objective, *map(to_ratio, ratios)]
    if certified is not None:
        columns.append(("/ certified", "", to_certified))
    if any(name.startswith("schedule of ") for name in verdicts):
        # The column stands beside the ratios that it confirms, and is visible in a narrow window.
        columns.append(("schedule", "", schedule_verdict))
    if any(map(MEANING[2], rows)):
        columns.append((MEANING[0], "", lambda row: MEANING[2](row) or "–"))

    return [*columns, *metrics]


def _formatted(value: float | None, form: str) -> Cell:
    """Return the cell of a number in a format, or a dash."""
    return _cell(value, "–" if value is None else format(value, form))


def _origins(report: Report) -> dict[str, Any]:
    """Return the table of what files say of how they were made."""

    def maker(origin: dict[str, Any]) -> str:
        words = (origin["command"], origin["method"] or origin["policy"])
        return " ".join(str(word) for word in words if word)

    def spent_s(origin: dict[str, Any]) -> float | None:
        times = [t for t in (origin["build_s"], origin["solve_s"]) if isinstance(t, (int, float))]
        return sum(times) if times else None

    def versions(origin: dict[str, Any]) -> str:
        return ", ".join(f"{name} {text}" for name, text in origin["versions"].items())

    columns: list[Column] = [
        ("file", "", lambda origin: origin["file"]),
        ("format", "", lambda origin: origin["format"]),
        ("made by", "", lambda origin: maker(origin) or "–"),
        ("optsched", "", lambda origin: origin["optsched"] or "–"),
        ("cost model", "", lambda origin: origin["cost_model"] or "–"),
        ("seed", "", lambda origin: _cell(origin["seed"])),
        ("threads", "", lambda origin: _cell(origin["threads"])),
        ("time", "s", spent_s),
        ("versions", "", lambda origin: versions(origin) or "–"),
        ("sha256 of the file", "", lambda origin: origin["sha256"]),
    ]
    return _table(columns, report.origins)
