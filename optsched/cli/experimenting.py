"""``experiment`` and ``ratios``: studies of many trials, which can be resumed."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.listing import list_kind
from optsched.cli.options import (
    ABOVE_0,
    AT_LEAST_1,
    key_values,
    runs,
)
from optsched.cli.output import LiveLine, emit_json, show_table, tell
from optsched.problem.errors import (
    InputError,
    NoIncumbentError,
    SolverError,
    UsageError,
    ViolationError,
)
from optsched.problem.objective import TOTAL_LATENCY, parse_objective

if TYPE_CHECKING:
    from optsched.analysis.ratio import Study
    from optsched.experiments.runner import Outcome

# The number of instances after which `ratios` says that no optimum was proved.
_FIRST_INSTANCES = 3


@runs("optsched.experiments.runner.Options")
def experiment(
    name: str,
    settings: list[str] | None = None,
    isolate: bool = True,
    json_out: str | None = None,
    **options: Any,
) -> None:
    """Run the experiment of a paper, whose statements stand beside ours.

    Finished trials are stored in --out at once. If the run ends early, the same command goes on.

    Parameters:
      name NAME|list: The experiment (`optsched list experiments`).
      settings --set KEY=VALUE: Set a parameter (repeatable). A list is given as a,b,c.
      trials N: How many trials to run, counted from the first.
      jobs N: How many trials to run at a time.
      engine local|dask: Where trials run: here or on a Dask cluster.
      scheduler ADDRESS: A running Dask cluster's scheduler.
      isolate --isolate/--in-process: Run trials in processes of their own or in this one.
      out -o --out DIR: The folder for the trials, results and figures.
      resume --resume/--fresh: Whether to keep finished trials in --out.
      retry_failed: Run the trials again that have failed.
      Rare: engine, scheduler, isolate, retry_failed
    """
    if name == "list":
        list_kind("experiments")
        return

    out = options["out"]
    from optsched.experiments.runner import run_experiment

    # In this process trials can run only one after another.
    if not isolate and not (options["jobs"] == 1 and options["engine"] == "local"):
        raise UsageError("--in-process: found with --jobs or --engine dask; expected --isolate")

    options["isolate"] = isolate
    line = LiveLine(every_s=30)
    try:
        with line:
            progress = partial(line.show_count, what="trials")
            outcome = run_experiment(name, key_values(settings), progress=progress, **options)
    except KeyboardInterrupt:
        words = f"{line.done} of {line.of} trials are lost without --out"
        if out is not None:
            from optsched.experiments.store import read

            _, records = read(out)
            words = f"{len(records)} of {line.of} trials are stored in {out}"
            words += "; the same command goes on"

        tell(f"error: interrupted: {words}")
        raise typer.Exit(130) from None

    is_printed = emit_json(outcome.summary(), json_out)
    failed, without_schedule = _warn(outcome, "; --retry-failed runs them again" if out else "")
    if is_printed:
        return
    if outcome.claims:
        _show_claims(outcome)

    counts = f"{outcome.resumed} from the store, {without_schedule} without a schedule"
    if failed:
        counts += f", {failed} failed"

    print(f"{len(outcome.rows)} trials ({counts}), {outcome.experiment.paper}")


def _show_claims(outcome: Outcome) -> None:
    """Print the paper's statements beside ours."""
    words = {True: "yes", False: "NO", None: ""}
    rows = [(c.what, _text(c.paper), _text(c.ours), words[c.verdict]) for c in outcome.claims]
    show_table(("statement", "paper", "ours", "within 15 %"), rows, text_columns=range(4))
    if outcome.departures:
        changed = ", ".join(outcome.departures)
        print(f"no verdicts: found {changed}, and the paper has other parameters")

    print()


