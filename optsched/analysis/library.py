"""The library of instances: read it, verify all that it claims, and check what is to go into it.

Every number of the library can be checked without a solver: `verify` replays the schedules and
checks the certificates. `check` says whether a schedule or a certificate is better than what the
library has, and `adopt` puts it there.

Examples
--------
>>> import optsched
>>> optsched.library.verify(["tiny-n4"])
{}
"""

import datetime
import gzip
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from optsched.bounds.certificate import certified_value, limits_in_words, same_limits
from optsched.bounds.verify import refusal, verify as verify_certificate
from optsched.costs.fleet import Fleet
from optsched.costs.load import load_cost_model
from optsched.files.library import (
    TABLE,
    entry_of,
    instance_file,
    library_folder,
    read_library as read_library,
    sealed,
    write_library,
)
from optsched.files.outputs import check_output, make_folder, write_bytes
from optsched.files.read_write import read_instance, read_json, schedule_from_dict
from optsched.files.strict_json import Place, check_format, json_text
from optsched.judge.evaluate import evaluate
from optsched.judge.evaluation import Evaluation
from optsched.optimize.consistency import end_of, reconcile, rounding
from optsched.optimize.strategies import outside_reason
from optsched.problem.errors import InputError, OptschedError, UsageError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.objective import Objective, parse_objective
from optsched.problem.processes import Processes, in_processes
from optsched.problem.schedule import Schedule
from optsched.workloads.problem import Problem

# Of each kind of file, the field of an entry and the folder.
_KINDS = {"schedule": ("best", "schedules"), "certificate": ("bound", "certificates")}


@dataclass(frozen=True)
class Answer:
    """What `check` says of a schedule or a certificate.

    Attributes
    ----------
    instance : str
        The instance that the file is about.
    verdict : {"better", "not better", "not feasible"}
    words : str
        The answer in words: by how much, or which rule is broken, and by which request.
    value, known : float or None
        The file's value, as judged or checked, and the library's.
    entry : dict or None
        The instance's entry with the file in it, if it is better.
    content : tuple of (str, bytes)
        Which of the entry's two files it is, and the file, if it is better.
    """

    instance: str
    verdict: str
    words: str
    value: float | None = None
    known: float | None = None
    entry: dict[str, Any] | None = None
    content: tuple[str, bytes] = ("", b"")

    @property
    def line(self) -> str | None:
        """The line to put into ``bks.json``, if the file is better."""
        return None if self.entry is None else json.dumps({self.instance: self.entry})[1:-1]


def load(
    name: str, folder: str | Path | None = None, data: Mapping[str, Any] | None = None
) -> Instance:
    """Return an instance of the library.

    Parameters
    ----------
    name : str
        Its name, with or without ``library/``.
    folder : path, optional
        Another library's folder.
    data : mapping, optional
        What `read_library` has returned, which is read otherwise.
    """
    entry_of(name, data or read_library(folder))
    return read_instance(instance_file(name.removeprefix("library/"), folder))


def verify(
    names: Sequence[str] = (),
    *,
    folder: str | Path | None = None,
    jobs: int | None = None,
    tight: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, str]:
    """Replay every schedule and check every certificate of the library, without a solver.

    Parameters
    ----------
    names : sequence of str
        Instances or families. None named: all, and that no file of the folder is left over.
    folder : path, optional
        Another library's folder.
    jobs : int, optional
        Number of processes; default: as many as there are cores, and none for a single instance.
    tight : bool
        Whether a certificate that proves a unit more than its value is wrong, too.
    progress : callable, optional
        Called with the number of instances verified and of all.

    Returns
    -------
    dict of str to str
        What is wrong, by instance. Empty: everything is as the library says.
    """
    data = read_library(folder)
    chosen = select(names, data)
    jobs = max(1, min(jobs or os.cpu_count() or 1, len(chosen)))
    head = {key: data[key] for key in ("release", "families")}
    check_entry = partial(_error_in, head=head, folder=folder, tight=tight)
    items = [(name, data["instances"][name]) for name in chosen]
    errors: dict[str, str] = {} if names else _error_in_table(data, folder)

    if jobs == 1:
        answers = ((k, check_entry(item)) for k, item in enumerate(items))
    else:
        processes = Processes()
        call = partial(processes.call, check_entry)
        answers = in_processes(call, enumerate(items), jobs, processes)  # type: ignore[assignment]

    for done, (k, error) in enumerate(answers, 1):
        if error is not None:
            errors[chosen[k]] = error
        if progress is not None:
            progress(done, len(chosen))

    # Processes end in any order. The answer has that of the library.
    return {name: errors[name] for name in [*chosen, TABLE] if name in errors}


