"""The hindsight program by the reverse-time ramp relaxation, refined until it meets a schedule."""

from contextlib import suppress
from typing import Any

import numpy as np

from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.rounds.goals import LATENCY, by_latency
from optsched.optimize.ramp.jobs import MAX_KINDS, kinds_of, periods, ramp_leaf
from optsched.optimize.solvers.base import Progress, SolveOptions, Status, run_interruptibly
from optsched.problem.budget import work_time
from optsched.problem.errors import UsageError, ViolationError
from optsched.problem.schedule import from_starts


def solve_by_ramp(task: Task, options: SolveOptions) -> Answer:
    """Solve by the bounds and schedules of `optsched.optimize.ramp.prove`, with a certificate."""
    instance = task.instance
    kinds = max(len(kinds_of(jobs)[-1]) for jobs in periods(instance))
    if kinds > MAX_KINDS:
        raise UsageError(
            f"method: found {kinds} different requests in a busy period; expected at most "
            f"{MAX_KINDS} for ramp, or the method lns"
        )

    # The compiled code is loaded here, at the cost of this method's own time.
    begin = work_time()
    from optsched.optimize.ramp.prove import prove_all

    # The compiled loops look at it: 1 asks them to end.
    stop = np.zeros(1, dtype=np.int8)
    starts = None
    if options.warm_start is not None and options.warm_start.starts is not None:
        starts = np.asarray(options.warm_start.starts, dtype=np.int64)

    proofs: list[Any] = []

    def report(bound: int, value: int) -> None:
        if options.progress is not None:
            elapsed = work_time() - begin
            options.progress(Progress(elapsed, float(value), float(bound)))

    def cancel() -> None:
        stop[0] = 1

    def prove() -> None:
        proofs[:] = prove_all(
            instance,
            seed=options.seed,
            time_limit_s=options.time_limit - (work_time() - begin),
            stop=stop,
            report=report,
            starts=starts,
            gap=options.mip_rel_gap,
            threads=options.thread_count,
        )

    run_interruptibly(prove, cancel=cancel, stop=options.stop, deadline=begin + options.time_limit)
    return _answer(task, proofs, work_time() - begin)


def _answer(task: Task, proofs: list[Any], seconds: float) -> Answer:
    """Return the answer that the proofs of all busy periods are together.

    Bounds and values of busy periods add up (docs/formulations.md, "Ramp relaxation").
    """
    from optsched.bounds.certificate import make_certificate

    instance = task.instance
    starts = np.empty(instance.n, dtype=np.int64)
    for proof in proofs:
        # A proof's time may begin with its busy period.
        index = proof.jobs.index
        starts[index] = proof.starts + instance.release_times[index] - proof.jobs.arrival

    schedule = from_starts(starts, instance)
    bound, value = sum(proof.bound for proof in proofs), sum(proof.value for proof in proofs)
    closed = bound == value
    leaf = ramp_leaf([(p.jobs, p.bound, p.denominator, p.clock, p.levels) for p in proofs])
    optimal = None
    # The schedule is optimal unless it breaks limits on batches, which the relaxation ignores.
    if closed:
        with suppress(ViolationError):
            evaluate(instance, schedule)
            optimal = schedule

    certificate = make_certificate(instance, leaf, value=bound, schedule=optimal)
    reasons = sorted({proof.note for proof in proofs if proof.note})

    return Answer(
        Status.OPTIMAL if closed else Status.FEASIBLE,
        schedule=schedule,
        objective=value,
        bound=bound,
        native_status="closed" if closed else "; ".join(reasons),
        solve_s=seconds,
        certificate=certificate,
    )


_SUMMARY = "reverse-time ramp relaxation, refined to a proof; for up to about 60 requests"
_RAMP = Method(_SUMMARY, by_latency(solve_by_ramp), LATENCY, solvers=("numba",))
METHODS = {"hindsight": {"ramp": _RAMP}}
