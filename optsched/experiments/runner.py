"""Run an experiment. Trials finish in any order and on any engine; results have one order."""

import pickle
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from optsched.experiments.base import Experiment, Row, Run
from optsched.experiments.engines import Answers, on_dask, on_this_machine
from optsched.experiments.figures import write_figures
from optsched.experiments.registry import get_experiment
from optsched.experiments.results import Outcome
from optsched.experiments.store import FILE, Identity, code_version, libraries, open_store
from optsched.files.outputs import make_folder
from optsched.problem.errors import InputError, OptschedError, UsageError

MAX_TRIALS = 1_000_000
MAX_JOBS = 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """How an experiment runs, and where its results go.

    Parameters
    ----------
    trials : int, optional
        How many trials run, counted from the first. By default the experiment says it.
    jobs : int
        How many trials run at a time.
    engine : {"local", "dask"}
        Whether processes of this machine run the trials, or workers of a Dask cluster.
    scheduler : str, optional
        Address of a Dask scheduler, such as ``"tcp://host:8786"``, all of whose workers take part.
        Without it, ``engine="dask"`` starts a cluster of ``jobs`` workers on this machine.
    isolate : bool
        Whether the trials run in another process even with one job, so that a trial that crashes
        is recorded as failed. With more jobs and with Dask they always do.
    seed : int
        Seed from which the trials are drawn.
    out : path, optional
        Folder for ``results.sqlite``, ``results.csv``, ``timings.csv``, ``summary.json`` and the
        figures. It belongs to one experiment with its parameters, seed and version of the code.
        ``trials`` may be larger in a later run.
    resume : bool
        Whether to keep the finished trials in the folder's store. Otherwise they are deleted.
    retry_failed : bool
        Whether to run the trials again that are recorded as failed.
    progress : callable, optional
        ``progress(finished, all)`` is called with numbers of trials, before the first trial and
        after each.
    """

    trials: int | None = None
    jobs: int = 1
    engine: str = "local"
    scheduler: str | None = None
    isolate: bool = False
    seed: int = 0
    out: str | Path | None = None
    resume: bool = True
    retry_failed: bool = False
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.trials is not None and not 1 <= self.trials <= MAX_TRIALS:
            raise InputError(f"trials: found {self.trials!r}; expected 1 to {MAX_TRIALS}")
        if not 1 <= self.jobs <= MAX_JOBS:
            raise InputError(f"jobs: found {self.jobs!r}; expected 1 to {MAX_JOBS}")
        if self.engine not in ("local", "dask"):
            raise InputError(f"engine: found {self.engine!r}; expected local or dask")
        if self.scheduler is not None and self.engine != "dask":
            raise UsageError(
                f"scheduler: found {self.scheduler!r} with the engine {self.engine}; expected the "
                "engine dask"
            )

    @property
    def here(self) -> bool:
        """Whether trials run in this process."""
        return self.engine == "local" and self.jobs == 1 and not self.isolate


