"""The SLOs of an instance's requests: its own columns, and those given for all requests."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import UsageError, named
from optsched.problem.instance import Instance
from optsched.problem.service import SLOS, check_slo

Floats = NDArray[np.float64]


def all_limits(
    instance: Instance, given: Mapping[str, float | None] | None, *, columns: bool = True
) -> dict[str, Floats]:
    """Return every SLO as a column: that given for all requests, else the instance's, else none."""
    given = {name: value for name, value in (given or {}).items() if value is not None}
    for name in given:
        named("SLO:", name, SLOS, UsageError)

    for name, value in given.items():
        check_slo(name, value)

    own = instance.slos if columns else {}
    if not given and not own:
        raise UsageError(f"SLO: found none; expected one of {', '.join(SLOS)}, or such a column")

    none = np.full(instance.n, np.inf)
    of_all = {name: np.full(instance.n, value) for name, value in given.items()}
    return {name: of_all.get(name, own.get(name, none)) for name in SLOS}


def with_slos(instance: Instance, given: Mapping[str, float | None]) -> Instance:
    """Return an instance that has SLOs given for all requests as columns, if there are any.

    Its digest is still that of the instance, which schedules and certificates name: SLOs say which
    schedules are good, and not which there are.
    """
    given = {name: value for name, value in given.items() if value is not None}
    known = {name: instance.slos.get(name) for name in given}
    if all(column is not None and (column == given[name]).all() for name, column in known.items()):
        return instance

    columns = {name: all_limits(instance, given)[name] for name in given}
    changed = replace(instance, **columns)  # type: ignore[arg-type]
    vars(changed)["sha256"] = instance.sha256
    return changed


def slos_of_all(instance: Instance) -> dict[str, float]:
    """Return the SLOs that are the same for every request, by name."""
    found = {name: column for name, column in instance.slos.items() if np.isfinite(column[0])}
    return {name: float(column[0]) for name, column in found.items() if (column == column[0]).all()}
