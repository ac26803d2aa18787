"""What is drawn of files of capacities, splits and diagnoses, for plots and reports alike.

Of each, `data` is its JSON object, `name` the figure that is asked for, and `file` its name, for
errors.
"""

import math
from collections.abc import Mapping
from typing import Any

from optsched.problem.errors import InputError
from optsched.problem.metrics import TABLE


def capacity_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `plot_capacity` takes of a capacity file.

    Points that are no pairs of numbers are left out. The bound ends a little beyond the largest
    rate of a policy or the impossible one: where nothing is proved impossible, the search for it
    has tried rates up to a million. A bound that is 1 everywhere says nothing, and is left out.
    Rates are in requests per second, where the file says how many its requests are.
    """
    # Points are pairs of a rate, or a number of workers, and a share of requests within SLOs.
    rates = data.get("searched") != "workers"
    policies = {str(row["policy"]): _points(row.get("points")) for row in data["policies"]}
    bound = _points(data.get("bound_points"))
    workers = data.get("workers") or {}
    impossible = data.get("impossible_rate_scale") if rates else workers.get("impossible")
    tried = [scale for points in policies.values() for scale, _ in points]
    if rates and tried:
        edge = 1.3 * max(*tried, impossible or 0.0)
        shown = [point for point in bound if point[0] <= edge]
        if shown and len(shown) < len(bound):
            # Shares fall with the rate, so the last one shown bounds them up to the edge, too.
            bound = [*shown, (edge, shown[-1][1])]

    in_seconds = rates and data.get("time_unit", "second") == "second"
    per_second = (data.get("requests_per_second") if in_seconds else None) or 1.0

    def to_rates(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(per_second * scale, share) for scale, share in points]

    return {
        "policies": {name: to_rates(points) for name, points in policies.items()},
        "bound": [] if all(share >= 1 for _, share in bound) else to_rates(bound),
        "attainment": data["attainment"],
        "impossible": None if impossible is None else per_second * impossible,
        "rates": rates,
        "per_second": per_second != 1.0,
    }


def splits_of(data: Mapping[str, Any], name: str, file: str) -> dict[str, Any]:
    """Return what `plot_splits` takes of a metric of a splits file."""
    try:
        rows = [
            (row["pools"], *(row[name][key] for key in ("bound", "found", "verdict")))
            for row in data["splits"]
        ]
    except (KeyError, TypeError):
        raise InputError(
            f"{file}: splits: found a row without {name}; expected its interval"
        ) from None

    metric = TABLE[name]
    ylabel = metric.header("second", " ")
    return {"rows": rows, "more_is_better": metric.sense == "max", "ylabel": ylabel}


def diagnosis_of(data: Mapping[str, Any], name: str, file: str) -> tuple[str, dict[str, Any]]:
    """Return the picture of a kind of a diagnosis file, and what it takes."""
    try:
        if name != "changes":
            words = TABLE[f"mean_{name}"].header("second", " ").removeprefix("mean ")
            return "percentiles", {"runs": data["curves"][name], "xlabel": words}

        fields = ("what", "gain", "low", "high")
        rows = [tuple(change[field] for field in fields) for change in data["changes"]]
        return "changes", {"rows": rows, "xlabel": f"gain [% of {data['gains_of']}]"}
    except (KeyError, TypeError):
        raise InputError(
            f"{file}: found no {name}; expected what `diagnose --json` writes"
        ) from None


def _points(value: object) -> list[tuple[float, float]]:
    """Return the pairs of finite numbers of a list from a file, sorted."""
    rows = value if isinstance(value, list) else []
    pairs = [row for row in rows if isinstance(row, list) and len(row) == 2]
    numbers = [row for row in pairs if all(isinstance(value, (int, float)) for value in row)]
    return sorted((float(x), float(y)) for x, y in numbers if math.isfinite(x + y))
