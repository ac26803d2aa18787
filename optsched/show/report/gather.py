"""Collect the content of a report from files, as plain values that are not escaped yet.

`data` is the JSON object of a `file`, `form` its format, `digest` that of the instance that it is
about, and `cost` the cost model that the user gave, if any. A `Section` is all about one instance.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from optsched.bounds.certificate import (
    chain_in_words,
    limits_in_words,
    same_cost_model,
    same_limits,
    verify_certificate,
)
from optsched.bounds.checker.seconds import CAPACITY, IN_TIME
from optsched.costs.fleet import stated_fleet
from optsched.files.read_write import instance_from_dict, named_instance, shipped_instance
from optsched.files.sources import cost_model_like, named_file, read_source, schedule_of
from optsched.files.strict_json import Place, read_json, stem
from optsched.judge.timeline import Timeline, timeline
from optsched.optimize.consistency import AGREEMENT
from optsched.problem.errors import InputError, OptschedError, UsageError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.markup import number
from optsched.problem.metrics import TABLE, time_words
from optsched.problem.objective import TOTAL_LATENCY, first_metric, goal_of_file, parse_objective
from optsched.problem.scope import ONE_WORKER
from optsched.workloads.problem import Problem

# Formats with the instance's name.
_NAMING = ("result", "comparison", "capacity", "splits", "diagnosis")

MAX_TIMELINES = 4
"""Max number of schedules of one instance drawn over time: first those of files, then the best."""

MAX_DISTRIBUTIONS = 8
"""Max number of schedules of one instance whose distributions are drawn."""


class Verdict(NamedTuple):
    """The outcome of a check, in words too."""

    state: Literal["verified", "rejected", "unchecked"]
    words: str


@dataclass(eq=False)
class Section:
    """The part of a report about one instance, which is None if its file is not at hand.

    ``results``, ``comparisons`` and ``others`` are the objects of the files. Each has the name of
    its ``file``, and the first two have ``verdicts`` by the thing checked. ``schedules`` are by
    label: first those of files, then the best. ``facts`` are what is known of the instance, a name
    and words each, and ``certificates`` the names of files and the verdicts on them. ``notes`` say
    what could not be shown. ``checked`` has the verdicts on certificates by their paths, and
    ``proved`` the verified ones, each with the value that it proves.
    """

    sha256: str
    name: str
    instance: Instance | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    certificates: list[tuple[str, Verdict]] = field(default_factory=list)
    schedules: dict[str, Timeline] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    checked: dict[str, Verdict] = field(default_factory=dict)
    proved: list[tuple[dict[str, Any], float]] = field(default_factory=list)

    def certified(self, data: Mapping[str, Any], cost: str | None = None) -> float | None:
        """The tightest bound that a certificate proves on the objective of a result or comparison.

        It is one for one worker, and in seconds for the result's cost model or the given one.
        """
        if (data.get("workers") or 1) > 1 or data.get("pools") is not None:
            return None

        goal = data.get("objective_name") or TOTAL_LATENCY.name
        proofs = [(proof, value) for proof, value in self.proved if self._is_about(goal, proof)]
        if proofs and self.instance is not None and not self.instance.in_rounds:
            try:
                model = cost_model_like(self.instance, cost, data.get("cost_model"))
            except OptschedError:
                return None  # it is not known, so no certificate is surely of it

            proofs = [(proof, value) for proof, value in proofs if same_cost_model(proof, model)]

        tightest = min if goal_of_file(data).sense == "max" else max
        return tightest((value for _, value in proofs), default=None)

    def _is_about(self, goal: str, certificate: Mapping[str, Any]) -> bool:
        """Whether a certificate is of an objective, and of its limits."""
        # `IN_TIME`: the metric slo_attainment, of which the limits have to be the same, too.
        if self.instance is None or certificate["objective"] != IN_TIME:
            return bool(certificate["objective"] == goal)
        try:
            objective = parse_objective(goal)
        except OptschedError:
            return False

        limits = dict(objective.parameters)
        return objective.name == IN_TIME and same_limits(certificate, self.instance, limits)

    @property
    def unit(self) -> str:
        """The unit of times in words, or an empty text if it is not known."""
        return time_words(self.time_unit)

    @property
    def time_unit(self) -> str | None:
        """The instance's time unit, or None if it is not known."""
        if self.instance is not None:
            return self.instance.time_unit

        files = (*self.results, *self.comparisons, *self.others)
        return next((data["time_unit"] for data in files if data.get("time_unit")), None)