def gap(entry: Mapping[str, Any]) -> float | None:
    """Return the relative gap of an entry's two values, or None without a bound."""
    if entry.get("bound") is None:
        return None

    low, high = sorted((entry["best"]["value"], entry["bound"]["value"]))
    return float((high - low) / high) if high else 0.0


def select(names: Sequence[str], data: Mapping[str, Any]) -> list[str]:
    """Return the instances of some names of instances and families; all if none is named."""
    wanted: list[str] = []
    for name in names:
        family = [key for key, entry in data["instances"].items() if entry["family"] == name]
        if not family:
            entry_of(name, data)  # or the error says what is known

        wanted += family or [name.removeprefix("library/")]

    return list(dict.fromkeys(wanted)) if names else list(data["instances"])


def _error_in_table(data: Mapping[str, Any], folder: str | Path | None) -> dict[str, str]:
    """Return what is wrong with the table as a whole, by its name; empty if nothing is.

    That is another text than the one of its values, or a file of the folder that no entry names.
    `data`: what `read_library` has returned.
    """
    root, entries = library_folder(folder), data["instances"]
    if (root / TABLE).read_text(encoding="utf-8") != json_text(dict(data)):
        return {TABLE: "found another text than the one that optsched writes for its values"}

    known = {root / TABLE}
    for name, entry in entries.items():
        records = [entry[key] for key in ("best", "bound") if entry.get(key)]
        known |= {instance_file(name, root), *(root / record["file"] for record in records)}

    unknown = sorted(file for file in root.rglob("*") if file.is_file() and file not in known)
    if not unknown:
        return {}

    return {TABLE: f"{unknown[0].relative_to(root)}: found a file that no instance names"}


def _error_in(
    item: tuple[str, dict[str, Any]],
    head: Mapping[str, Any],
    folder: str | Path | None,
    tight: bool = False,
) -> str | None:
    """Return what is wrong with all that the library says of an instance, or None.

    `item`: its name and its entry. `head`: the library's fields ``release`` and ``families``,
    which the digests of entries cover. `tight`: as of `verify`.
    """
    name, entry = item
    try:
        if sealed(name, entry, head)["sha256"] != entry["sha256"]:
            raise InputError(f"{TABLE}: sha256: found another digest; expected that of the entry")

        instance = read_instance(instance_file(name, folder))
        for key, value in (("instance_sha256", instance.sha256), ("requests", instance.n)):
            _check_equal(f"{TABLE}: {key}", entry[key], value)

        known, evaluation = _known(instance, entry, folder)
        _check_equal(
            f"{TABLE}: status", entry["status"], _status(instance, entry, evaluation, known)
        )
        # `verify` of `_known` lets a certificate prove more than its value; this does not.
        if tight and entry.get("bound"):
            problem = _problem(instance, entry)
            certificate = read_json(library_folder(folder) / entry["bound"]["file"])
            refusal(_pools(problem, entry) or problem, certificate)
    except OptschedError as error:
        return str(error)

    return None


def _known(
    instance: Instance, entry: Mapping[str, Any], folder: str | Path | None
) -> tuple[dict[str, float | None], Evaluation]:
    """Return the best known value and the bound of an entry, checked anew from their files."""
    known: dict[str, float | None] = {"best": None, "bound": None}
    evaluation: Evaluation | None = None
    # `key`: the field of the entry, ``best`` for a schedule and ``bound`` for a certificate.
    for kind, (key, _) in _KINDS.items():
        record = entry.get(key)
        if record is None:
            continue  # nothing is proved of this instance

        file = library_folder(folder) / record["file"]
        content = file.read_bytes() if file.is_file() else b""
        _check_equal(
            f"{record['file']}: sha256", hashlib.sha256(content).hexdigest(), record["sha256"]
        )
        value, judged_again = _value(instance, entry, kind, read_json(file, expect=kind))
        evaluation = judged_again or evaluation
        # Sums of floats may differ on another machine. Rounds and certificates are exact.
        slack = 0.0
        if judged_again is not None and not instance.in_rounds:
            slack = rounding(judged_again, value)
        # Written with `not`, so that NaN is an error, too. As both differ, `_check_equal` raises.
        if not abs(value - record["value"]) <= slack:
            _check_equal(f"{TABLE}: {key}.value", record["value"], value)

        known[key] = record["value"]

    assert evaluation is not None  # the schema has a best schedule
    return known, evaluation