def run_experiment(
    experiment: str | Experiment, settings: Mapping[str, Any] | None = None, **options: Any
) -> Outcome:
    """Run an experiment, or the trials of it that are not finished yet.

    Parameters
    ----------
    experiment : str or Experiment
        The name of a registered experiment, or an experiment of your own.
    settings : mapping, optional
        Parameters that differ from the default values. Texts are converted.
    **options
        The fields of `Options`: ``trials``, ``jobs``, ``engine``, ``scheduler``, ``isolate``,
        ``seed``, ``out``, ``resume``, ``retry_failed`` and ``progress``.

    Returns
    -------
    Outcome

    Raises
    ------
    InputError, UsageError
        A name, parameter or value is unknown or out of range, or a package is missing. The folder
        belongs to another experiment, cannot be written, is in use or damaged, or the disk is
        full.
    KeyboardInterrupt
        Ctrl-C was pressed. Finished trials are stored.
    """
    if isinstance(experiment, str):
        experiment = get_experiment(experiment)

    parameters = experiment.settings(settings or {})
    how = Options(**options)
    _check_importable(experiment, how)
    wanted, in_part = _draw_trials(experiment, parameters, settings or {}, how)
    folder = None if how.out is None else make_folder(Path(how.out))
    identity = Identity(experiment.name, parameters, how.seed, code_version(), libraries())
    path = None if folder is None else folder / FILE

    with open_store(path, identity, fresh=not how.resume, retry_failed=how.retry_failed) as store:
        stored = store.finished(wanted, how.out)
        todo = {k: trial for k, trial in enumerate(wanted) if k not in stored}
        if how.progress is not None:
            how.progress(len(stored), len(wanted))
        with closing(_run_trials(experiment.run, todo, identity.code, how)) as answers:
            for k, answer in answers:
                stored[k] = store.put(k, wanted[k], *answer)
                if how.progress is not None:
                    how.progress(len(stored), len(wanted))

    records = [stored[k] for k in range(len(wanted))]
    rows = [record.row for record in records]
    claims = experiment.summarize([row for row in rows if row["failed"] is None])
    # Other parameters than the paper's, or fewer trials: its claims then have no verdict.
    departures = experiment.departures(parameters)
    if in_part:
        departures.append(f"trials = {len(wanted)}")

    outcome = Outcome(
        experiment=experiment,
        parameters=parameters,
        seed=how.seed,
        rows=rows,
        claims=[replace(one, comparable=not departures) for one in claims],
        ran=len(todo),
        resumed=len(wanted) - len(todo),
        wall_s=[record.wall_s for record in records],
        departures=departures,
    )

    if folder is not None:
        outcome.write(folder)
        write_figures(experiment, outcome.rows, outcome.claims, folder)

    return outcome


def _run_trials(run: Run, todo: Mapping[int, Row], code: str, how: Options) -> Answers:
    """Run trials, by their numbers, on the engine that is asked for; 0 jobs: in this process."""
    if how.engine == "dask":
        return on_dask(run, todo, how.jobs, code, how.scheduler)

    return on_this_machine(run, todo, 0 if how.here else how.jobs, code)


def _check_importable(experiment: Experiment, how: Options) -> None:
    """Check that other processes, if there are any, can import the function that runs trials.

    That of a `functools.partial` is its ``func``.
    """
    if how.here:
        return

    module = getattr(getattr(experiment.run, "func", experiment.run), "__module__", None)
    if module == "__main__":
        raise UsageError(
            f"jobs: found the function of experiment {experiment.name} in a script or notebook; "
            "expected it in a module that other processes can import"
        )

    try:
        pickle.dumps(experiment.run)
    except Exception as error:
        raise UsageError(
            f"jobs: found a function of experiment {experiment.name} that cannot be pickled "
            f"({' '.join(str(error).split())}); expected one at the top level of a module"
        ) from None


def _draw_trials(
    experiment: Experiment, parameters: Mapping[str, Any], given: Mapping[str, Any], how: Options
) -> tuple[list[Row], bool]:
    """Return the trials that are asked for, and whether these are fewer than by default.

    ``given`` are the parameters that the user set, for the error.
    """
    default_count = experiment.default_trials or MAX_TRIALS
    count = how.trials or default_count
    try:
        # One more than asked for, if there is one, says that these are not all.
        drawn = list(islice(experiment.trials(parameters, how.seed), count + 1))
    except OptschedError:
        raise
    except Exception as error:
        words = ", ".join(f"{key}={value}" for key, value in given.items())
        raise InputError(
            f"experiment {experiment.name}: no trials can be drawn from {words or 'its defaults'}: "
            f"{error!r}"
        ) from error

    if not drawn:
        raise InputError(
            f"experiment {experiment.name}: found no trial for these parameters; expected at least "
            "one"
        )

    return drawn[:count], count < min(default_count, len(drawn))
