"""Competitive ratios over many instances as an experiment: resumable, and on several machines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.analysis.ratio import ratios
from optsched.experiments.base import Experiment, Row
from optsched.problem.objective import TOTAL_LATENCY, parse_objective
from optsched.problem.specs import is_file, parse_spec, read_pairs
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    from optsched.analysis.ratio import Study

_COLUMNS = {
    "value": "the objective, as the mean over runs",
    "low": "lower end of the ratio to the reference",
    "high": "its upper end; empty if there is none",
    "error": "why there is no ratio",
    "rule": "the constraint that its schedule breaks; empty if none",
    "bound": "the reference, or what it is not better than",
    "best_known": "the reference, or a schedule's value",
}


def _trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield trials without end, each of which is an instance with a seed of its own."""
    from optsched.analysis.ratio.study import check_reference

    check_reference(parameters["reference"], parameters["certificates"])
    names = (parse_spec(spec)[0] for spec in parameters["policies"])
    files = [Path(name.rpartition(":")[0]) for name in names if is_file(name)]
    code = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
    yield from ({**parameters, "code": code, "seed": k} for k in count(seed))


def _run(trial: Row) -> Row:
    """Measure every policy on one instance."""
    from optsched.workloads.generate import generate, parse_parameters

    given = read_pairs(filter(None, trial["set"]), "set")
    name = trial["generator"]
    instance = generate(name, seed=trial["seed"], **parse_parameters(name, given))
    study = ratios(
        trial["policies"],
        [Problem(instance, trial["cost_model"] or None)],
        trial["reference"],
        objective=trial["objective"],
        seeds=trial["runs"],
        seed=trial["seed"],
        time_limit_s=trial["time_limit"],
        progress=False,
        certificates=trial["certificates"] or None,
    )
    columns = {f"{row.policy}: {key}": getattr(row, key) for row in study.rows for key in _COLUMNS}
    columns["uncertified"] = next(iter(study.uncertified), None)
    return {"instance": instance.name, "requests": instance.n, **columns}


def study_of(
    parameters: Mapping[str, Any], rows: Sequence[Row], seed: int = 0, unfinished: int = 0
) -> Study:
    """Return the ratios of an outcome's rows as a study.

    Parameters
    ----------
    parameters : mapping
        Those of the outcome.
    rows : sequence of dict
        Finished trials.
    seed : int
        Seed of the resampling for the intervals.
    unfinished : int
        Number of instances that have not run.
    """
    from optsched.analysis.ratio import Ratio, Study

    ratios = []
    for row in rows:
        if row["failed"] is None:
            for policy in parameters["policies"]:
                values = {key: row[f"{policy}: {key}"] for key in _COLUMNS}
                ratios.append(Ratio(policy, row["trial"], row["instance"], **values))

    policies, reference = tuple(parameters["policies"]), parameters["reference"]
    without = tuple(row["uncertified"] for row in rows if row.get("uncertified"))
    goal = parse_objective(parameters["objective"])
    return Study(policies, reference, tuple(ratios), 0.95, seed, unfinished, without, goal)


RATIOS = Experiment(
    name="ratios",
    summary="ratios of policies to the optimum, on instances of a generator",
    paper="`optsched ratios`",
    parameters={
        "policies": ["mc-sf"],
        "generator": "jaillet-model-1",
        "set": [""],
        "objective": TOTAL_LATENCY.name,
        "reference": "optimum",
        "cost_model": "",
        "runs": 1,
        "time_limit": 10.0,
        "certificates": "",
    },
    trials=_trials,
    run=_run,
    summarize=lambda rows: [],
    default_trials=100,
    columns={f"POLICY: {key}": words for key, words in _COLUMNS.items()}
    | {"uncertified": "the instance, if its optimum has no certificate though one was asked for"},
)