# A file that is no instance: its name, its format and its object.
_Answer = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Report:
    """The sections of a report, one per instance, and the origin of each file."""

    sections: list[Section]
    origins: list[dict[str, Any]]


def gather(files: Sequence[str | Path], cost_model: str | None = None) -> Report:
    """Read files and check everything in them that can be checked."""
    if not files:
        raise UsageError(
            "report: found no file; expected results, comparisons, capacities, certificates, "
            "schedules or instances"
        )

    answers: list[_Answer] = []
    instances: dict[str, Instance] = {}  # by digest
    origins = []
    for name in files:
        file = str(name) if Path(name).exists() else str(named_instance(name))
        form, data, digest = read_source(file, (*_ADD, "instance"))
        origins.append(_origin(file, form, data, digest))
        if form == "instance":
            with Place(Path(file)):
                instance = instance_from_dict(data, name=stem(Path(file)))

            instances[instance.sha256] = instance
        else:
            answers.append((file, form, data))

    if len(instances) == 1:  # schedules that name no instance are taken for this one's
        for _, form, data in answers:
            if form == "schedule" and data.get("instance_sha256") is None:
                data["instance_sha256"] = next(iter(instances))

    # Instances that no file has may be shipped ones. There is a section for each that is at hand or
    # that a file is about.
    digests = dict.fromkeys(_digest(form, data) for _, form, data in answers)
    missing = [shipped_instance(digest) for digest in digests if digest not in instances]
    shipped = [instance for instance in missing if instance is not None]
    instances |= {one.sha256: one for one in sorted(shipped, key=lambda one: one.name)}

    sections = {
        digest: _section(digest, instances.get(digest), answers)
        for digest in dict.fromkeys([*instances, *digests])
    }
    # `_ADD` has a function for each format. Certificates come first, whose verdicts results and
    # comparisons show.
    for file, form, data in sorted(answers, key=lambda answer: list(_ADD).index(answer[1])):
        _ADD[form](sections[_digest(form, data)], file, data, cost_model)
    for section in sections.values():
        _check_results(section, cost_model)

    return Report(list(sections.values()), origins)


def _digest(form: str, data: Mapping[str, Any]) -> str:
    """Return the digest of the instance that a file is about; "None" if it names none."""
    if form in _NAMING:
        return str(data["instance"]["sha256"])

    return str(data.get("instance_sha256"))


def _origin(file: str, form: str, data: Mapping[str, Any], digest: str) -> dict[str, Any]:
    """Return what a file says of how it was made. `digest`: its own."""
    names = ("command", "optsched", "method", "policy", "seed", "threads", "build_s", "solve_s")
    cost = data.get("cost_model")
    return {
        "file": Path(file).name,
        "format": form,
        "sha256": digest,
        **{name: data.get(name) for name in names},
        "cost_model": cost.get("name") if isinstance(cost, dict) else None,
        "versions": data.get("versions") if isinstance(data.get("versions"), dict) else {},
    }


def _section(digest: str, instance: Instance | None, answers: Sequence[_Answer]) -> Section:
    """Return the section of an instance, with facts of it from its own file or from another."""
    if instance is not None:
        facts = [(name, number(v)) for name, v in instance.facts() if v is not None]
        return Section(digest, instance.name, instance, facts)
    for _, form, data in answers:
        # `_NAMING`: formats of files that say what the instance is called.
        if form in _NAMING and _digest(form, data) == digest:
            about = data["instance"]
            section = Section(digest, str(about["name"]))
            section.facts = [("requests", f"{about['requests']:,}")]
            section.notes.append(
                "the instance's file is not at hand: no schedule could be checked "
                "or drawn; a report of both files shows them"
            )

            return section

    return Section(digest, "unknown", notes=["the instance's file is not at hand"])


