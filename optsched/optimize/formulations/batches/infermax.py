"""The formulation `infermax`. Its methods are in the other files of this folder.

`problem` says what is solved, and where the model departs from Kim et al. 2024. The methods:

- `astar` is the fastest if it can do the task, so `auto` takes it.
- `cpsat` does everything else. Only it has arrivals, max TPOT and several objectives.
- `flow-highs` and `flow-cpsat` solve an independent model of the same optimum, to check A*.
- `pulp-bigm` is the program of the paper, to be read and exported.
- `split` solves every set of requests on one worker, for several workers.
- `search` finds a schedule and a bound for instances that are too large for the others.
"""

from __future__ import annotations

from pathlib import Path

from optsched.optimize.formulations.base import Formulation, Task
from optsched.optimize.formulations.batches.cpsat_model import entries_at_most
from optsched.optimize.formulations.batches.offline import SEARCHED
from optsched.optimize.formulations.batches.problem import SWITCHES

_SPLIT = 6
"""The max requests whose sets are all solved on one worker, if there are several workers."""
_EXACT = 100_000
"""The max (requests x output tokens) for which exact methods do better than the offline search."""
_QUICK_TERMS = 20_000_000
"""The max terms of a CP-SAT model. A million of them take about a second to build."""


def _choose(task: Task) -> str:
    """Return A* if it can do the task, else CP-SAT (measured in `docs/lab/infermax.md`).

    For instances that are too large for both, return the offline search if it can optimize the
    objective.
    """
    instance = task.instance
    if task.workers > 1:
        return "split" if instance.n <= _SPLIT else "search"

    searched = len(task.names) == 1 and task.names[0] in SEARCHED
    if searched and instance.n * int(instance.output_tokens.sum()) > _EXACT:
        return "search"

    together = bool((instance.release_times == instance.release_times[0]).all())
    for_astar = len(task.names) == 1 and task.names[0] != "max_tpot"
    if together and for_astar and instance.chunked_prefill is not True:
        return "astar"

    return "search" if searched and entries_at_most(instance) > _QUICK_TERMS else "cpsat"


def _leaves_out(task: Task) -> frozenset[str]:
    """Return what the models rule out and the judge does not.

    They take chunked prefill as off where the instance does not say, and schedulers may choose.
    """
    split = {"split_prefills"} if task.instance.chunked_prefill is None else set()
    return frozenset(split | ({"evictions"} if task.extras.get("eviction_free") else set()))


def _export(task: Task, format_name: str, path: str | Path) -> None:
    from optsched.optimize.formulations.batches.pulp_big_m import export

    export(task, format_name, path)


FORMULATION = Formulation(
    name="infermax",
    summary="optimal batches under a cost model, with evictions (Kim et al. 2024, section 3.3)",
    time_unit="second",
    default_objective="makespan",
    methods={},
    choose=_choose,
    switches=SWITCHES,
    leaves_out=_leaves_out,
    export=_export,
)
