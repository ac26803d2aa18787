"""Competitive ratios over many instances as an experiment: resumable, and on several machines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.analysis.ratio import ratios
from optsched.experiments.base import Experiment, Row
from optsched.experiments.store import code_version
from optsched.files.outputs import make_folder
from optsched.files.read_write import read_json, write_json
from optsched.problem.instance import canonical_json
from optsched.problem.objective import TOTAL_LATENCY, Objective, parse_objective
from optsched.problem.specs import is_file, parse_spec, read_pairs
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    from optsched.analysis.ratio import Ratio, Study

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
    from optsched.analysis.ratio.measure import check_reference

    check_reference(parameters["reference"], parameters["store"])
    code = [_code(spec) for spec in parameters["policies"]]
    for number in count():
        yield {**parameters, "code": code, "seed": seed + number, "number": number}


def _code(policy: str) -> str:
    """Return the digest of the file that a policy is from; "" for one of the package.

    Such a policy is given as the file and, behind a colon, its name there.
    """
    name = parse_spec(policy)[0]
    file = Path(name.rpartition(":")[0])
    is_own_file = is_file(name) and file.is_file()
    return hashlib.sha256(file.read_bytes()).hexdigest() if is_own_file else ""


def _run(trial: Row) -> Row:
    """Measure every policy on one instance, but for those whose rows the store has.

    A row's file is named after all that the row depends on, the policy's code and that of optsched
    included. So policies may be added to a study without measuring the others again.
    """
    from optsched.workloads.generate import generate, parse_parameters

    given = read_pairs(filter(None, trial["set"]), "set")
    name = trial["generator"]
    instance = generate(name, seed=trial["seed"], **parse_parameters(name, given))
    folder = Path(trial["store"]) / "rows" if trial["store"] else None
    settings = {k: v for k, v in trial.items() if k not in ("policies", "store", "code")}

    def file_of(policy: str) -> Path:
        """Return where a policy's row is kept, by all that it depends on."""
        content = canonical_json({**settings, "policy": [policy, _code(policy), code_version()]})
        return (folder or Path()) / f"{hashlib.sha256(content).hexdigest()[:24]}.json"

    columns: Row = {}
    missing = list(trial["policies"])
    if folder is not None:
        make_folder(folder)
        missing = [policy for policy in missing if not file_of(policy).exists()]
        for policy in trial["policies"]:
            columns |= {} if policy in missing else read_json(file_of(policy))
    if not missing:
        return {"instance": instance.name, "requests": instance.n, **columns}

    study = ratios(
        missing,
        [Problem(instance, trial["cost_model"] or None)],
        trial["reference"],
        objective=trial["objective"],
        seeds=trial["runs"],
        seed=trial["seed"] - trial["number"],  # that of the experiment (`_trials`)
        time_limit_s=trial["time_limit"],
        progress=False,
        store=trial["store"] or None,
        first=trial["number"],
    )
    for row in study.rows:
        columns_of_policy = {f"{row.policy}: {key}": getattr(row, key) for key in _COLUMNS}
        columns_of_policy["uncertified"] = next(iter(study.uncertified), None)
        columns |= columns_of_policy
        if folder is not None:
            write_json(columns_of_policy, file_of(row.policy))

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
    from optsched.analysis.ratio import Study

    policies, reference = tuple(parameters["policies"]), parameters["reference"]
    goal = parse_objective(parameters["objective"])
    done = [row for row in rows if row["failed"] is None]
    all_ratios = [ratio for row in done for ratio in _to_one_reference(row, policies, goal)]
    uncertified = tuple(row["uncertified"] for row in rows if row.get("uncertified"))
    # 0.95 is the confidence of the intervals.
    return Study(policies, reference, tuple(all_ratios), 0.95, seed, unfinished, uncertified, goal)


def _to_one_reference(row: Row, policies: Sequence[str], goal: Objective) -> list[Ratio]:
    """Return the ratios on an instance, all to the best bound and value that any policy's run knew.

    Policies that came later may have been measured when more was known.
    """
    from optsched.analysis.ratio import Ratio

    ratios_of = list[Ratio]()
    for name in policies:
        values_of = {key: row[f"{name}: {key}"] for key in _COLUMNS}
        ratios_of.append(Ratio(name, row["trial"], row["instance"], **values_of))

    bounds = [ratio.bound for ratio in ratios_of if ratio.bound is not None]
    values = [ratio.best_known for ratio in ratios_of if ratio.best_known is not None]
    bound = max(bounds, key=goal.signed, default=None)
    value = min(values, key=goal.signed, default=None)
    # Of signed values less is better. So the best value is the least, and the best bound, which is
    # the tightest, the largest. Without a lower end there is no ratio, and the row says why.
    return [r if r.low is None else r.between(goal, bound, value) for r in ratios_of]


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
        "store": "",
    },
    trials=_trials,
    run=_run,
    summarize=lambda rows: [],
    default_trials=100,
    columns={f"POLICY: {key}": words for key, words in _COLUMNS.items()}
    | {"uncertified": "the instance, if its optimum has no certificate though one was asked for"},
)
