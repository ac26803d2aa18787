"""What `optsched.capacity` returns: what each policy reaches, and what is proved impossible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optsched.costs.cost import CostModel
from optsched.files.results import cost_model_reference, head
from optsched.problem.instance import Instance


@dataclass(frozen=True)
class Reach:
    """What one policy reaches.

    Parameters
    ----------
    policy : str
        Its specification as given.
    value : float, int or None
        The largest rate scale, or the fewest workers, at which it was within the attainment; None
        if there was none.
    attainment : float or None
        The share of requests within their SLOs there.
    missed : float, int or None
        The smallest rate scale above, or the most workers below, at which it was not.
    points : tuple of (float, float)
        Every rate scale, or number of workers, that was tried, with the attainment; sorted.
    clairvoyant : bool
        Whether it sees true output lengths.
    wall_s : float
        Seconds for all simulations.
    error : str or None
        Why there is no value.
    """

    policy: str
    value: float | int | None = None
    attainment: float | None = None
    missed: float | int | None = None
    points: tuple[tuple[float, float], ...] = ()
    clairvoyant: bool = False
    wall_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True, eq=False)
class Capacity:
    """What policies reach within SLOs, and what is proved impossible.

    Parameters
    ----------
    instance : Instance
    slos : dict of str to float
        The SLOs that were given for every request. Others are columns of the instance.
    cost_model : CostModel
    attainment : float
        Share of the requests that must be within all their SLOs.
    searched : {"rate_scale", "workers"}
        What is as large, or as small, as possible.
    workers : int or None
        Number of workers at every rate; None where it is searched for.
    router : str
    rate_scale : float
        The rate at which workers are searched for.
    rows : tuple of Reach
        One for each policy, in the order given.
    impossible : float, int or None
        At this rate scale and at every larger one, or with this number of workers and fewer, no
        schedule and no router attains it. None if nothing is proved impossible.
    bound_points : tuple of (float, float)
        Rate scales or workers, with shares of requests that no schedule exceeds; sorted.
    seed : int
    interrupted : bool
        Whether the work was stopped early.
    """

    instance: Instance
    slos: dict[str, float]
    cost_model: CostModel
    attainment: float
    searched: str
    workers: int | None
    router: str
    rate_scale: float
    rows: tuple[Reach, ...]
    impossible: float | int | None
    bound_points: tuple[tuple[float, float], ...] = ()
    seed: int = 0
    interrupted: bool = False

    @property
    def best(self) -> Reach | None:
        """The policy with the largest rate scale or the fewest workers; None if there is none."""
        found = [row for row in self.rows if row.value is not None]
        sign = -1 if self.searched == "rate_scale" else 1
        return min(found, key=lambda row: sign * (row.value or 0), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a capacity file.

        Returns
        -------
        dict
        """
        best, rates = self.best, self.searched == "rate_scale"
        value = None if best is None else best.value
        data = head("optsched-capacity", "capacity", self.instance)
        data |= {
            "cost_model": cost_model_reference(self.instance, self.cost_model),
            "seed": self.seed,
            "attainment": self.attainment,
            "slos": dict(self.slos),
            "searched": self.searched,
            "router": self.router,
            "policies": [
                {
                    "policy": row.policy, self.searched: row.value, "attainment": row.attainment,
                    "missed": row.missed, "points": [list(point) for point in row.points],
                    "clairvoyant": row.clairvoyant, "wall_s": row.wall_s, "error": row.error,
                }
                for row in self.rows
            ],
            "best_rate_scale": value if rates else None,
            "best_origin": None if best is None else best.policy,
            "impossible_rate_scale": self.impossible if rates else None,
            "bound_origin": None if self.impossible is None else "slo-work",
            "bound_points": [list(point) for point in self.bound_points],
            "interrupted": self.interrupted,
            "workers": {"given": self.workers} if rates else {
                "rate_scale": self.rate_scale, "fewest": value, "impossible": self.impossible,
            },
        }  # fmt: skip
        return data