def _check_equal(place: str, found: object, expected: object) -> None:
    """Raise an InputError with the place if two values differ."""
    if found != expected:
        raise InputError(f"{place}: found {found!r}; expected {expected!r}")


def _value(
    instance: Instance, entry: Mapping[str, Any], kind: str, data: dict[str, Any]
) -> tuple[float, Evaluation | None]:
    """Return the value that a schedule has, or a certificate proves, for an entry's objective.

    `kind`: which of the two `data` is, the object of a file. Only a schedule has an evaluation
    beside it.
    """
    problem = _problem(instance, entry)
    if kind == "schedule":
        return judged(problem, entry, schedule_from_dict(data, instance))

    # An entry on one machine has no pools: then the problem is as it is.
    verify_certificate(_pools(problem, entry) or problem, data)
    if data["objective"] != entry["objective"]:
        raise InputError(f"certificate: found {data['objective']}; expected {entry['objective']}")

    if not same_limits(data, instance):
        raise InputError(
            f"certificate: found one within {limits_in_words(data)}; expected the instance's SLOs"
        )

    return certified_value(instance, data), None


def _problem(instance: Instance, entry: Mapping[str, Any]) -> Problem:
    """Return the problem of an entry on one machine."""
    model = entry.get("cost_model")
    return Problem(instance, None if model is None else load_cost_model(model))


def _pools(problem: Problem, entry: Mapping[str, Any]) -> Problem | None:
    """Return a problem on the machines of an entry: its pools, or equal ones; None for one."""
    workers, cost = entry.get("workers", 1), problem.cost_model
    text = entry.get("pools") or f"{workers}m"
    if workers == 1:
        return None

    return replace(problem, fleet=Fleet.of(text, cost, link=entry.get("link")))


def judged(
    problem: Problem, entry: Mapping[str, Any], schedule: Schedule
) -> tuple[float, Evaluation]:
    """Return the value of a schedule that an entry's bound covers, as judged.

    `problem`: on one machine.
    """
    # Without pools the problem will do: a schedule names its workers, which are counted below.
    pools = _pools(problem, entry) if entry.get("pools") else None
    with warnings.catch_warnings():  # a cost model's range of validity is the instance's matter
        warnings.simplefilter("ignore", UserWarning)
        evaluation = evaluate(pools or problem, schedule)

    workers = entry.get("workers", 1)
    if evaluation.workers > workers:
        raise ViolationError(
            f"workers: found {evaluation.workers}; expected at most {workers}", rule="workers"
        )
    if workers == 1 and (reason := outside_reason(evaluation, problem)) is not None:
        raise ViolationError(f"schedule: {reason}, so that no bound covers it", rule="scope")

    value = parse_objective(entry["objective"]).of(evaluation)
    if value is None:
        raise ViolationError(f"{entry['objective']}: found no value", rule="objective")

    return value, evaluation


def _status(
    instance: Instance,
    entry: Mapping[str, Any],
    evaluation: Evaluation,
    known: Mapping[str, float | None],
) -> str:
    """Return whether the best known value is proved. It is checked that both may be true.

    In seconds a certificate is rounded down, by up to a tick per request. `evaluation`: of the best
    schedule. `known`: the two values, by ``best`` and ``bound``.
    """
    objective = parse_objective(entry["objective"])
    best, bound = known["best"], known["bound"]
    if best is None or bound is None:
        return "open"

    named_best, named_bound = (best, "best known"), (bound, "certificate")
    reconcile(instance, objective, named_best, named_bound, end_of(evaluation))
    slack = 0.0
    if not objective.integral(instance):
        slack = rounding(evaluation, best) + 1e-12 * instance.n  # a tick is 1e-12 s
    return "closed" if _gain(objective, best, bound) <= slack else "open"


def _gain(objective: Objective, known: float, value: float) -> float:
    """Return by how much a value is better than a known one."""
    return float(objective.signed(known) - objective.signed(value))


