"""Other processes compile what a command needs later, while it compiles what it needs first."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from optsched.problem.errors import OptschedError
from optsched.problem.processes import Process

# By command, what it needs for an instance in seconds besides its first policies, in an order in
# which processes and command seldom compile the same: policies, bounds of an objective or of the
# problem's own, offline search, and exact search by labels, where that suits the problem.
_LATER = {
    "bound": ("labels certified", "bound", "search", "trail", "elis-sjf", "vllm-v1"),
    "capacity": ("bound slo_attainment", "edf-decode", "search", "vllm-v1"),
    "compare": ("labels", "bound", "search", "vllm-v1", "trail", "elis-sjf"),
    # Its `capacity` comes after searches of `compare`, during which there is time to compile.
    "demo": ("bound", "search", "edf-decode", "bound slo_attainment", "vllm-v1"),
    "solve": ("labels", "bound", "search"),
}
_PROVING = "bound", "labels", "search"
_asked: list[tuple[str, Mapping[str, Any]]] = []
_processes: list[Process] = []


def note(command: str, values: Mapping[str, Any]) -> None:
    """Remember what is asked, for `begin`. Of a command that runs others the first one counts.

    `values`: of its parameters, a ``problem`` among them.
    """
    if not _asked:
        _asked.append((command, values))


def begin() -> None:
    """Let free cores compile what the command will need: it compiles a first loop itself now."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = (cores or 1) - 1
    if not (free and _asked and (jobs := _jobs(*_asked[0]))):
        return

    from optsched.analysis.warm import compile_later

    objective = _asked[0][1]["problem"].goal.name
    with suppress(OptschedError):  # a system without a process more: the command compiles alone
        for _ in jobs[:free]:
            _processes.append(Process(quiet=True))

    for k, job in enumerate(jobs if _processes else ()):
        _processes[k % len(_processes)].send(compile_later, job, objective)
    for process in _processes:
        process.send(os._exit, 0)  # its memory is for the command from then on


def _jobs(command: str, values: Mapping[str, Any]) -> list[str]:
    """Return what is left of a command's jobs after its options."""
    from optsched.optimize.plan import is_large

    instance, policies = values["problem"].instance, values.get("policies")
    if instance.in_rounds:
        return []

    proves = values.get("bound") is not False and values.get("method", "auto") == "auto"

    def is_needed(job: str) -> bool:
        what = job.split()[0]
        if what in _PROVING:
            return proves and not (what == "labels" and is_large(instance))

        return policies is None or job in policies

    return [job for job in _LATER.get(command, ()) if is_needed(job)]


def end() -> None:
    """End the processes, whatever they compile: the command is done."""
    for process in _processes:
        process.end()

    _processes.clear()
    _asked.clear()
