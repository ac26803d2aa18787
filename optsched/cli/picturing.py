"""``plot`` and ``report``: show in pictures what other commands wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.cli.options import UNSET, Given, check_suffix, fleet_from
from optsched.costs.cost import CostModel
from optsched.costs.fleet import stated_fleet
from optsched.files.sources import instance_for, named_file, read_source, schedule_of
from optsched.judge.evaluate import evaluate
from optsched.judge.timeline import Timeline, timeline
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.objective import first_metric, goal_of_file
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DISTRIBUTIONS = ("latency", "ttft", "tpot")
SCHEDULE_KINDS = ("gantt", "states", "kv", "batches", *DISTRIBUTIONS, "gap")


def plot(
    source: str,
    out: str,
    instance_file: str | None = None,
    cost_model: str | None = None,
    kind: str | None = None,
    against: str | None = None,
    machines: Given = UNSET,
) -> None:
    """Draw a schedule, a result, a comparison or an experiment.

    Parameters:
      source FILE|DIR: What to draw: what another command wrote. Its format says what it is.
      out -o --out FILE: Write the figure to this .png, .svg or .pdf file; of a schedule, .json or
        .json.gz is a trace for ui.perfetto.dev.
      instance_file --instance FILE: The instance that the schedules were made for.
      kind KIND: The kind of figure: gantt, states, kv, batches, latency, ttft or tpot for a
        schedule, gap for one --against another, progress for a result, policies for a comparison,
        attainment for a capacity, a metric for splits, changes, latency, ttft or tpot for a
        diagnosis, prices for a certificate, ratios for
        ratios, or the name of an experiment's figure.
      against SCHEDULE: For the kind gap, the schedule to hold against: who loses and gains.
    """
    from optsched.show.plot import style

    if out.endswith((".json", ".json.gz")):
        _write_trace(source, out, instance_file, cost_model, machines)
        return

    style.check_suffix(out)
    # A folder is that of an experiment. Of a file the format says who draws it.
    draw: Callable[[_Source], Figure] = _experiment
    data: dict[str, Any] = {}
    if not Path(source).is_dir():
        form, data, _ = read_source(source, tuple(_DRAWERS))
        draw = _DRAWERS[form]

    what = _Source(source, data, kind, instance_file, cost_model, against, machines)
    style.save(draw(what), out)
    print(out)


def _write_trace(
    source: str, out: str, instance_file: str | None, cost_model: str | None, machines: Given
) -> None:
    """Write a schedule as a trace that Perfetto opens."""
    from optsched.show.perfetto import write_trace

    _, data, _ = read_source(source, ("schedule",))
    instance = instance_for(data.get("instance_sha256"), instance_file, source)
    # None: a schedule's file says of its model no more than the digest.
    schedule, cost = schedule_of(source, instance, cost_model, None, data)
    problem = Problem(instance, fleet_from(cost, machines))
    events = write_trace(timeline(problem, schedule), out)
    print(f"{out}: {events} events; open it in ui.perfetto.dev")


def report(files: list[str], out: str, cost_model: str | None = None) -> None:
    """Write one HTML file about results, which needs no network.

    Parameters:
      files FILE...: Results, comparisons, capacities, splits, diagnoses, certificates, schedules,
        instances, in any order.
      out -o --out FILE.html: Write the report to this .html file.
    """
    check_suffix(out, "--out", ".html", ".htm")
    from optsched.show.report import write_report

    write_report(files, out, cost_model=cost_model)
    print(f"{out}: {Path(out).stat().st_size / 1e6:.1f} MB, one file")


@dataclass(frozen=True)
class _Source:
    """A file to draw, and the options of the command line."""

    path: str
    data: dict[str, Any]
    kind: str | None
    instance_file: str | None
    cost_model: str | None
    against: str | None
    machines: Given

    def pick(self, kinds: Sequence[str], what: str) -> str:
        """Return the kind of figure that is asked for, or the first kind. `what`: the source."""
        kind = self.kind or kinds[0]
        # Only a single schedule is laid out on machines; ``gap``, the last kind, has two of them.
        if self.machines and kind not in SCHEDULE_KINDS[:-1]:
            option = next(iter(self.machines))
            raise UsageError(f"--{option}: found with --kind {kind}; expected none")
        if self.kind is not None and self.kind not in kinds:
            words = f"--kind: found {self.kind!r} for {what}; expected one of {', '.join(kinds)}"
            if self.kind == "gap":
                words += "; gap is for a schedule, --against another"
            raise UsageError(words)

        return kind

    def problem(self, instance: Instance, cost: CostModel | None) -> Problem:
        """Return what a schedule is one of, on the machines of the options or of the file."""
        stated = stated_fleet(self.data, cost)
        return Problem(instance, fleet_from(cost, self.machines, stated))

    def draw_schedule(
        self, label: str, file: str | Path, kind: str, digest: object, known: object = None
    ) -> Figure:
        """Draw a schedule over time, or the distribution of a metric over its requests.

        `label`: what a distribution calls it. `digest`: that of its instance. `known`: the cost
        model that a result names, if there is none among the options.
        """
        instance = instance_for(digest, self.instance_file, self.path)
        data = self.data if file == self.path else None  # the source itself is read already
        schedule, cost = schedule_of(file, instance, self.cost_model, known, data)
        problem = self.problem(instance, cost)
        if (kind == "gap") != (self.against is not None):
            raise UsageError("--kind gap, --against: found one of them; expected both")
        if self.against is not None:
            from optsched.analysis.why import why

            other, _ = schedule_of(self.against, instance, self.cost_model, known)
            title = f"{instance.name}: {file} against {self.against}"
            return _picture("gap", why(problem, schedule, against=other), title=title)
        if kind not in DISTRIBUTIONS:
            return draw_timeline(timeline(problem, schedule), kind)

        judged = {label: evaluate(problem, schedule)}
        return _picture("distribution", judged, kind, title=instance.name)


def _canvas(title: str, size: tuple[float, float]) -> Figure:
    """Return an empty figure with a title. `size`: width and height in inches."""
    from optsched.show.plot import style

    canvas = style.figure(size)
    if title:
        canvas.suptitle(style.plain(title, 80), fontsize="medium")

    return canvas


def _picture(
    name: str, *data: Any, title: str, size: tuple[float, float] = (8.0, 4.5), **more: Any
) -> Figure:
    """Draw one picture by the name that its function has after ``plot_``."""
    from optsched.show import plot as pictures

    canvas = _canvas(title, size)
    getattr(pictures, f"plot_{name}")(*data, ax=canvas.subplots(), **more)
    return canvas


def draw_timeline(found: Timeline, kind: str) -> Figure:
    """Return the figure of a timeline: gantt, states, kv or batches."""
    name, height = found.instance.name, 4.5
    if kind == "gantt":  # with a line for each request, as far as a page has room
        height = min(7.0, 1.8 + 0.18 * found.instance.n)

    size = (9.5, height)
    if kind != "batches":
        return _picture(kind, found, title=name, size=size)

    from optsched.show import plot as pictures

    canvas = _canvas(name, size)
    upper, lower = canvas.subplots(2, 1, sharex=True)
    pictures.plot_batches(found, ax=upper)
    upper.set_xlabel("")
    pictures.plot_batch_times(found, ax=lower)
    return canvas


def _schedule(source: _Source) -> Figure:
    kind = source.pick(SCHEDULE_KINDS, "a schedule")
    label, digest = Path(source.path).stem, source.data.get("instance_sha256")
    return source.draw_schedule(label, source.path, kind, digest)


def _result(source: _Source) -> Figure:
    """Draw the progress of a result, or its schedule."""
    path, data = source.path, source.data
    schedule_name = data.get("schedule")
    # By default the first kind is drawn: the progress, if the result has it.
    kinds = [] if data.get("progress") is None else ["progress"]
    if schedule_name:
        kinds += SCHEDULE_KINDS
    if not kinds:
        raise InputError(
            f"{path}: found no progress and no schedule to draw; expected a result of solve, or "
            "one made with --schedule-out"
        )

    kind = source.pick(kinds, "this result")
    if kind == "progress":
        return _progress(path, data)

    file = named_file(schedule_name, path)
    if file is None:
        raise InputError(
            f"{path}: schedule: found no file {schedule_name!r}; expected it here or beside the "
            "result"
        )

    label = str(data.get("policy") or data.get("method") or "schedule")
    digest = data["instance"]["sha256"]
    return source.draw_schedule(label, file, kind, digest, data.get("cost_model"))


def _progress(path: str, data: dict[str, Any]) -> Figure:
    """Draw how incumbent and bound of a result came closer."""
    from optsched.show.plot import style

    if len({len(column) for column in data["progress"].values()}) != 1:
        raise InputError(f"{path}: progress: found columns of different lengths; expected one")

    metric = first_metric(data.get("objective_name"))
    label = "objective" if metric is None else metric.header(data.get("time_unit"), " ")
    title = f"{data['instance']['name']}: {data.get('formulation') or 'bound'} by {data['method']}"
    columns = data["progress"]
    return _picture("progress", columns, title=title, size=(8.0, 4.0), ylabel=style.plain(label))


def _comparison(source: _Source) -> Figure:
    """Draw the objective of the policies of a comparison, or a distribution over requests."""
    path, data = source.path, source.data
    kind = source.pick(("policies", *DISTRIBUTIONS), "a comparison")
    if kind in DISTRIBUTIONS:
        return _distributions(source, kind)

    goal = goal_of_file(data)
    rows = [
        row for row in data["policies"] if (row.get("metrics") or {}).get(goal.name) is not None
    ]
    if not rows:
        raise InputError(f"{path}: policies: found none with a schedule; expected at least one")

    # A row without ratios, where others may have them, is outside the model of the bound.
    has_ends = data.get("best_known") is not None or data.get("bound") is not None
    ratio_fields = ("ratio_to_best_known", "ratio_to_bound")
    without_ratio = [row["policy"] for row in rows if not any(map(row.get, ratio_fields))]
    return _picture(
        "comparison",
        [(row["policy"], row["metrics"][goal.name]) for row in rows],
        best_known=data.get("best_known"),
        bound=data.get("bound"),
        clairvoyant=[row["policy"] for row in rows if row.get("clairvoyant")],
        outside=without_ratio if has_ends else [],
        label=goal.header(data.get("time_unit") or "round", " ").replace("TEL", "total latency"),
        title=data["instance"]["name"],
        size=(9.5, 1.6 + 0.32 * len(rows)),
    )


def _capacity(source: _Source) -> Figure:
    from optsched.show.data import capacity_of

    source.pick(("attainment",), "a capacity")
    return _picture("capacity", title=source.data["instance"]["name"], **capacity_of(source.data))


def _splits(source: _Source) -> Figure:
    from optsched.show.data import splits_of

    name = source.pick(tuple(source.data["metrics"]), "splits")
    drawn = splits_of(source.data, name, source.path)
    return _picture("splits", title=source.data["instance"]["name"], **drawn)


def _diagnosis(source: _Source) -> Figure:
    from optsched.show.data import diagnosis_of

    name = source.pick(("changes", *DISTRIBUTIONS), "a diagnosis")
    picture, drawn = diagnosis_of(source.data, name, source.path)
    return _picture(picture, title=source.data["instance"]["name"], size=(9.5, 6.0), **drawn)


def _distributions(source: _Source, kind: str) -> Figure:
    """Draw a distribution for every policy whose schedule has a file."""
    path, data = source.path, source.data
    judged = {}
    instance = instance_for(data["instance"]["sha256"], source.instance_file, path)
    rows = data["policies"] + ([data["best"]] if data.get("best") else [])
    for row in rows:
        file = named_file(row.get("schedule"), path)
        if file is not None:
            schedule, cost = schedule_of(file, instance, source.cost_model, data.get("cost_model"))
            judged[row["policy"]] = evaluate(source.problem(instance, cost), schedule)

    if not judged:
        raise InputError(
            f"{path}: found no schedule of its policies; `compare --schedules-out DIR` writes them"
        )

    return _picture("distribution", judged, kind, title=instance.name)


def _certificate(source: _Source) -> Figure:
    """Draw the prices of a certificate, which are whole numbers over a denominator."""
    source.pick(("prices",), "a certificate")
    tree = source.data["tree"]
    if not isinstance(tree, dict) or tree.get("relaxation") != "prices":
        raise InputError(
            f"{source.path}: tree: found another tree; expected a single leaf of prices, since "
            "only prices can be drawn"
        )

    try:
        denominator = int(source.data.get("denominator") or 1)
        pieces = zip(tree["from_round"], tree["price"], strict=True)
        prices = [(int(since), int(price) / denominator) for since, price in pieces]
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"{source.path}: tree: found no two such lists in from_round and price; expected "
            "lists of integers of one length"
        ) from None

    return _picture("shadow_prices", prices, title="")


def _ratios(source: _Source) -> Figure:
    source.pick(("ratios",), "ratios")
    columns = source.data["ratios"]
    if len({len(columns.get(name, ())) for name in ("policy", "low", "high")}) != 1:
        raise InputError(f"{source.path}: ratios: found no policy, low and high of one length")

    return _picture("ratios", columns, reference=source.data["reference"], title="ratios")


_DRAWERS: dict[str, Callable[[_Source], Figure]] = {
    "schedule": _schedule,
    "result": _result,
    "capacity": _capacity,
    "splits": _splits,
    "diagnosis": _diagnosis,
    "comparison": _comparison,
    "certificate": _certificate,
    "ratios": _ratios,
}


def _experiment(source: _Source) -> Figure:
    """Draw a figure of an experiment from the trials in its folder."""
    from optsched.experiments import get_experiment
    from optsched.experiments.figures import figures_of
    from optsched.experiments.store import read

    folder = source.path
    identity, records = read(folder)
    experiment = get_experiment(identity.experiment)
    rows = [record.row for record in records]
    claims = experiment.summarize(rows)
    figures = figures_of(experiment, claims)
    if not figures:
        raise InputError(f"{folder}: found no figure in the experiment {experiment.name}")

    name = source.pick(tuple(figures), f"experiment {experiment.name}")
    canvas = figures[name].draw(experiment, rows)
    if canvas is None:
        raise InputError(f"{folder}: found no trial with the columns of figure {name!r}")

    return canvas
