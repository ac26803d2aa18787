"""Runs an experiment: trials in any order and number of processes, results in one order."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from optsched import __version__
from optsched.errors import InputError, OptschedError, UsageError
from optsched.experiments import Claim, Experiment, Row, get_experiment
from optsched.experiments.figures import write_figures
from optsched.experiments.store import Store, trial_key
from optsched.files import json_text, write_bytes

MAX_TRIALS = 1_000_000


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an experiment found.

    Parameters
    ----------
    experiment : Experiment
    parameters : dict
    seed : int
    rows : list of dict
        One per trial, in the order of trials.
    claims : list of Claim
    ran, resumed : int
        Trials run now, and taken from the store.
    wall_s : list of float
        Seconds of each trial when it ran.
    """

    experiment: Experiment
    parameters: dict[str, Any]
    seed: int
    rows: list[Row]
    claims: list[Claim]
    ran: int
    resumed: int
    wall_s: list[float]

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json; the same for the same parameters and seed."""
        return {
            "format": "optsched-experiment",
            "version": 1,
            "optsched": __version__,
            "experiment": self.experiment.name,
            "paper": self.experiment.paper,
            "parameters": self.parameters,
            "seed": self.seed,
            "trials": len(self.rows),
            "claims": [
                {"what": c.what, "paper": c.paper, "ours": c.ours, "holds": c.verdict}
                for c in self.claims
            ],
            "columns": dict(self.experiment.columns),
        }


def run_experiment(
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    trials: int | None = None,
    jobs: int = 1,
    engine: str = "local",
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Run a named experiment.

    Parameters
    ----------
    name : str
    settings : mapping, optional
        Parameters that differ from the default; texts are converted.
    trials : int, optional
        How many trials, from the first.
    jobs : int
        Processes; more than 1 needs joblib.
    engine : {"local", "dask"}
        Where the processes are: here, or on the Dask cluster that the environment configures.
    seed : int
    out : path, optional
        Folder for ``results.sqlite``, ``results.csv``, ``timings.csv``, ``summary.json``
        and the figures.
    resume : bool
        Take trials that the folder's store has; else run all again.
    progress : callable, optional
        Called with the number of finished trials and of all.

    Raises
    ------
    InputError, UsageError
        An unknown name, parameter or value; too few jobs; a missing package.
    """
    experiment = get_experiment(name)
    parameters = experiment.settings(settings or {})
    count = trials if trials is not None else experiment.default_trials
    if count is not None and not 1 <= count <= MAX_TRIALS:
        raise InputError(f"trials: {count!r}; 1 to {MAX_TRIALS} is right")
    if jobs < 1:
        raise InputError(f"jobs: {jobs!r}; an integer >= 1 is right")
    if engine not in ("local", "dask"):
        raise InputError(f"engine: {engine!r}; local or dask is right")
    wanted = list(islice(experiment.trials(parameters, seed), count or MAX_TRIALS))
    if not wanted:
        raise InputError(f"experiment {name}: these parameters leave no trial")
    keys = [trial_key(name, trial) for trial in wanted]
    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, tuple[Row, float]] = {}
    with Store(None if folder is None else folder / "results.sqlite") as store:
        if not resume:
            store.forget(name)
        for key in keys:
            stored = store.get(key)
            if stored is not None:
                found[key] = stored
        resumed = len(found)
        todo = {key: trial for key, trial in zip(keys, wanted, strict=True) if key not in found}
        for key, result, wall_s in _finished(experiment.name, todo, jobs, engine):
            store.put(key, name, todo[key], result, wall_s)
            # Read back, so that a resumed run sees the very same values.
            found[key] = store.get(key) or (result, wall_s)
            if progress is not None:
                progress(len(found), len(wanted))
    rows = [
        {"trial": k, **trial, **found[key][0]}
        for k, (key, trial) in enumerate(zip(keys, wanted, strict=True))
    ]
    outcome = Outcome(
        experiment=experiment,
        parameters=parameters,
        seed=seed,
        rows=rows,
        claims=experiment.summarize(rows),
        ran=len(todo),
        resumed=resumed,
        wall_s=[found[key][1] for key in keys],
    )
    if folder is not None:
        write_bytes(csv_text(rows).encode(), folder / "results.csv")
        timings = [{"trial": k, "wall_s": wall} for k, wall in enumerate(outcome.wall_s)]
        write_bytes(csv_text(timings).encode(), folder / "timings.csv")
        write_bytes(json_text(outcome.summary()).encode(), folder / "summary.json")
        write_figures(experiment, rows, outcome.claims, folder)
    return outcome


def _one(name: str, key: str, trial: Row) -> tuple[str, Row, float]:
    begin = time.perf_counter()
    result = get_experiment(name).run(trial)
    return key, result, time.perf_counter() - begin


def _finished(
    name: str, todo: Mapping[str, Row], jobs: int, engine: str
) -> Iterator[tuple[str, Row, float]]:
    """Yield finished trials as they come."""
    if jobs == 1 and engine == "local":
        for key, trial in todo.items():
            yield _one(name, key, trial)
        return
    if find_spec("joblib") is None:
        raise UsageError("jobs: more than 1 needs the package joblib; install it, or use 1")
    joblib: Any = import_module("joblib")
    place: AbstractContextManager[Any] = nullcontext()
    if engine == "dask":
        if find_spec("distributed") is None:
            raise UsageError("engine: dask needs the package dask[distributed]; install it")
        client = import_module("distributed").Client()
        place = joblib.parallel_config(backend="dask", scheduler_host=client.scheduler.address)
    with place:
        pool = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")
        yield from pool(joblib.delayed(_one)(name, key, trial) for key, trial in todo.items())


def csv_text(rows: Sequence[Row]) -> str:
    """Return rows as CSV: columns in order of first appearance, floats with all their digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if row.get(c) is None else row[c] for c in columns])
    return text.getvalue()


def measured(run: Callable[[], Row]) -> Row:
    """Return a trial's results, or the error that made it impossible in the column ``error``."""
    try:
        return {**run(), "error": None}
    except OptschedError as error:
        return {"error": " ".join(str(error).split())}
