"""An experiment that may be killed, and a log of what ran that does not depend on its store.

``python tests/survival.py DIR [key=value ...]`` runs it; it prints a line per finished trial. The
keys are ``jobs``, ``engine``, ``scheduler`` and the experiment's parameters; the environment
variable ``SURVIVAL_LOG`` names the log.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import optsched
from optsched.experiments import Experiment
from optsched.experiments.runner import run_experiment
from optsched.workloads.generate import generate

LOG = "SURVIVAL_LOG"


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[dict[str, Any]]:
    for k in range(parameters["size"]):
        yield {"k": k, "seed": seed + k, **parameters}


def run(trial: dict[str, Any]) -> dict[str, Any]:
    """Simulate MC-SF over a draw, or do what ``how`` says of this trial (``2:abort,5:eat``)."""
    note("start", trial["k"])
    how = dict(part.split(":") for part in filter(None, trial["how"].split(","))).get(
        str(trial["k"])
    )
    if how == "abort":
        os.abort()
    if how == "exit":
        os._exit(7)
    if how == "raise":
        raise RuntimeError("the solver\nfell over")
    if how == "once" and started(trial["k"]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "orphan":  # of the process whose calls this one answers, which a keeper is between
        os.kill(parent_of(os.getppid()), signal.SIGKILL)
        time.sleep(60)
    if how == "wait":
        time.sleep(600)
    while how == "gate" and not gate().exists():
        time.sleep(0.01)
    time.sleep(trial["nap"])
    instance = generate("jaillet-model-1", seed=trial["seed"])
    tel = optsched.run(instance, "mc-sf").metrics["tel"]
    note("end", trial["k"])
    return {"tel": tel, "share": (tel or 0) / 7}


def parent_of(process: int) -> int:
    stat = Path(f"/proc/{process}/stat")
    return int(stat.read_text().rpartition(")")[2].split()[1]) if stat.exists() else process


def note(what: str, k: int) -> None:
    """Append a line in one system call, so that lines of several processes stay whole."""
    if LOG in os.environ:
        file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{what} {k}\n".encode())
        os.close(file)


def gate() -> Path:
    """Return the file that lets the trials through that wait for it."""
    return Path(os.environ[LOG] + ".gate")


def started(k: int) -> int:
    """Return how often a trial has been started."""
    return Path(os.environ[LOG]).read_text().split("\n").count(f"start {k}")


SURVIVAL = Experiment(
    name="survival",
    summary="simulations that leave a trace",
    paper="none",
    parameters={"size": 40, "how": "", "nap": 0.0},
    trials=trials,
    run=run,
    summarize=lambda rows: [],
    columns={"tel": "total latency, rounds"},
)


def main(folder: str, *pairs: str) -> None:
    settings = dict(pair.split("=") for pair in pairs)
    options: dict[str, Any] = {
        key: settings.pop(key) for key in ("engine", "scheduler") if key in settings
    }
    options["jobs"] = int(settings.pop("jobs", 1))
    run_experiment(
        SURVIVAL,
        settings,
        isolate=True,
        out=folder,
        progress=lambda done, of: print(done, of, flush=True),
        **options,
    )


if __name__ == "__main__":
    # The trials' processes find the functions in a module, not in this script.
    import survival

    survival.main(*sys.argv[1:])