@runs("optsched.experiments.runner.Options")
def ratios(
    policies: list[str] | None = None,
    labels: list[str] | None = None,
    generator: str = "jaillet-model-1",
    settings: list[str] | None = None,
    trials: Annotated[int, AT_LEAST_1] = 100,
    objective: str = TOTAL_LATENCY.name,
    reference: str = "optimum",
    cost_model: str | None = None,
    repeats: Annotated[int, AT_LEAST_1] = 1,
    time_limit: Annotated[float, ABOVE_0] = 10.0,
    out: str | None = None,
    store: str | None = None,
    json_out: str | None = None,
    **options: Any,
) -> None:
    """Measure how far policies are from the optimum on average.

    Finished instances are stored in --out, and the same command goes on. Intervals are for means
    over instances, by bootstrap: 2000 resamples, 95%. docs/howto/gap.md has what Python adds.

    Parameters:
      policies --policy SPEC: A policy, also my_policy.py:Class (repeatable).
      labels --label TEXT: What tables call the policy of the same place (repeatable).
      generator NAME: Where instances are from (`optsched list generators`).
      settings --set KEY=VALUE: Set a parameter of the generator (repeatable).
      trials N: How many instances, with seeds from --seed on.
      objective METRIC: What policies are measured by (`optsched list metrics`).
      reference NAME: What ratios are to: optimum, bound, h-sf or best-known.
      repeats --runs N: Runs of each policy, for those that are random.
      cost_model MODEL: The cost model, for a generator in seconds.
      time_limit S: Seconds for each optimum and for each run of a policy.
      jobs N: How many instances at a time.
      out -o --out DIR: The folder for what is found.
      resume --resume/--fresh: Whether to keep finished instances in --out.
      store DIR: Keep optima here, with certificates, for later studies and `verify DIR`. By default
        in --out, so that policies may be added to a study.
      Rare: repeats, resume
    """
    from optsched.experiments.ratios import RATIOS, study_of
    from optsched.experiments.runner import run_experiment
    from optsched.experiments.store import read

    # Parameters of the experiment, of which an empty text stands for what is not given.
    asked: dict[str, Any] = {
        "policies": policies or RATIOS.parameters["policies"],
        "generator": generator,
        "set": settings or [""],
        "reference": reference,
        "objective": str(parse_objective(objective)),
        "cost_model": cost_model or "",
        "runs": repeats,
        "time_limit": time_limit,
    }
    earlier: dict[str, Any] = {}
    if options["resume"] and out is not None:
        with suppress(InputError):  # there is no study yet
            earlier = dict(read(out)[0].parameters)

    own_store = str(Path(out) / "optima") if out is not None and reference == "optimum" else ""
    asked["store"] = store or earlier.get("store", own_store)
    # If only policies come or go, the rows are made anew, of optima that the store has.
    wanted = RATIOS.settings(asked)
    same_but_policies = earlier == wanted | {"policies": earlier.get("policies")}
    if earlier and same_but_policies and earlier != wanted:
        options["resume"] = False

    line, interrupted = LiveLine(every_s=30), False
    with TemporaryDirectory() as temporary, line:
        folder = out or temporary  # so that what has run is kept if the work is interrupted

        def progress(done: int, total: int) -> None:
            line.show_count(done, total, "instances")
            if done == min(_FIRST_INSTANCES, total) and reference == "optimum":
                first = study_of(asked, [record.row for record in read(folder)[1]]).rows
                if first and not any(row.exact for row in first):
                    advice = "a smaller n or a longer --time-limit helps"
                    tell(f"note: optimum not proved on {done} of {done}; {advice}")

        try:
            options |= {"trials": trials, "out": folder, "progress": progress}
            rows = run_experiment(RATIOS, asked, **options).rows
        except KeyboardInterrupt:
            interrupted, rows = True, [record.row for record in read(folder)[1]]

    if not rows:
        tell("error: interrupted: stopped before any instance was finished")
        raise typer.Exit(130)

    failed = [row for row in rows if row["failed"] is not None]
    if failed:
        where = f"the first, {failed[0]['trial']}: {failed[0]['failed']}"
        if len(failed) == len(rows):
            raise SolverError(f"ratios: no instance succeeded, {where}")

        tell(f"warning: {len(failed)} of {len(rows)} failed, {where}")

    study = study_of(asked, rows, options["seed"], trials - len(rows))
    if labels:
        study = study.labelled(labels)
    if not emit_json(study.to_dict(), json_out):
        _show_study(study, "; the same command goes on" if out else "")
    if interrupted:
        raise typer.Exit(130)

    for row in study.rows:
        if row.rule is not None:
            raise ViolationError(str(row.error), rule=row.rule)

    if all(row.value is None for row in study.rows):
        raise NoIncumbentError("no policy found a schedule on any instance")


def _show_study(study: Study, advice: str) -> None:
    """Print the table of a study, and what is missing. `advice`: what to do if it was stopped."""
    table = study.summary()
    show_table(list(table.columns), table.to_numpy().tolist(), text_columns=(0, 4))
    for words in (*study.errors(), *study.pairs()):
        print(words)
    if study.unfinished:
        print(f"stopped early: {study.unfinished} instances have not run{advice}")


def _warn(outcome: Outcome, advice: str) -> tuple[int, int]:
    """Print and return how many trials failed or have no schedule. It is an error if all do.

    `advice`: what to do about those that failed.
    """
    rows, name = outcome.rows, outcome.experiment.name
    failed, without_schedule = list(outcome.failed.items()), list(outcome.without_schedule.items())

    def warn(trials: list[tuple[int, str]], what: str, advice: str = "") -> None:
        if trials:
            trial, why = trials[0]
            share = f"{len(trials)} of {len(rows)} trials"
            tell(f"warning: {share} {what}, the first, trial {trial}: {why}{advice}")

    warn(failed, "failed", advice)
    if len(failed) == len(rows):
        raise SolverError(f"experiment {name}: no trial succeeded: {failed[0][1]}")
    if without_schedule and len(without_schedule) + len(failed) == len(rows):
        raise InputError(f"experiment {name}: no trial succeeded: {without_schedule[0][1]}")

    warn(without_schedule, "have no schedule")
    return len(failed), len(without_schedule)


def _text(value: float | str | None) -> str | None:
    """Return a number with four digits, and anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else value
