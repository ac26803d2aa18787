"""Runs an experiment: trials in any order, wherever they run, results in one order."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from optsched import __version__
from optsched.experiments import Claim, Experiment, Row, get_experiment
from optsched.experiments.engines import in_processes, in_this_process, on_dask
from optsched.experiments.figures import write_figures
from optsched.experiments.isolation import Answer
from optsched.experiments.store import FILE, Identity, Record, Store, code_version, libraries
from optsched.files.strict_json import csv_text, json_text, reason, write_bytes
from optsched.problem.errors import InputError, OptschedError, UsageError

MAX_TRIALS = 1_000_000
MAX_JOBS = 1024

COMMON_COLUMNS = {
    "trial": "number of the trial, from 0",
    "failed": "why the trial has no results (a crash, too much memory); empty if it has",
}


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an experiment found.

    Parameters
    ----------
    experiment : Experiment
    parameters : dict
    seed : int
    rows : list of dict
        One per trial, in the order of trials; ``failed`` says why a trial has no results, None
        if it has.
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
            "failed": [
                {"trial": row["trial"], "why": row["failed"]}
                for row in self.rows
                if row["failed"] is not None
            ],
            "claims": [
                {"what": c.what, "paper": c.paper, "ours": c.ours, "holds": c.verdict}
                for c in self.claims
            ],
            "columns": {**self.experiment.columns, **COMMON_COLUMNS},
        }


def run_experiment(
    experiment: str | Experiment,
    settings: Mapping[str, Any] | None = None,
    *,
    trials: int | None = None,
    jobs: int = 1,
    engine: str = "local",
    scheduler: str | None = None,
    isolate: bool = False,
    memory_limit: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = True,
    retry_failed: bool = False,
    parquet: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Run an experiment, or what is left of it.

    Parameters
    ----------
    experiment : str or Experiment
        A registered one's name, or one of your own.
    settings : mapping, optional
        Parameters that differ from the default; texts are converted.
    trials : int, optional
        How many trials, from the first.
    jobs : int
        Processes; more than 1 needs joblib.
    engine : {"local", "dask"}
        Processes of this machine, or workers of a Dask cluster.
    scheduler : str, optional
        Address of a Dask scheduler, ``"tcp://host:8786"``, whose workers all take part. None: a
        cluster of ``jobs`` workers on this machine is started for the experiment.
    isolate : bool
        Run the trials in another process also with one job, so that one that crashes is recorded
        as failed. More jobs and Dask's always run so.
    memory_limit : int, optional
        Bytes per trial, solvers' processes included; a trial that uses more is ended and
        recorded as failed. Linux only; implies ``isolate``.
    seed : int
    out : path, optional
        Folder for ``results.sqlite``, ``results.csv``, ``timings.csv``, ``summary.json`` and the
        figures. It belongs to this experiment, these parameters, this seed and this version of
        the code; ``trials`` may grow.
    resume : bool
        Take trials that the folder's store has; else forget them first.
    retry_failed : bool
        Run the trials again that are recorded as failed.
    parquet : bool
        Write ``results.parquet`` too; needs pyarrow.
    progress : callable, optional
        Called with the number of finished trials and of all, before the first and after each.

    Raises
    ------
    InputError, UsageError
        An unknown name, parameter or value; too few jobs; a missing package; a folder that
        belongs to another experiment, cannot be written, is in use or damaged; a full disk.
    KeyboardInterrupt
        Ctrl-C; finished trials are stored.
    """
    if isinstance(experiment, str):
        experiment = get_experiment(experiment)
    parameters = experiment.settings(settings or {})
    count = trials if trials is not None else experiment.default_trials
    here = engine == "local" and jobs == 1 and not isolate and memory_limit is None
    _check(experiment, count, jobs, engine, scheduler, memory_limit, parquet, here)
    try:
        wanted = list(islice(experiment.trials(parameters, seed), count or MAX_TRIALS))
    except OptschedError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in (settings or {}).items())
        raise InputError(
            f"experiment {experiment.name}: no trials can be drawn from {given or 'its defaults'}: "
            f"{error!r}"
        ) from error
    if not wanted:
        raise InputError(f"experiment {experiment.name}: these parameters leave no trial")
    folder = None if out is None else _made(Path(out))
    identity = Identity(experiment.name, parameters, seed, code_version(), libraries())
    with Store(None if folder is None else folder / FILE, identity, fresh=not resume) as store:
        if retry_failed:
            store.forget_failed()
        if store.libraries != identity.libraries:
            warnings.warn(
                f"{out}: its trials were begun with {store.libraries}, these run with "
                f"{identity.libraries}",
                stacklevel=2,
            )
        found = {k: record for k, record in store.records().items() if k < len(wanted)}
        for k, record in found.items():
            if record.key != identity.key(wanted[k]):
                raise InputError(
                    f"{out}: trial {k} is another one now than when it ran (a file that it is "
                    "drawn from has changed?); another --out is right, or --fresh"
                )
        todo = {k: trial for k, trial in enumerate(wanted) if k not in found}
        if progress is not None:
            progress(len(found), len(wanted))

        def keep(k: int, answer: Answer) -> None:
            kind, content, wall_s = answer
            if kind == "refused":
                raise content
            result, failed = (content, None) if kind == "result" else (None, content)
            store.put(k, wanted[k], result, failed, wall_s)

        where: dict[str, Any] = {"code": identity.code, "memory_limit": memory_limit, "jobs": jobs}
        finished = (
            on_dask(experiment.run, todo, keep, scheduler=scheduler, **where)
            if engine == "dask"
            else in_this_process(experiment.run, todo, keep)
            if here
            else in_processes(experiment.run, todo, keep, **where)
        )
        with closing(finished):
            for k in finished:
                # Read back, so that a resumed run sees the very same values.
                found[k] = store.get(k)
                if progress is not None:
                    progress(len(found), len(wanted))
    records = [found[k] for k in range(len(wanted))]
    rows = [row_of(record) for record in records]
    outcome = Outcome(
        experiment=experiment,
        parameters=parameters,
        seed=seed,
        rows=rows,
        claims=experiment.summarize([row for row in rows if row["failed"] is None]),
        ran=len(todo),
        resumed=len(wanted) - len(todo),
        wall_s=[record.wall_s for record in records],
    )
    if folder is not None:
        _export(outcome, folder, parquet)
        write_figures(experiment, outcome.rows, outcome.claims, folder)
    return outcome