def _add_result(section: Section, file: str, data: dict[str, Any], cost: str | None) -> None:
    """Add a result, and its certificate and its schedule if their files are at hand."""
    entry = {**data, "file": Path(file).name, "verdicts": {}}
    section.results.append(entry)
    for kind in ("certificate", "schedule"):
        named = data.get(kind)
        place = named_file(named, file)
        if named and place is None:
            entry["verdicts"][kind] = Verdict("unchecked", f"{named}: no such file here")
        elif place is not None and kind == "certificate":
            entry["verdicts"][kind] = _certificate(section, str(place), None)
        elif place is not None:
            label = str(data.get("policy") or data.get("method") or place.name)
            # None: the schedule is read from its own file; `data` says what it runs on.
            entry["label"] = _schedule(section, place, None, label, cost, data)


def _add_comparison(section: Section, file: str, data: dict[str, Any], cost: str | None) -> None:
    """Add a comparison, and the schedules of its policies, the best ones first, if at hand."""
    verdicts: dict[str, Verdict] = {}
    entry = {**data, "file": Path(file).name, "verdicts": verdicts}
    section.comparisons.append(entry)
    rows = [row for row in data["policies"] if row.get("metrics") and not row.get("measured")]
    best = data.get("best")
    rows += [best] if isinstance(best, dict) and best.get("schedule") else []
    goal, missing = goal_of_file(data), 0
    rows.sort(key=lambda row: row["metrics"].get(goal.name) or 0, reverse=goal.sense == "max")
    for row in rows:
        place = named_file(row.get("schedule"), file)
        if place is None:
            missing += 1
            continue

        label = str(row["policy"])
        # None: the schedule is read from its own file; `data` says what it runs on.
        key = _schedule(section, place, None, label, cost, data)
        if key is not None:
            verdict = _compare_with_judge(section, key, goal.name, row["metrics"].get(goal.name))
            verdicts[f"schedule of {label}"] = verdict

    if missing:
        section.notes.append(
            f"{missing} schedules of {Path(file).name} are not at hand and not drawn; `compare "
            "--schedules-out DIR` keeps them"
        )


def _add_other(section: Section, file: str, data: dict[str, Any], _: str | None) -> None:
    section.others.append({**data, "file": Path(file).name})


# The functions that add a file to its section, in the order in which files are taken.
_ADD: dict[str, Callable[[Section, str, dict[str, Any], str | None], object]] = {
    "certificate": lambda section, file, data, _: _certificate(section, file, data),
    "schedule": lambda section, file, data, cost: _schedule(
        section, Path(file), data, Path(file).stem, cost
    ),
    "result": _add_result,
    "comparison": _add_comparison,
    **dict.fromkeys(("capacity", "splits", "diagnosis"), _add_other),
}


def _certificate(section: Section, file: str, data: dict[str, Any] | None) -> Verdict:
    """Check a certificate, once per file, and return the verdict. `data`: None to read the file."""
    place = os.path.realpath(file)
    if place in section.checked:
        return section.checked[place]

    verdict = Verdict("unchecked", "its instance is not at hand")
    if section.instance is not None:
        try:
            certificate = read_json(file, expect="certificate") if data is None else data
            value = verify_certificate(section.instance, certificate)
        except (InputError, ViolationError) as error:
            # These two rules say that the checker does not check it, and not that it is wrong.
            unknown = getattr(error, "rule", "") in ("certificate_size", "certificate_pools")
            verdict = Verdict("unchecked" if unknown else "rejected", str(error))
        else:
            words = _proved_in_words(section.instance, certificate, value)
            verdict = Verdict("verified", words)
            section.proved.append((certificate, value))

    section.certificates.append((Path(file).name, verdict))
    section.checked[place] = verdict
    return verdict