def check(
    file: str | Path,
    *,
    by: str = "anonymous",
    method: str | None = None,
    seconds: float | None = None,
    threads: int | None = None,
    folder: str | Path | None = None,
) -> Answer:
    """Say whether a schedule or a certificate is better than what the library has.

    Parameters
    ----------
    file : str or Path
        A schedule or a certificate, which names its instance by digest.
    by, method : str, optional
        Who found it, and how.
    seconds : float, optional
        The time that it took.
    threads : int, optional
        The number of threads that it took.
    folder : path, optional
        Another library's folder.

    Returns
    -------
    Answer

    Raises
    ------
    InputError
        The file cannot be read.
    UsageError
        The file is for no instance of the library.
    """
    data, library = read_json(file), read_library(folder)
    with Place(Path(file)):
        kind = check_format(data, tuple(_KINDS))
        if kind == "schedule":  # its columns may lie beside it
            data = schedule_from_dict(data, folder=Path(file).parent).to_dict()

    digest = data.get("instance_sha256")
    names = [k for k, e in library["instances"].items() if e["instance_sha256"] == digest]
    if not names:
        raise UsageError(
            f"{file}: instance_sha256: found {digest}; expected that of an instance of the library"
        )

    origin = {"by": by, "method": method, "seconds": seconds, "threads": threads}
    return answer(names[0], library, data, origin, folder=folder)


def answer(
    name: str,
    library: Mapping[str, Any],
    data: dict[str, Any],
    origin: Mapping[str, Any],
    *,
    folder: str | Path | None = None,
) -> Answer:
    """Say whether a file's content is better than what a library's entry has, if it has any."""
    kind = str(data["format"]).removeprefix("optsched-")
    key, kind_folder = _KINDS[kind]  # the entry's field, ``best`` or ``bound``, and the folder
    entry = entry_of(name, library)
    instance = load(name, folder, library)
    try:
        value, evaluation = _value(instance, entry, kind, data)
    except ViolationError as error:
        return Answer(name, "not feasible", f"rule {error.rule}: {error}")

    known_value = None if entry.get(key) is None else entry[key]["value"]
    words = f"{value}, the first"
    if known_value is not None:
        gain = _gain(parse_objective(entry["objective"]), known_value, value)
        # Sums of floats may differ on another machine. Rounds and certificates are exact.
        slack = rounding(evaluation, value) if evaluation and not instance.in_rounds else 0.0
        # A bound is better on the other side.
        if (gain if evaluation else -gain) <= slack:
            words = f"{value} beside {known_value}"
            return Answer(name, "not better", words, value, known_value)

        words = f"{value} beside {known_value}: better by {abs(gain):g}"

    content = json_text(data).encode()
    # As `write_bytes` packs it; without a time, so that equal contents have equal digests.
    packed = gzip.compress(content, mtime=0)
    record = {
        "value": value,
        "file": f"{kind_folder}/{name}.json.gz",
        "sha256": hashlib.sha256(packed).hexdigest(),
        "date": datetime.date.today().isoformat(),
        **origin,
    }
    new = {**entry, key: record}
    known = {k: None if new.get(k) is None else new[k]["value"] for k in ("best", "bound")}
    if evaluation is None:  # the file is a certificate, and the schedule is the library's
        # Without the entry's bound, which this one replaces, so that it is not checked again.
        _, evaluation = _known(instance, {**entry, "bound": None}, folder)

    new["status"] = _status(instance, new, evaluation, known)
    sealed_entry = sealed(name, new, library)
    return Answer(name, "better", words, value, known_value, sealed_entry, (key, content))


def adopt(answer: Answer, folder: str | Path | None = None) -> None:
    """Put a better schedule or certificate into the library: its file, and the line for it.

    Parameters
    ----------
    answer : Answer
        What `check` has returned.
    folder : path, optional
        Another library's folder.
    """
    data = read_library(folder)
    check_output(library_folder(folder) / TABLE)
    keep(answer, data, folder)
    write_library(data, folder)


def keep(answer: Answer, data: dict[str, Any], folder: str | Path | None = None) -> None:
    """Write a better schedule or certificate, and put its entry into ``data`` for ``bks.json``."""
    if answer.entry is None:
        raise UsageError(f"library: found one that is {answer.verdict}; expected a better one")

    key, content = answer.content
    target = library_folder(folder) / answer.entry[key]["file"]
    make_folder(target.parent)
    write_bytes(content, target)
    data["instances"][answer.instance] = answer.entry
