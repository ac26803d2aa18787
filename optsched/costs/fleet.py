"""Fleets: the machines that requests run on, and how KV moves between them.

From texts: ``2p6d``, and links such as ``latency=50us,bandwidth=50GB/s,model=llama3-8b``.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

from optsched.costs.architectures import ARCHITECTURES, Architecture, architecture
from optsched.costs.cost import BatchCost, CostModel
from optsched.costs.machine import ROLES, Link, Machine, Role
from optsched.problem.columns import INT64_MAX, check_whole, whole_number
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance, Limits
from optsched.problem.specs import Parameter, convert_all, read_pairs
from optsched.problem.text_files import read_toml

_LETTERS: dict[str, Role] = {role[0]: role for role in ROLES}
MAX_MACHINES = 10_000

# Powers of ten of units.
_SECONDS = {"": 0, "s": 0, "ms": -3, "us": -6, "ns": -9}
_GB_S = {"KB/s": -6, "MB/s": -3, "GB/s": 0, "TB/s": 3}
_MACHINE_FIELDS = {"cost_model": Parameter(str, False, None)}
_MACHINE_FIELDS |= dict.fromkeys(("kv_capacity", *vars(Limits())), Parameter(int, False, None))
"""What a file may say of machines. The rest is the instance's and the caller's."""


@dataclass(frozen=True, eq=False)
class Fleet:
    """The machines that requests run on, each of which is a worker.

    One machine, equal or unequal ones behind a router, and machines with roles, between which the
    KV of requests moves.

    Parameters
    ----------
    machines : sequence of Machine
    link : Link, optional
        What a move of KV between machines takes. None: KV stays where it is. Machines with roles
        have one: by default moves take no time.
    deflect_below : int
        Decode machines may prefill requests with fewer prompt tokens than this; 0: none.
    """

    machines: Sequence[Machine]
    link: Link | None = None
    deflect_below: int = 0

    def __post_init__(self) -> None:
        machines = tuple(self.machines)
        object.__setattr__(self, "machines", machines)
        check_whole(len(machines), "fleet: number of machines", 1, MAX_MACHINES)
        for w, one in enumerate(machines):
            if not isinstance(one, Machine):
                found = type(one).__name__
                raise UsageError(f"fleet: machine {w}: found {found}; expected an optsched.Machine")

        whole_number(self.deflect_below, "fleet: deflect_below", 0, INT64_MAX)
        roles = {one.role for one in machines}
        if len(roles) == 1 and roles != {"mixed"}:  # nobody could decode, or nobody prefill
            raise UsageError(
                f"fleet: found only {roles.pop()} machines; expected both kinds, or mixed"
            )

        if self.link is None and (roles != {"mixed"} or self.deflect_below):
            object.__setattr__(self, "link", Link())

    @classmethod
    def of(
        cls,
        text: str | Path | int,
        cost_model: CostModel | str | Path | None = None,
        *,
        link: Link | str | None = None,
        deflect_below: int = 0,
    ) -> "Fleet":
        """Return the fleet of a number, a text or a file.

        Parameters
        ----------
        text : int, str or path
            A number of equal machines, between which no KV moves. Or the number of machines of each
            role: ``2p6d`` is 2 prefill and 6 decode machines, and ``4m`` is 4 mixed ones, with a
            link. Or a ``.toml`` file of machines that differ (docs/howto/capacity.md).
        cost_model : BatchCost, str or path, optional
            The batch times of every machine that the file gives none.
        link : Link or str, optional
            What a move of KV takes, or the text of it (`parse_link`).
        deflect_below : int
            See `Fleet`.
        """
        if isinstance(text, int):
            check_whole(text, "workers", 1, MAX_MACHINES)
            machines = [Machine(cost_model)] * text
        else:
            machines, link_of_file = _from_text(str(text), cost_model)
            if link is None and link_of_file is None:
                link = Link()
            else:
                link = link or link_of_file

        if isinstance(link, str):
            link = parse_link(link, machines[0].cost.name)

        return cls(machines, link, deflect_below)

    def __len__(self) -> int:
        return len(self.machines)

    def __repr__(self) -> str:
        return f"<Fleet: {self.words}>"

    def on(self, instance: Instance) -> "Fleet":
        """Return the fleet with an instance's KV capacity and limits where machines have none.

        Parameters
        ----------
        instance : Instance

        Raises
        ------
        UsageError
            The instance is in seconds and a machine has no cost model, or it is in rounds and one
            has one, or the link takes parts of rounds.
        """
        for name in ("latency_s", "seconds_per_token"):
            found = getattr(self.link, name, 0.0)
            if instance.in_rounds and not float(found).is_integer():
                raise UsageError(f"link: {name}: found {found!r}; expected whole rounds")

        # One object for machines that are one object: each cost model is loaded, and warned of,
        # once.
        distinct = {id(machine): machine for machine in self.machines}
        known = {key: machine.on(instance) for key, machine in distinct.items()}
        return replace(self, machines=[known[id(machine)] for machine in self.machines])

    def split(self, text: str) -> "Fleet":
        """Return the same machines with the roles of a text such as ``2p6d``, and with a link.

        Parameters
        ----------
        text : str
        """
        roles = roles_of(text)
        if len(roles) != len(self):
            raise UsageError(f"fleet: found {len(self)} machines; expected {len(roles)} for {text}")

        pairs = zip(self.machines, roles, strict=True)
        machines = [replace(machine, role=role) for machine, role in pairs]
        return replace(self, machines=machines, link=self.link or Link())

    def times(self, count: int) -> "Fleet":
        """Return so many times the machines.

        Parameters
        ----------
        count : int
        """
        return replace(self, machines=tuple(self.machines) * count)

    @property
    def stages(self) -> tuple[list[Machine], list[Machine], bool]:
        """The machines that prefill, those that decode, and whether none does both.

        Where some do, all machines are in both stages.
        """
        machines = list(self.machines)
        if self.deflect_below > 0 or self.having("mixed"):
            return machines, machines, False

        prefill = [m for m in machines if m.role == "prefill"]
        return prefill, [m for m in machines if m.role == "decode"], True

    def having(self, *roles: Role) -> list[int]:
        """Return the numbers of the machines that have one of some roles.

        Parameters
        ----------
        *roles : {"mixed", "prefill", "decode"}
        """
        return [w for w, one in enumerate(self.machines) if one.role in roles]

    @property
    def equal(self) -> bool:
        """Whether all machines are equal, and no KV moves between them."""
        return self.link is None and self.alike

    @property
    def alike(self) -> bool:
        """Whether all machines are equal, their roles included."""
        kinds = {(m.cost.sha256, m.kv_capacity, m.limits, m.role) for m in self.machines}
        return len(kinds) == 1

    @property
    def sha256(self) -> str | None:
        """The digest of the machines' cost models; None in rounds."""
        return digest_of(self.machines)

    @property
    def minorants(self) -> list["Fleet"]:
        """This fleet under each choice of minorants of the machines' cost models."""
        costs = {m.cost.sha256: m.cost for m in self.machines if isinstance(m.cost, BatchCost)}
        fleets = []
        for choice in product(*(cost.minorants for cost in costs.values())):
            minorant: dict[object, BatchCost] = dict(zip(costs, choice, strict=True))
            machines = [replace(m, cost_model=minorant[m.cost.sha256]) for m in self.machines]
            fleets.append(replace(self, machines=machines))

        return fleets

    @property
    def words(self) -> str:
        """How many machines there are of each role, such as ``"2 prefill, 6 decode"``."""
        counts = {role: len(self.having(role)) for role in ("prefill", "decode", "mixed")}
        return ", ".join(f"{count} {role}" for role, count in counts.items() if count)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that result files carry."""
        data = {
            "roles": [machine.role for machine in self.machines],
            "link": asdict(self.link or Link()),
            "deflect_below": self.deflect_below,
        }
        kinds = [{"kv_capacity": m.kv_capacity, "cost_model": m.cost.name} for m in self.machines]
        # Equal machines are those of the instance and the cost model, which the file names.
        return data if all(kind == kinds[0] for kind in kinds) else {**data, "machines": kinds}


Hardware = Fleet | Machine | Sequence[Machine] | CostModel | str | Path | None
"""What a `Problem` takes for a fleet: one, its machines, or the cost model of a single machine."""


def fleet_of(given: Hardware) -> Fleet:
    """Return the fleet that a public function was given.

    Parameters
    ----------
    given : Fleet, Machine, sequence of Machine, BatchCost, str, path or None
        A cost model, or the name or file of one, is that of a single machine.
    """
    if isinstance(given, Fleet):
        return given
    if isinstance(given, Iterable) and not isinstance(given, str):
        return Fleet(given)

    return Fleet([given if isinstance(given, Machine) else Machine(given)])


def digest_of(machines: Sequence[Machine]) -> str | None:
    """Return the digest of the cost models of machines: of equal ones that of one, None in rounds.

    Parameters
    ----------
    machines : sequence of Machine
    """
    digests = [one.cost.sha256 for one in machines if isinstance(one.cost, BatchCost)]
    if len(set(digests)) < 2:
        return digests[0] if digests else None

    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def roles_of(text: str, others: int = 0) -> list[Role]:
    """Return the role of each machine of ``2p6d``: 2 prefill and 6 decode machines (m: mixed).

    `others`: how many machines stand beside them.
    """
    if not re.fullmatch(rf"(\d{{1,5}}[{''.join(_LETTERS)}])+", text):
        raise InputError(f"pools {text!r}: expected such as 2p6d, 4m, 2p2d4m or a .toml file")

    parts = [(int(count), _LETTERS[role]) for count, role in re.findall(r"(\d+)(\D)", text)]
    total = sum(count for count, _ in parts)
    if not 1 <= total <= MAX_MACHINES - others:
        found = f"pools {text!r}: found {total} machines and {others} others"
        raise InputError(f"{found}; expected 1 to {MAX_MACHINES} in all")

    return [role for count, role in parts for _ in range(count)]


def _from_text(
    text: str, cost_model: CostModel | str | Path | None
) -> tuple[list[Machine], str | None]:
    """Return the machines of ``2p6d``, or of a file with the text of their link."""
    # A text alone is like a file with one table of machines that says nothing of them.
    tables: dict[str, Any] = {"machines": {text: {}}, "link": {}}
    if text.endswith(".toml"):
        tables |= read_toml(text, "a fleet in TOML")

    kinds = tables["machines"] if isinstance(tables["machines"], dict) else {}
    are_tables = all(isinstance(table, dict) for table in (*tables.values(), *kinds.values()))
    if len(tables) > 2 or not kinds or not are_tables:
        raise InputError(f"{text}: found {', '.join(tables)}; expected tables link, machines.2p")

    machines = list[Machine]()
    for name, fields in kinds.items():
        where = f"{text}: machines: {name}"
        texts = {key: str(value) for key, value in fields.items()}
        limits = convert_all(texts, _MACHINE_FIELDS, where)
        cost = limits.pop("cost_model", cost_model)
        capacity = limits.pop("kv_capacity", None)
        # A table ``2p`` is of two machines. Those before it count for the limit on all.
        for role in roles_of(name, len(machines)):
            machines.append(Machine(cost, capacity, Limits(**limits) if limits else None, role))

    return machines, ",".join(f"{key}={value}" for key, value in tables["link"].items()) or None


def stated_fleet(
    data: Mapping[str, Any], cost_model: CostModel | str | Path | None = None
) -> Fleet | None:
    """Return the fleet of the ``pools`` of a result file, or None if it has none.

    Parameters
    ----------
    data : mapping
        The JSON object of a file.
    cost_model : BatchCost, str or path, optional
        The batch times of every machine.
    """
    if data.get("pools") is None:
        return None

    pools = data["pools"]
    try:
        if "machines" in pools:
            raise InputError("pools: found machines that differ; expected --fleet with their file")
        machines = [Machine(cost_model, role=role) for role in pools["roles"]]
        return Fleet(machines, Link(**pools["link"]), pools["deflect_below"])
    except (KeyError, TypeError):
        raise InputError(
            f"pools: found {pools!r}; expected roles, link and deflect_below"
        ) from None


def kv_link(
    model: str | Architecture,
    bandwidth_gb_s: float,
    latency_s: float = 0.0,
    *,
    recompute_last: bool = False,
) -> Link:
    """Return the link over which the KV of a model moves at a bandwidth.

    Parameters
    ----------
    model : str or Architecture
        A name of `optsched.costs.architectures.architecture`, or an architecture.
    bandwidth_gb_s : float
        Gigabytes (10**9 bytes) per second, such as the ``link_gb_s`` of a device.
    latency_s : float
    recompute_last : bool
        See `Link`.
    """
    if not 0 < bandwidth_gb_s < math.inf:
        raise InputError(f"bandwidth_gb_s: found {bandwidth_gb_s!r}; expected a number > 0")

    shape = architecture(model) if isinstance(model, str) else model
    return Link(latency_s, shape.kv_bytes / (bandwidth_gb_s * 1e9), recompute_last)


def parse_link(text: str, cost_name: str = "") -> Link:
    """Return the link of a text such as ``latency=50us,bandwidth=50GB/s,model=llama3-8b``.

    Parameters
    ----------
    text : str
        ``latency`` and ``token`` are times (``s``, ``ms``, ``us``), ``bandwidth`` is divided into
        the KV bytes of a token of ``model``, and ``recompute_last`` is true or false (`Link`). At
        most one of ``token`` and ``bandwidth`` is given.
    cost_name : str
        The cost model's name: where it begins with that of a known model, ``model`` may be absent.
    """
    where = f"link {text!r}"
    # A `Parameter` is its type, whether it may be None, and its default.
    known = dict.fromkeys(("latency", "token", "bandwidth", "model"), Parameter(str, False, ""))
    known["recompute_last"] = Parameter(bool, False, False)
    values = convert_all(read_pairs(filter(None, text.split(",")), where), known, where)
    recompute_last = values.get("recompute_last", False)
    latency = _number(values.get("latency", "0"), _SECONDS, f"{where}: latency")
    token = _number(values.get("token", "0"), _SECONDS, f"{where}: token")
    if "bandwidth" not in values:
        return Link(latency, token, recompute_last)
    if "token" in values:
        raise InputError(f"{where}: token: found beside bandwidth; expected one of both")

    bandwidth = _number(values["bandwidth"], _GB_S, f"{where}: bandwidth")
    names = sorted(ARCHITECTURES, key=len, reverse=True)  # of two that fit, the longer one
    of_cost = next((name for name in names if cost_name.startswith(name)), None)
    model = values.get("model") or of_cost
    if model is None:
        raise InputError(f"{where}: model: found nothing; expected a model, whose KV moves")

    return kv_link(model, bandwidth, latency, recompute_last=recompute_last)


def _number(text: str, units: Mapping[str, int], where: str) -> float:
    """Return a number >= 0 with a unit: exact in decimal, and rounded once."""
    form = r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)\s*([A-Za-z/]*)\s*"
    match = re.fullmatch(form, text)
    if match is None or match[2] not in units:
        words = ", ".join(filter(None, units))
        raise InputError(f"{where}: found {text!r}; expected a number with one of {words}")

    return float(Decimal(match[1]).scaleb(units[match[2]]))
