"""``experiment``: run named experiments, which can be resumed."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.options import (
    JsonOut,
    Seed,
    argument,
    check_folder,
    check_outputs,
    key_values,
    option,
)
from optsched.cli.output import emit_json, show_table
from optsched.problem.errors import InputError, SolverError, UsageError

if TYPE_CHECKING:
    from optsched.experiments.runner import Outcome


def experiment(
    name: Annotated[
        str, argument("NAME|list", "The experiment's name, or list to list all experiments.")
    ],
    settings: Annotated[
        list[str] | None,
        option("--set", "KEY=VALUE", "Set a parameter (repeatable). A list is given as a,b,c."),
    ] = None,
    trials: Annotated[
        int | None, option("--trials", "N", "How many trials to run, counted from the first.")
    ] = None,
    jobs: Annotated[int, option("--jobs", "N", "How many trials to run at a time.")] = 1,
    engine: Annotated[
        str,
        option("--engine", "local|dask", "Where trials run: on this machine or on a Dask cluster."),
    ] = "local",
    scheduler: Annotated[
        str | None,
        option("--scheduler", "ADDRESS", "The address of a running Dask cluster's scheduler."),
    ] = None,
    memory_limit: Annotated[
        str | None, option("--memory-limit", "SIZE", "The max memory of a trial, such as 4GiB.")
    ] = None,
    isolate: Annotated[
        bool,
        option(
            "--isolate/--in-process",
            None,
            "Whether trials run in processes of their own or in this one.",
        ),
    ] = True,
    seed: Seed = 0,
    out: Annotated[
        str | None,
        option("--out", "DIR", "The folder for the store of trials, the results and the figures."),
    ] = None,
    resume: Annotated[
        bool, option("--resume/--fresh", None, "Whether to keep finished trials in --out.")
    ] = True,
    retry_failed: Annotated[
        bool, option("--retry-failed", None, "Run the trials again that have failed.")
    ] = False,
    parquet: Annotated[
        bool, option("--parquet", None, "Write results.parquet too, which needs pyarrow.")
    ] = False,
    json_out: JsonOut = None,
) -> None:
    """Run the experiment of a paper, and print the paper's statements with our values.

    Finished trials are stored in --out at once. If the run ends early, the same command goes on.
    """
    if name == "list":
        _list()
        return
    given = key_values(settings)
    check_folder(out)
    check_outputs(json_out)
    from optsched.experiments.isolation import memory_bytes
    from optsched.experiments.runner import run_experiment

    if not isolate and (jobs > 1 or engine != "local" or memory_limit is not None):
        raise UsageError(
            "--in-process: found with --jobs, --engine dask or --memory-limit; expected --isolate"
        )
    bar = TrialBar()
    try:
        with bar:
            outcome = run_experiment(
                name,
                given,
                trials=trials,
                jobs=jobs,
                engine=engine,
                scheduler=scheduler,
                isolate=isolate,
                memory_limit=None if memory_limit is None else memory_bytes(memory_limit),
                seed=seed,
                out=out,
                resume=resume,
                retry_failed=retry_failed,
                parquet=parquet,
                progress=bar.show,
            )
    except KeyboardInterrupt:
        kept = f"{bar.done} of {bar.of} trials are lost without --out"
        if out is not None:
            from optsched.experiments.store import read

            done = len(read(out)[1])
            kept = f"{done} of {bar.of} trials are stored in {out}; the same command goes on"
        print(f"error: interrupted: {kept}", file=sys.stderr)
        raise typer.Exit(130) from None
    alone = emit_json(outcome.summary(), json_out)
    failed, errors = _warn(outcome, "; --retry-failed runs them again" if out else "")
    if alone:
        return
    if outcome.claims:
        words = {True: "yes", False: "NO", None: ""}
        show_table(
            ("statement", "paper", "ours", "within 15 %"),
            [(c.what, _text(c.paper), _text(c.ours), words[c.verdict]) for c in outcome.claims],
            text_columns=range(4),
        )
        print()
    counts = f"{outcome.resumed} from the store, {errors} without a schedule"
    if failed:
        counts += f", {failed} failed"
    print(f"{len(outcome.rows)} trials ({counts}), {outcome.experiment.paper}")


def _warn(outcome: Outcome, again: str) -> tuple[int, int]:
    """Print and return how many trials failed or have no schedule. It is an error if all do."""
    rows, name = outcome.rows, outcome.experiment.name
    failed, errors = list(outcome.failed.items()), list(outcome.without_schedule.items())

    def warn(found: list[tuple[int, str]], what: str, after: str = "") -> None:
        if found:
            trial, why = found[0]
            print(
                f"warning: {len(found)} of {len(rows)} trials {what}, the first, trial {trial}: "
                f"{why}{after}",
                file=sys.stderr,
            )

    warn(failed, "failed", again)
    if len(failed) == len(rows):
        raise SolverError(f"experiment {name}: no trial succeeded: {failed[0][1]}")
    if errors and len(errors) + len(failed) == len(rows):
        raise InputError(f"experiment {name}: no trial succeeded: {errors[0][1]}")
    warn(errors, "have no schedule")
    return len(failed), len(errors)


class TrialBar:
    """The progress of trials on standard error: a bar on a terminal, and else a line at times.

    Parameters
    ----------
    every_s : float
        Seconds between lines where standard error is not a terminal.
    """

    def __init__(self, every_s: float = 30.0) -> None:
        self.done = 0
        self.of = 0
        self._every_s = every_s
        self._first = 0
        self._began = self._last = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> TrialBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, of: int) -> None:
        """Show how many trials have finished. The first call comes before any trial runs."""
        begin, self.done, self.of = self.of == 0, done, of
        now = time.monotonic()
        if begin:
            self._first, self._began, self._last = done, now, now
            if sys.stderr.isatty() and done < of:
                self._start()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, pace=self.pace(now))
        elif not begin and now - self._last >= self._every_s:
            self._last = now
            print(f"{done} of {of} trials, {self.pace(now)}", file=sys.stderr, flush=True)

    def pace(self, now: float) -> str:
        """Return the rate at which trials finish, and the time left at this rate."""
        ran, elapsed = self.done - self._first, now - self._began
        if ran == 0 or elapsed <= 0:
            return ""
        rate = ran / elapsed
        left = round((self.of - self.done) / rate)
        hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
        speed = f"{rate:.3g}/s" if rate >= 0.1 else f"{60 * rate:.3g}/min"
        return f"{speed}, {hours}:{minutes:02d}:{seconds:02d} left"

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("trials  {task.fields[pace]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=self.of, completed=self.done, pace="")
        self._bar.start()


def _list() -> None:
    from optsched.experiments import experiments

    rows = [(e.name, e.summary, ", ".join(e.parameters), e.paper) for e in experiments().values()]
    show_table(("experiment", "summary", "parameters", "source"), rows, text_columns=range(4))


def _text(value: float | str | None) -> str | None:
    return f"{value:.4g}" if isinstance(value, float) else value
