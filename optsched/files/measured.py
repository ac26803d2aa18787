"""Times that a real server took for the requests of an instance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.files.strict_json import Place, read_json, write_json
from optsched.problem.columns import first_of, plain_numbers, real_column
from optsched.problem.errors import InputError, UsageError, check_kind
from optsched.problem.instance import Instance
from optsched.problem.metrics import Times
from optsched.problem.text_files import read_object

GAP_PLACES = np.unique(np.append(np.arange(1, 20) / 20, 1 - np.geomspace(0.1, 0.001, 30)))
"""The quantiles of `Measured.gaps`: more of them where a prefill makes a step long."""

DAY_S = 86_400.0
"""The longest time that a request can take, in seconds; more is a point in time."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Measured times of an instance's requests, from their arrivals.

    Parameters
    ----------
    latency : array_like, shape (n,)
        Seconds from each arrival to the last token, > 0 and at most a day, so that a point in time
        is none; NaN only for requests with an error.
    ttft : array_like, shape (n,), optional
        Seconds from each arrival to the first token, at most the latency; NaN as above.
    name : str
        What tables call the server.
    instance_sha256 : str, optional
        Digest of the instance that was served. Times are in the order of its requests.
    requests_sha256 : str, optional
        Digest of its requests alone (`optsched.Instance.requests_sha256`). With it the times also
        belong to a copy with another KV capacity or other limits.
    gaps : array_like, optional
        Quantiles of all times between two tokens of a request, at `GAP_PLACES`, in seconds.
    steps : sequence of array_like, optional
        These times of each request, of which a file keeps the quantiles alone.
    errors : mapping of int to str
        Requests that were not served as the instance says, and why. What was measured of them is
        kept.

    Raises
    ------
    InputError
        A time is not a number in range, a TTFT is longer than its latency, or the columns are of
        unequal length. The error names the request.
    """

    latency: NDArray[np.float64]
    ttft: NDArray[np.float64] | None = None
    name: str = "measured"
    instance_sha256: str | None = None
    errors: Mapping[int, str] = field(default_factory=dict)
    requests_sha256: str | None = None
    gaps: NDArray[np.float64] | None = None
    steps: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        if self.gaps is None and self.steps is not None and any(map(len, self.steps)):
            gaps = np.quantile(np.concatenate(self.steps), GAP_PLACES)
            object.__setattr__(self, "gaps", gaps)

        if not self.name.isprintable():  # tables show it in a terminal
            raise InputError(f"name: found {self.name!r:.60}; expected printable characters")

        latency, ttft = self._column("latency"), None
        if (i := first_of(latency == 0)) is not None:
            raise InputError(f"latency: request {i}: found 0; expected a time > 0")

        if self.ttft is not None:
            ttft = self._column("ttft")
            if len(ttft) != len(latency):
                raise InputError(
                    f"ttft: found {len(ttft)} values; expected {len(latency)}, as many as latency "
                    "has"
                )

            if (i := first_of(ttft > latency)) is not None:
                raise InputError(
                    f"ttft: request {i}: found {ttft[i]}; expected at most its latency {latency[i]}"
                )

        if self.gaps is not None:
            gaps = real_column(self.gaps, "gaps", 0.0, DAY_S)
            if len(gaps) != len(GAP_PLACES):
                raise InputError(f"gaps: found {len(gaps)} values; expected {len(GAP_PLACES)}")
            object.__setattr__(self, "gaps", gaps)

        object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "ttft", ttft)

    def _column(self, name: str) -> NDArray[np.float64]:
        """Return a column, checked but for the times that are missing because of an error."""
        values = getattr(self, name)
        missing: list[int] = []
        if self.errors and hasattr(values, "__iter__"):
            values = list(values)
            inside = [i for i in self.errors if 0 <= i < len(values)]
            missing = [i for i in inside if values[i] is None or values[i] != values[i]]  # NaN

        # The check takes finite numbers only, so a 1 stands for each missing time meanwhile.
        for i in missing:
            values[i] = 1.0

        column = real_column(values, name, 0.0, DAY_S)
        if missing:
            column = column.copy()
            column[missing] = np.nan
            column.setflags(write=False)

        return column

    def first(self, count: int, instance: Instance) -> "Measured":
        """Return the times of the first requests, which are those of an instance.

        All were served (`check`), so there are no errors to keep. The digest of the whole instance
        does not fit its first requests, and is replaced by that of theirs.

        Parameters
        ----------
        count : int
        instance : Instance
        """
        ttft = None if self.ttft is None else self.ttft[:count]
        steps = None if self.steps is None else self.steps[:count]
        return Measured(
            self.latency[:count],
            ttft,
            self.name,
            requests_sha256=instance.requests_sha256,
            # Gaps are made of the steps. Without steps those of all requests have to stand in.
            gaps=self.gaps if steps is None else None,
            steps=steps,
        )

    def check(self, instance: Instance) -> None:
        """Check that these are the times of an instance's requests.

        Parameters
        ----------
        instance : Instance
        """
        if instance.in_rounds:
            raise UsageError("measured: found an instance in rounds; expected one in seconds")

        # Where the requests are the same, the instance may have another KV capacity or limits.
        if self.requests_sha256 != instance.requests_sha256:
            hint = ""
            if self.requests_sha256 is None:
                hint = " (leave it out if only KV or limits were corrected)"

            instance.check_digest(self.instance_sha256, f"measured: instance_sha256{hint}")
        if len(self.latency) != instance.n:
            raise InputError(
                f"measured: found {len(self.latency)} requests; expected the {instance.n} of "
                f"{instance.name!r}"
            )

        if self.errors:
            i = min(self.errors)
            raise InputError(
                f"measured: found {len(self.errors)} requests that were not served as the instance "
                f"says (request {i}: {self.errors[i]}); expected none"
            )

    def released(self, instance: Instance) -> NDArray[np.float64]:
        """Return when requests were released: as given, or when those before them had ended.

        Parameters
        ----------
        instance : Instance

        Returns
        -------
        ndarray, shape (n,)
            Seconds since the first arrival.
        """
        sessions, given = instance.sessions, instance.given_release
        if sessions is None:
            return given

        # With the latencies that were measured the earliest releases are those that were.
        return np.asarray(sessions.earliest(given.tolist(), self.latency.tolist()))

    def times(self, instance: Instance) -> Times:
        """Return these times as metrics are made of them.

        Parameters
        ----------
        instance : Instance

        Returns
        -------
        Times
        """
        steps = np.where(instance.output_tokens > 1, instance.output_tokens - 1.0, np.nan)
        tpot = None if self.ttft is None else (self.latency - self.ttft) / steps
        released = self.released(instance)
        return Times(instance, self.latency, self.ttft, tpot, released=released)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a file of measured times."""
        data = {
            "format": "optsched-measured",
            "version": 1,
            "name": self.name,
            "instance_sha256": self.instance_sha256,
            "ttft": None if self.ttft is None else plain_numbers(self.ttft),
            "latency": plain_numbers(self.latency),
        }
        if self.requests_sha256 is not None:
            data["requests_sha256"] = self.requests_sha256
        if self.gaps is not None:
            data["gaps"] = plain_numbers(self.gaps)
        if self.errors:
            data["errors"] = {str(i): self.errors[i] for i in sorted(self.errors)}

        return data


