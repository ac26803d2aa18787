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
    from optsched.experiments.runner import Outcome

# The number of instances after which `ratios` says that no optimum was proved.
_FIRST = 3


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

    given, out = key_values(settings), options["out"]
    from optsched.experiments.runner import run_experiment

    if not isolate and not (options["jobs"] == 1 and options["engine"] == "local"):
        raise UsageError("--in-process: found with --jobs or --engine dask; expected --isolate")

    options["isolate"] = isolate
    line = LiveLine(every_s=30)
    try:
        with line:
            told = partial(line.show_count, what="trials")
            outcome = run_experiment(name, given, progress=told, **options)
    except KeyboardInterrupt:
        kept = f"{line.done} of {line.of} trials are lost without --out"
        if out is not None:
            from optsched.experiments.store import read

            done = len(read(out)[1])
            kept = f"{done} of {line.of} trials are stored in {out}; the same command goes on"

        tell(f"error: interrupted: {kept}")
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
        if outcome.departures:
            found = ", ".join(outcome.departures)
            print(f"no verdicts: found {found}, and the paper has other parameters")

        print()

    counts = f"{outcome.resumed} from the store, {errors} without a schedule"
    if failed:
        counts += f", {failed} failed"

    print(f"{len(outcome.rows)} trials ({counts}), {outcome.experiment.paper}")


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

    given: dict[str, Any] = {"policies": policies or RATIOS.parameters["policies"]}
    given |= {"generator": generator, "set": settings or [""], "reference": reference}
    given |= {"objective": str(parse_objective(objective))}
    given |= {"cost_model": cost_model or "", "runs": repeats, "time_limit": time_limit}
    before: dict[str, Any] = {}
    if options["resume"] and out is not None:
        with suppress(InputError):  # there is no study yet
            before = dict(read(out)[0].parameters)

    usual = str(Path(out) / "optima") if out is not None and reference == "optimum" else ""
    given["store"] = store or before.get("store", usual)
    wanted = RATIOS.settings(given)
    if before and before == wanted | {"policies": before["policies"]} != wanted:
        options["resume"] = False  # policies come or go: the store has the rows of the others

    line, interrupted = LiveLine(every_s=30), False
    with TemporaryDirectory() as kept, line:  # what has run is kept, with or without --out
        folder = out or kept

        def told(done: int, of: int) -> None:
            line.show_count(done, of, "instances")
            if done == min(_FIRST, of) and reference == "optimum":
                first = study_of(given, [record.row for record in read(folder)[1]]).rows
                if first and not any(row.exact for row in first):
                    more = "a smaller n or a longer --time-limit helps"
                    tell(f"note: optimum not proved on {done} of {done}; {more}")

        try:
            options |= {"trials": trials, "out": folder, "progress": told}
            rows = run_experiment(RATIOS, given, **options).rows
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

    study = study_of(given, rows, options["seed"], trials - len(rows))
    if labels:
        study = study.labelled(labels)
    if not emit_json(study.to_dict(), json_out):
        table = study.summary()
        show_table(list(table.columns), table.to_numpy().tolist(), text_columns=(0, 4))
        for words in (*study.errors(), *study.pairs()):
            print(words)
        if study.unfinished:
            again = "; the same command goes on" if out else ""
            print(f"stopped early: {study.unfinished} instances have not run{again}")

    if interrupted:
        raise typer.Exit(130)

    for row in study.rows:
        if row.rule is not None:
            raise ViolationError(str(row.error), rule=row.rule)

    if all(row.value is None for row in study.rows):
        raise NoIncumbentError("no policy found a schedule on any instance")


def _warn(outcome: Outcome, again: str) -> tuple[int, int]:
    """Print and return how many trials failed or have no schedule. It is an error if all do."""
    rows, name = outcome.rows, outcome.experiment.name
    failed, errors = list(outcome.failed.items()), list(outcome.without_schedule.items())

    def warn(found: list[tuple[int, str]], what: str, after: str = "") -> None:
        if found:
            trial, why = found[0]
            share = f"{len(found)} of {len(rows)} trials"
            tell(f"warning: {share} {what}, the first, trial {trial}: {why}{after}")

    warn(failed, "failed", again)
    if len(failed) == len(rows):
        raise SolverError(f"experiment {name}: no trial succeeded: {failed[0][1]}")
    if errors and len(errors) + len(failed) == len(rows):
        raise InputError(f"experiment {name}: no trial succeeded: {errors[0][1]}")

    warn(errors, "have no schedule")
    return len(failed), len(errors)


def _text(value: float | str | None) -> str | None:
    return f"{value:.4g}" if isinstance(value, float) else value
