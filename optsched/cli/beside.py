"""Other processes compile what a command needs later, while it compiles what it needs first."""

import os

from optsched.problem.processes import Process
from optsched.workloads.problem import Problem

# By command, what it needs for an instance in seconds beside its first policies, in an order in
# which processes and command seldom compile the same: policies, bounds of an objective or of the
# problem's own, offline search, and exact search by labels, where that suits the problem.
_LATER = {
    "bound": ("labels certified", "bound", "search", "trail", "elis-sjf", "vllm-v1"),
    "capacity": ("bound slo_attainment", "edf-decode", "search", "vllm-v1"),
    "compare": ("labels", "bound", "search", "vllm-v1", "trail", "elis-sjf"),
    "demo": ("bound", "search", "edf-decode", "bound slo_attainment", "vllm-v1"),
    "solve": ("labels", "bound", "search"),
}
_said: list[tuple[str, Problem]] = []
_processes: list[Process] = []


def note(command: str, problem: Problem) -> None:
    """Remember what is asked, for `begin`. Of a command that runs others the first one counts."""
    if not _said:
        _said.append((command, problem))


def begin() -> None:
    """Let free cores compile what the command will need: it compiles a first loop itself now."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not _said or _said[0][1].instance.in_rounds:
        return

    from optsched.analysis.warm import compile_later
    from optsched.optimize.plan import EXACT

    command, problem = _said[0]
    instance = problem.instance
    is_small = instance.n * instance.output_tokens.sum() <= EXACT
    jobs = [job for job in _LATER.get(command, ()) if is_small or not job.startswith("labels")]
    _processes.extend(Process(quiet=True) for _ in jobs[: (cores or 1) - 1])
    for k, job in enumerate(jobs if _processes else ()):
        _processes[k % len(_processes)].send(compile_later, job, problem.goal.name)


def end() -> None:
    """End the processes, whatever they compile: the command is done."""
    for process in _processes:
        process.end()

    _processes.clear()