def read_measured(path: str | Path) -> Measured:
    """Return the measured times in a file.

    Parameters
    ----------
    path : str or Path
        A ``.json`` or ``.json.gz`` file.
    """
    data = read_json(path, expect="measured")
    with Place(Path(path)):
        return Measured(
            latency=data["latency"],
            ttft=data.get("ttft"),
            name=data.get("name") or "measured",
            instance_sha256=data.get("instance_sha256"),
            requests_sha256=data.get("requests_sha256"),
            gaps=data.get("gaps"),
            errors={int(i): words for i, words in (data.get("errors") or {}).items()},
        )


def write_measured(measured: Measured, path: str | Path) -> None:
    """Write a file of measured times.

    Parameters
    ----------
    measured : Measured
    path : str or Path
        A ``.json`` or ``.json.gz`` file.
    """
    check_kind("measured", measured, Measured, "an optsched.Measured")
    write_json(measured.to_dict(), path)


def settings_beside(path: str | Path) -> dict[str, int]:
    """Return what meta.json beside a measured run says of its server, by the names of vLLM.

    Only what is an integer above 0 is kept. There is nothing if no such file can be read.

    Parameters
    ----------
    path : str or Path
        The file of the run.
    """
    meta = _meta_beside(path)
    try:
        settings = {**meta["engine_kwargs"], **(meta.get("kv_cache") or {})}
    except (LookupError, TypeError, ValueError):
        return {}

    return {name: value for name, value in settings.items() if type(value) is int and value > 0}


def version_beside(path: str | Path) -> str | None:
    """Return the version of vLLM in meta.json beside a measured run; None if it is not there.

    Parameters
    ----------
    path : str or Path
        The file of the run.
    """
    version = _meta_beside(path).get("vllm_version")
    return version if isinstance(version, str) else None


def _meta_beside(path: str | Path) -> dict[str, Any]:
    """Return what meta.json beside a file holds; nothing if it cannot be read."""
    try:
        return read_object(Path(path).with_name("meta.json"), "a measured run")
    except InputError:
        return {}
