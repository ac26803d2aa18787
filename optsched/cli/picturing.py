"""``plot``, ``trace`` and ``report``: pictures, traces and pages of what other commands wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.options import CostModelName, InstanceFile, check_outputs
from optsched.files.sources import (
    cost_model_like,
    instance_for,
    named_file,
    read_source,
    schedule_of,
)
from optsched.problem.errors import InputError, UsageError
from optsched.problem.metrics import time_words
from optsched.problem.objective import TOTAL_LATENCY, first_metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from optsched.judge.timeline import Timeline

SCHEDULE_KINDS = ("gantt", "states", "kv", "batches", "latency", "ttft", "tpot")
DISTRIBUTIONS = ("latency", "ttft", "tpot")


def plot(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RESULT|SCHEDULE|COMPARISON|CERTIFICATE|EXPERIMENT-DIR",
            show_default=False,
            help="What to draw, recognised by its format.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "-o", "--out", metavar="FILE", show_default=False, help="A .png, .svg or .pdf."
        ),
    ],
    instance_file: Annotated[
        str | None,
        typer.Option("--instance", metavar="FILE", help="What schedules were made for."),
    ] = None,
    cost_model: CostModelName = None,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="gantt, states, kv, batches, latency, ttft, tpot of a schedule; progress of a "
            "result; policies of a comparison; prices of a certificate; an experiment's figure.",
        ),
    ] = None,
) -> None:
    """Draw a schedule, a result, a comparison or an experiment."""
    from optsched.show.plot import style

    style.check_suffix(out)
    check_outputs(out)
    if Path(source).is_dir():
        drawn = _experiment(source, kind)
    else:
        form, data, _ = read_source(source, tuple(_DRAWERS))
        drawn = _DRAWERS[form](source, data, kind, instance_file, cost_model)
    style.save(drawn, out)
    print(out)


def trace(
    instance_file: InstanceFile,
    schedule_file: Annotated[
        str, typer.Argument(metavar="SCHEDULE", show_default=False, help="Schedule file (JSON).")
    ],
    out: Annotated[
        str,
        typer.Option(
            "-o", "--out", metavar="FILE", show_default=False, help="A .json or .json.gz."
        ),
    ],
    cost_model: CostModelName = None,
) -> None:
    """Write a schedule as a trace that Perfetto opens (ui.perfetto.dev)."""
    from optsched.files.read_write import read_instance

    if not out.endswith((".json", ".json.gz")):
        raise UsageError(f"--out: {out!r}; a name ending in .json or .json.gz is right")
    instance = read_instance(instance_file)
    check_outputs(out)
    from optsched.judge.timeline import timeline
    from optsched.show.perfetto import write_trace

    schedule, cost = schedule_of(schedule_file, instance, cost_model)
    events = write_trace(timeline(instance, schedule, cost), out)
    print(f"{out}: {events} events; open it in ui.perfetto.dev")


def report(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            show_default=False,
            help="Results, comparisons, certificates, schedules and instances, in any order.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option("-o", "--out", metavar="FILE.html", show_default=False, help="The report."),
    ],
    cost_model: CostModelName = None,
) -> None:
    """Write one HTML file about results, comparisons and schedules; it loads nothing."""
    if not out.endswith((".html", ".htm")):
        raise UsageError(f"--out: {out!r}; a name ending in .html is right")
    check_outputs(out)
    from optsched.show.report import write_report

    write_report(files, out, cost_model=cost_model)
    size = Path(out).stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB, one file")


def _pick(kind: str | None, kinds: Sequence[str], what: str) -> str:
    """Return the kind asked for, or the first."""
    if kind is None:
        return kinds[0]
    if kind not in kinds:
        raise UsageError(f"--kind: {kind!r}; for {what} one of {', '.join(kinds)} is right")
    return kind


def _schedule(
    source: str, data: dict[str, Any], kind: str | None, given: str | None, cost: str | None
) -> Figure:
    kind = _pick(kind, SCHEDULE_KINDS, "a schedule")
    instance = instance_for(data.get("instance_sha256"), given, source)
    schedule, model = schedule_of(source, instance, cost, data=data)
    if kind in DISTRIBUTIONS:
        from optsched.judge.evaluate import evaluate

        judged = evaluate(instance, schedule, model)
        return _distribution({Path(source).stem: judged}, kind, instance.name)
    from optsched.judge.timeline import timeline

    return draw_timeline(timeline(instance, schedule, model), kind)


def draw_timeline(found: Timeline, kind: str) -> Figure:
    """Return the figure of a timeline: gantt, states, kv or batches."""
    from optsched.show import plot as pictures
    from optsched.show.plot import style

    n = found.instance.n
    canvas = style.figure((9.5, min(7.0, 1.8 + 0.18 * n) if kind == "gantt" else 4.5))
    canvas.suptitle(style.plain(found.instance.name, 80), fontsize="medium")
    if kind == "batches":
        upper, lower = canvas.subplots(2, 1, sharex=True)
        pictures.plot_batches(found, ax=upper)
        upper.set_xlabel("")
        pictures.plot_batch_times(found, ax=lower)
        return canvas
    draw: dict[str, Callable[..., Any]] = {
        "gantt": pictures.plot_gantt, "states": pictures.plot_states, "kv": pictures.plot_kv,
    }  # fmt: skip
    draw[kind](found, ax=canvas.subplots())
    return canvas


def _distribution(evaluations: dict[str, Any], metric: str, title: str) -> Figure:
    from optsched.show import plot as pictures
    from optsched.show.plot import style

    canvas = style.figure()
    canvas.suptitle(style.plain(title, 80), fontsize="medium")
    pictures.plot_distribution(evaluations, metric, ax=canvas.subplots())
    return canvas


def _result(
    source: str, data: dict[str, Any], kind: str | None, given: str | None, cost: str | None
) -> Figure:
    progress, named = data.get("progress"), data.get("schedule")
    kinds = ([] if progress is None else ["progress"]) + ([*SCHEDULE_KINDS] if named else [])
    if not kinds:
        raise InputError(
            f"{source}: holds no progress and names no schedule: nothing to draw; a result of "
            "solve, or one made with --schedule-out, is right"
        )
    kind = _pick(kind, kinds, "this result")
    if kind == "progress":
        return _progress(source, data)
    file = named_file(named, source)
    if file is None:
        raise InputError(f"{source}: schedule: {named!r}: no such file, here or beside the result")
    instance = instance_for(data["instance"]["sha256"], given, source)
    schedule, model = schedule_of(file, instance, cost, data.get("cost_model"))
    if kind in DISTRIBUTIONS:
        from optsched.judge.evaluate import evaluate

        name = str(data.get("policy") or data.get("method") or "schedule")
        return _distribution({name: evaluate(instance, schedule, model)}, kind, instance.name)
    from optsched.judge.timeline import timeline

    return draw_timeline(timeline(instance, schedule, model), kind)


def _progress(source: str, data: dict[str, Any]) -> Figure:
    from optsched.show import plot as pictures
    from optsched.show.plot import style

    if len({len(column) for column in data["progress"].values()}) != 1:
        raise InputError(f"{source}: progress: its columns are not of one length")
    metric = first_metric(data.get("objective_name"))
    label = "objective" if metric is None else metric.header(data.get("time_unit"), " ")
    canvas = style.figure((8.0, 4.0))
    title = f"{data['instance']['name']}: {data.get('formulation') or 'bound'} by {data['method']}"
    canvas.suptitle(style.plain(title, 80), fontsize="medium")
    pictures.plot_progress(data["progress"], ax=canvas.subplots(), ylabel=style.plain(label))
    return canvas


def _comparison(
    source: str, data: dict[str, Any], kind: str | None, given: str | None, cost: str | None
) -> Figure:
    from optsched.show import plot as pictures
    from optsched.show.plot import style

    kind = _pick(kind, ("policies", *DISTRIBUTIONS), "a comparison")
    name = data["instance"]["name"]
    if kind in DISTRIBUTIONS:
        from optsched.judge.evaluate import evaluate

        files = {row["policy"]: named_file(row.get("schedule"), source) for row in data["policies"]}
        there = {policy: file for policy, file in files.items() if file is not None}
        if not there:
            raise InputError(
                f"{source}: its policies' schedules are not at hand; `compare --schedules-out DIR` "
                "writes them"
            )
        instance = instance_for(data["instance"]["sha256"], given, source)
        model = cost_model_like(instance, cost, data.get("cost_model"))
        evaluations = {}
        for policy, file in there.items():
            schedule, _ = schedule_of(file, instance, cost, data.get("cost_model"))
            evaluations[policy] = evaluate(instance, schedule, model)
        return _distribution(evaluations, kind, name)
    tel = TOTAL_LATENCY.name
    rows = [row for row in data["policies"] if (row.get("metrics") or {}).get(tel) is not None]
    if not rows:
        raise InputError(f"{source}: policies: none has a schedule; nothing to draw")
    ratios = ("ratio_to_best_known", "ratio_to_bound")
    known = data.get("best_known") is not None or data.get("bound") is not None
    canvas = style.figure((9.5, 1.6 + 0.32 * len(rows)))
    canvas.suptitle(style.plain(name, 80), fontsize="medium")
    pictures.plot_comparison(
        [(row["policy"], row["metrics"][tel]) for row in rows],
        best_known=data.get("best_known"),
        bound=data.get("bound"),
        clairvoyant=[row["policy"] for row in rows if row.get("clairvoyant")],
        outside=[row["policy"] for row in rows if known and not any(map(row.get, ratios))],
        unit=time_words(data.get("time_unit") or "round"),
        ax=canvas.subplots(),
    )
    return canvas


def _certificate(
    source: str, data: dict[str, Any], kind: str | None, given: str | None, cost: str | None
) -> Figure:
    from optsched.show import plot as pictures
    from optsched.show.plot import style

    _pick(kind, ("prices",), "a certificate")
    tree = data["tree"]
    if not isinstance(tree, dict) or tree.get("relaxation") != "prices":
        raise InputError(f"{source}: tree: not a single leaf of prices; only prices can be drawn")
    try:
        scale = int(data.get("denominator") or 1)
        prices = [
            (int(at), int(price) / scale)
            for at, price in zip(tree["from_round"], tree["price"], strict=True)
        ]
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"{source}: tree: from_round and price are not lists of integers of one length"
        ) from None
    canvas = style.figure()
    pictures.plot_shadow_prices(prices, ax=canvas.subplots())
    return canvas


_DRAWERS: dict[str, Callable[..., Any]] = {
    "schedule": _schedule,
    "result": _result,
    "comparison": _comparison,
    "certificate": _certificate,
}


def _experiment(folder: str, kind: str | None) -> Figure:
    from optsched.experiments import get_experiment
    from optsched.experiments.figures import draw_figure, figure_names
    from optsched.experiments.runner import row_of
    from optsched.experiments.store import read

    identity, records = read(folder)
    experiment = get_experiment(identity.experiment)
    rows = [row_of(record) for record in records]
    claims = experiment.summarize(rows)
    names = figure_names(experiment, claims)
    if not names:
        raise InputError(f"{folder}: experiment {experiment.name} declares no figure")
    name = _pick(kind, names, f"experiment {experiment.name}")
    canvas = draw_figure(experiment, name, rows, claims)
    if canvas is None:
        raise InputError(f"{folder}: no trial has what figure {name!r} shows")
    return canvas