def _proved_in_words(instance: Instance, certificate: Mapping[str, Any], value: float) -> str:
    """Return what a verified certificate proves."""
    if certificate["objective"] == CAPACITY:
        return f"{chain_in_words(instance, certificate)} ({ONE_WORKER.machines})"

    metric = TABLE[certificate["objective"]]
    claim = f"no schedule {ONE_WORKER.machines} has less"
    if metric.sense == "max":
        claim = f"no schedule {ONE_WORKER.machines} has more, within {limits_in_words(certificate)}"
    if certificate["claim"] == "optimal":
        claim = f"optimal {ONE_WORKER.machines}"

    unit = " s" if metric.unit == "time" and not instance.in_rounds else ""
    words = "total latency" if metric.name == TOTAL_LATENCY.name else metric.words
    return f"{words} {number(value)}{unit} is proved ({claim})"


def _schedule(
    section: Section,
    file: Path,
    data: dict[str, Any] | None,
    label: str,
    cost: str | None,
    source: Mapping[str, Any] = MappingProxyType({}),
) -> str | None:
    """Add a schedule under a label of its own. Returns the label, or None if it cannot be drawn.

    `data`: the schedule's object, None to read it. `source`: the file that names the schedule, and
    what it runs on.
    """
    if section.instance is None:
        section.notes.append(f"{file.name}: its instance is not at hand: not drawn")
        return None

    schedule, model = schedule_of(file, section.instance, cost, source.get("cost_model"), data)
    labels = chain([label], (f"{label} ({k})" for k in count(2)))
    unique = next(label for label in labels if label not in section.schedules)
    try:
        problem = Problem(section.instance, stated_fleet(source, model) or model)
        section.schedules[unique] = timeline(problem, schedule)
    except OptschedError as error:
        error.args = (f"{file}: {error}",)
        raise

    return unique


def _compare_with_judge(section: Section, label: str, name: str, claimed: float | None) -> Verdict:
    """Compare a metric that a file claims with the evaluation's."""
    value = section.schedules[label].evaluation.metrics.get(name)
    words = f"replayed by the judge: {name} {value}"
    if value is None or claimed is None or abs(value - claimed) > 1e-6 * max(1.0, abs(value)):
        return Verdict("rejected", f"{words}, not {claimed}")

    return Verdict("verified", words)


def _check_results(section: Section, cost: str | None) -> None:
    """Check the objectives of results by evaluating their schedules, and bounds by certificates."""
    for entry in section.results:
        label = entry.get("label")  # of its schedule, if that is at hand (`_add_result`)
        if label is not None:
            metric = first_metric(entry.get("objective_name") or TOTAL_LATENCY)
            name = str(entry.get("objective_name")) if metric is None else metric.name
            verdict = _compare_with_judge(section, label, name, entry.get("objective"))
            entry["verdicts"]["schedule"] = verdict

    for entry in (*section.results, *section.comparisons):
        bound, proved = entry.get("bound"), section.certified(entry, cost)
        reason = entry.get("certificate_missing")
        entry["certified"] = proved
        of_latency = entry.get("objective_name", TOTAL_LATENCY.name) == TOTAL_LATENCY.name
        # Of other objectives, files need not say why they have no certificate.
        has_no_verdict = proved is None and reason is None and not of_latency
        if bound is None or has_no_verdict:
            continue

        is_upper = goal_of_file(entry).sense == "max"
        words = "no certificate is at hand" + (f", since {reason}" if reason else "")
        if proved is not None:
            part = "" if is_upper else " of it"
            words = f"{number(proved)}{part} is proved by a certificate"

        verdict = Verdict("unchecked", f"as the file says; {words}")
        # The bound is verified if a certificate proves as much as it says, or more.
        # In seconds a bound in float64 and its exact proof differ by the rounding of both.
        noise = 0.0 if section.time_unit == "round" else AGREEMENT * bound
        if proved is not None and (proved - bound if is_upper else bound - proved) <= noise:
            verdict = Verdict("verified", "by a certificate")

        entry["verdicts"]["bound"] = verdict
