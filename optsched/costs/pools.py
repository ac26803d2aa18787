"""Pools and links from texts: ``2p6d``, and ``latency=50us,bandwidth=50GB/s,model=llama3-8b``."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from optsched.costs.architectures import ARCHITECTURES, Architecture, architecture
from optsched.costs.cost import CostModel, cost_for
from optsched.costs.machine import Link, Machine, Pools, Role
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance, Limits
from optsched.problem.specs import Parameter, convert_all, read_pairs
from optsched.problem.text_files import read_toml

ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "m": "mixed"}
MAX_MACHINES = 10_000

_SECONDS = {"": 0, "s": 0, "ms": -3, "us": -6, "ns": -9}
# Powers of ten of units.
_GB_S = {"KB/s": -6, "MB/s": -3, "GB/s": 0, "TB/s": 3}
_OWN = {"cost_model": Parameter(str, False, None)}
_OWN |= dict.fromkeys(("kv_capacity", *vars(Limits())), Parameter(int, False, None))
"""What a file may say of machines. The rest is the instance's and the caller's."""


def roles_of(text: str, others: int = 0) -> list[Role]:
    """Return the role of each machine of ``2p6d``: 2 prefill and 6 decode machines (m: mixed).

    `others`: how many machines stand beside them.
    """
    if not re.fullmatch(r"(\d{1,5}[pdm])+", text):
        raise InputError(f"pools {text!r}: expected such as 2p6d, 4m, 2p2d4m or a .toml file")

    parts = [(int(count), ROLES[role]) for count, role in re.findall(r"(\d+)([pdm])", text)]
    total = sum(count for count, _ in parts)
    if not 1 <= total <= MAX_MACHINES - others:
        found = f"pools {text!r}: found {total} machines and {others} others"
        raise InputError(f"{found}; expected 1 to {MAX_MACHINES} in all")

    return [role for count, role in parts for _ in range(count)]


def make_pools(
    pools: str,
    instance: Instance,
    cost_model: CostModel | str | Path | None = None,
    link: Link | str | None = None,
    deflect_below: int = 0,
) -> Pools:
    """Return the pools of a text, whose machines have an instance's capacity and limits.

    Parameters
    ----------
    pools : str
        The number of machines of each role: ``2p6d`` is 2 prefill and 6 decode machines, and
        ``4m`` is 4 mixed ones. Or a ``.toml`` file of machines that differ (docs/howto/pools.md).
    instance : Instance
    cost_model : BatchCost, str or path, optional
        The batch times of every machine.
    link : Link or str, optional
        What a move of KV takes, or the text of it (`parse_link`). None: nothing.
    deflect_below : int
        See `Pools`.
    """
    tables: dict[str, Any] = {"machines": {pools: {}}, "link": {}}
    if pools.endswith(".toml"):
        tables |= read_toml(pools, "pools in TOML")

    kinds = tables["machines"] if isinstance(tables["machines"], dict) else {}
    shaped = kinds and all(isinstance(one, dict) for one in (*tables.values(), *kinds.values()))
    if len(tables) > 2 or not shaped:
        raise InputError(f"{pools}: found {', '.join(tables)}; expected tables link, machines.2p")

    machines = list[Machine]()
    for name, own in kinds.items():
        where = f"{pools}: machines: {name}"
        given = convert_all({key: str(value) for key, value in own.items()}, _OWN, where)
        cost = cost_for(instance, given.pop("cost_model", cost_model))
        capacity = given.pop("kv_capacity", instance.kv_capacity)
        limits = replace(instance.limits, **given)
        model = None if instance.in_rounds else cost
        roles = roles_of(name, len(machines))
        machines += [Machine(capacity, model, limits, role) for role in roles]

    if link is None and tables["link"]:
        link = ",".join(f"{key}={value}" for key, value in tables["link"].items())

    moved = parse_link(link, machines[0].cost.name) if isinstance(link, str) else link or Link()
    return Pools(machines, moved, deflect_below)


def stated_pools(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `make_pools` for the ``pools`` of a result file.

    Parameters
    ----------
    data : mapping
        The JSON object of a file. Without pools there are no arguments.
    """
    if data.get("pools") is None:
        return {}

    try:
        roles, link, below = (data["pools"][k] for k in ("roles", "link", "deflect_below"))
        if "machines" in data["pools"]:
            raise InputError("pools: found machines that differ; expected --pools with their file")
        letters = {role: letter for letter, role in ROLES.items()}
        text = "".join(f"1{letters[role]}" for role in roles)
        return {"pools": text, "link": Link(**link), "deflect_below": below}
    except (KeyError, TypeError):
        raise InputError(
            f"pools: found {data['pools']!r}; expected roles, link and deflect_below"
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
        the KV bytes of a token of ``model``, and ``recompute_last`` is true or false. Either
        ``token`` or ``bandwidth`` is given.
    cost_name : str
        The cost model's name: where it begins with that of a known model, ``model`` may be absent.
    """
    where, word = f"link {text!r}", Parameter(str, False, "")
    known = dict.fromkeys(("latency", "token", "bandwidth", "model"), word)
    known["recompute_last"] = Parameter(bool, False, False)
    given = convert_all(read_pairs(filter(None, text.split(",")), where), known, where)
    again = given.get("recompute_last", False)
    latency, token = (
        _number(given.get(key, "0"), _SECONDS, f"{where}: {key}") for key in ("latency", "token")
    )
    if "bandwidth" not in given:
        return Link(latency, token, again)
    if "token" in given:
        raise InputError(f"{where}: token: found beside bandwidth; expected one of both")

    bandwidth = _number(given["bandwidth"], _GB_S, f"{where}: bandwidth")
    names = sorted(ARCHITECTURES, key=len, reverse=True)
    begins = next((name for name in names if cost_name.startswith(name)), None)
    model = given.get("model") or begins
    if model is None:
        raise InputError(f"{where}: model: found nothing; expected a model, whose KV moves")

    return kv_link(model, bandwidth, latency, recompute_last=again)


def _number(text: str, units: Mapping[str, int], where: str) -> float:
    """Return a number >= 0 with a unit."""
    found = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)\s*([A-Za-z/]*)\s*", text)
    if found is None or found[2] not in units:
        words = ", ".join(filter(None, units))
        raise InputError(f"{where}: found {text!r}; expected a number with one of {words}")

    return float(Decimal(found[1]).scaleb(units[found[2]]))
