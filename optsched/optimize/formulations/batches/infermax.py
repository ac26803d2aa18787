"""The formulation `infermax`. Its methods are in the other files of this folder.

`problem` says what is solved, and where the model departs from Kim et al. 2024. The methods:

- `labels` is for whole prefills, and for chunks where it proves that none is better. It is the
  fastest at what it can do, so `auto` takes it.
- `cpsat` does everything else. Only it has max TPOT and several objectives.
- `pulp-bigm` is the program of the paper, to be read and exported.
- `split` solves every set of requests on one worker, for several workers.
- `search` finds a schedule and a bound for instances that are too large for the others.
"""

from optsched.optimize.formulations.base import Formulation, Readable, Task
from optsched.optimize.formulations.batches.labels import why_chunks_matter
from optsched.optimize.formulations.batches.problem import SWITCHES
from optsched.optimize.plan import method_in_seconds


def _leaves_out(task: Task) -> frozenset[str]:
    """Return what the models rule out and the judge does not: chunks that nobody asked for."""
    unasked = task.instance.chunked_prefill is None and why_chunks_matter(task)
    split = {"split_prefills"} if unasked else set()
    return frozenset(split | ({"evictions"} if task.extras.get("eviction_free") else set()))


def _readable(task: Task, length: int | None) -> Readable:
    from optsched.optimize.formulations.batches.pulp_big_m import readable

    return readable(task, length)


FORMULATION = Formulation(
    name="infermax",
    summary="optimal batches under a cost model, with evictions (Kim et al. 2024, section 3.3)",
    time_unit="second",
    methods={},
    choose=method_in_seconds,
    switches=SWITCHES,
    leaves_out=_leaves_out,
    readable=_readable,
)