def _check(
    experiment: Experiment,
    count: int | None,
    jobs: int,
    engine: str,
    scheduler: str | None,
    memory_limit: int | None,
    parquet: bool,
    here: bool,
) -> None:
    if count is not None and not 1 <= count <= MAX_TRIALS:
        raise InputError(f"trials: {count!r}; 1 to {MAX_TRIALS} is right")
    if not 1 <= jobs <= MAX_JOBS:
        raise InputError(f"jobs: {jobs!r}; 1 to {MAX_JOBS} is right")
    if engine not in ("local", "dask"):
        raise InputError(f"engine: {engine!r}; local or dask is right")
    if scheduler is not None and engine != "dask":
        raise UsageError(f"scheduler: {scheduler!r} is for the engine dask, not {engine}")
    if memory_limit is not None and memory_limit < 1:
        raise InputError(f"memory_limit: {memory_limit!r}; bytes, 1 or more, is right")
    if parquet and find_spec("pyarrow") is None:
        raise UsageError("parquet: needs the package pyarrow; install it, or leave it out")
    home = getattr(getattr(experiment.run, "func", experiment.run), "__module__", None)
    if home == "__main__" and not here:
        raise UsageError(
            f"jobs: other processes need the function of experiment {experiment.name} in a module "
            "that they can import, not in a script or notebook"
        )


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder}: is a file; a folder is right") from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({reason(error)})") from None
    return folder


def row_of(record: Record) -> Row:
    """Return a finished trial as a row of results: its number, parameters, results, failure."""
    return {
        "trial": record.trial, **record.parameters, **record.result, "failed": record.failed,
    }  # fmt: skip


def _export(outcome: Outcome, folder: Path, parquet: bool) -> None:
    write_bytes(rows_as_csv(outcome.rows).encode(), folder / "results.csv")
    timings = [{"trial": k, "wall_s": wall} for k, wall in enumerate(outcome.wall_s)]
    write_bytes(rows_as_csv(timings).encode(), folder / "timings.csv")
    if parquet:
        write_bytes(parquet_bytes(outcome.rows), folder / "results.parquet")
    write_bytes(json_text(outcome.summary()).encode(), folder / "summary.json")


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns in order of first appearance, ``failed`` last."""
    return sorted(dict.fromkeys(key for row in rows for key in row), key=lambda c: c == "failed")


def rows_as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV (`optsched.files.csv_text`): columns in order of first appearance.

    A column ``failed`` comes last.
    """
    columns = columns_of(rows)
    return csv_text(columns, ([row.get(c) for c in columns] for row in rows))


def parquet_bytes(rows: Sequence[Row]) -> bytes:
    """Return rows as a Parquet file with the columns of `rows_as_csv`.

    A column that holds values of several kinds (numbers and texts) becomes one of texts.
    """
    arrow: Any = import_module("pyarrow")
    content: dict[str, Any] = {}
    for column in columns_of(rows):
        values = [row.get(column) for row in rows]
        try:
            content[column] = arrow.array(values)
        except (arrow.ArrowInvalid, arrow.ArrowTypeError):
            content[column] = arrow.array([None if v is None else str(v) for v in values])
    file = io.BytesIO()
    import_module("pyarrow.parquet").write_table(arrow.table(content), file)
    return file.getvalue()


def measured(run: Callable[[], Row]) -> Row:
    """Return a trial's results, or the error that made it impossible in the column ``error``."""
    try:
        return {**run(), "error": None}
    except OptschedError as error:
        return {"error": " ".join(str(error).split())}
