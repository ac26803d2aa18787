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
    """Return every SLO as a column: that given for all requests, else the instance's, else none.

    A column has the shape (n,), and infinity where there is no limit. `columns`: whether the
    instance's own count.
    """
    given = {name: value for name, value in (given or {}).items() if value is not None}
    for name, value in given.items():
        named("SLO:", name, SLOS, UsageError)
        check_slo(name, value)

    limits = instance.slos if columns else {}
    if not given and not limits:
        raise UsageError(f"SLO: found none; expected one of {', '.join(SLOS)}, or such a column")

    limits |= {name: np.full(instance.n, value) for name, value in given.items()}
    no_limit = np.full(instance.n, np.inf)
    return {name: limits.get(name, no_limit) for name in SLOS}


def with_slos(instance: Instance, given: Mapping[str, float | None]) -> Instance:
    """Return an instance that has SLOs given for all requests as columns, if there are any.

    Its digest is still that of the instance, which schedules and certificates name: SLOs say which
    schedules are good, and not which there are.
    """
    given = {name: value for name, value in given.items() if value is not None}
    known = instance.slos
    if all(name in known and (known[name] == value).all() for name, value in given.items()):
        return instance  # it says the same already, or nothing was given

    columns = all_limits(instance, given)
    changed = replace(instance, **{name: columns[name] for name in given})  # type: ignore[arg-type]
    vars(changed)["sha256"] = instance.sha256  # into the place of the cached property
    return changed


def slos_of_all(instance: Instance) -> dict[str, float]:
    """Return the SLOs that are the same for every request, by name."""
    slos = instance.slos.items()
    equal = {name: column[0] for name, column in slos if (column == column[0]).all()}
    return {name: float(limit) for name, limit in equal.items() if np.isfinite(limit)}
