"""Files that plots and reports are made from, recognised by their formats; default cost models."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optsched.costs.cost import CostModel, shipped_models
from optsched.costs.load import cost_for, load_cost_model
from optsched.files.library import cost_model_of
from optsched.files.read_write import (
    read_instance,
    read_schedule,
    schedule_from_dict,
    shipped_instance,
)
from optsched.files.strict_json import Place, check_format, read_json_and_digest
from optsched.problem.errors import InputError, OptschedError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule

COST_MODEL_VARIABLE = "OPTSCHED_COST_MODEL"


def read_source(path: str, allowed: tuple[str, ...]) -> tuple[str, dict[str, Any], str]:
    """Return the format, the JSON object and the SHA-256 of a file, which is read once."""
    data, digest = read_json_and_digest(path)
    with Place(Path(path)):
        return check_format(data, allowed), data, digest


def named_file(named: object, beside: str | Path) -> Path | None:
    """Return the file that another file names, if need be from `beside` that file.

    It is looked for as named, then from the other file's folder, then by its bare name there.
    """
    if not isinstance(named, str) or not named:
        return None
    for place in (Path(named), Path(beside).parent / named, Path(beside).parent / Path(named).name):
        if place.is_file():
            return place

    return None


def instance_for(digest: object, given: str | None, what: str) -> Instance:
    """Return the given instance, or the shipped one with a digest.

    `given`: the user's file or name of it. `what`: what was made for the instance, for errors.
    """
    if given is None:
        shipped = shipped_instance(digest)
        if shipped is not None:
            return shipped

        raise UsageError(f"--instance: {what} needs the instance that it was made for")

    instance = read_instance(given)
    if digest not in (None, instance.sha256):
        raise InputError(
            f"{given}: found the sha256 {instance.sha256}; expected {digest}, the instance that "
            f"{what} was made for"
        )

    return instance


def cost_model_like(
    instance: Instance, given: str | None, known: object, digest: object = None
) -> CostModel | None:
    """Return the given cost model, or the shipped one that a file refers to.

    `known`: what the file says of a model. `digest`: that of the model of the file's schedule.
    """
    # A file refers to a model by a digest, or by an object with its name and digest.
    referred = known.get("sha256") if isinstance(known, Mapping) else None
    digests = {text for text in (digest, referred) if isinstance(text, str)}
    if given is None and not instance.in_rounds and digests:
        for name in shipped_models():
            model = load_cost_model(name)
            if model.sha256 in digests:
                return model

    # In rounds there is none to return, but one that was given is refused.
    cost = cost_for(instance, stated_cost_model(instance, given))
    return None if instance.in_rounds else cost


def stated_cost_model(instance: Instance, given: str | None, file: str = "") -> str | None:
    """Return the given cost model, else that of a library's file, else the environment's.

    `file`: the text by which the user named the instance.
    """
    name = given or cost_model_of(file)
    default = os.environ.get(COST_MODEL_VARIABLE)
    if name is not None or not default or instance.in_rounds:
        return name

    try:
        load_cost_model(default)  # so that an error names the variable
    except OptschedError as error:
        raise InputError(f"{COST_MODEL_VARIABLE}: {error}") from None

    return default


def schedule_of(
    path: str | Path,
    instance: Instance,
    given: str | None,
    known: object = None,
    data: dict[str, Any] | None = None,
) -> tuple[Schedule, CostModel | None]:
    """Return the schedule in a file and the cost model that it was made for.

    `given`: the user's cost model. `known`: what the file says of one. `data`: the JSON object of
    the file, if it was read already.
    """
    if data is None:
        schedule = read_schedule(path, instance)
    else:
        with Place(Path(path)):
            schedule = schedule_from_dict(data, instance, folder=Path(path).parent)

    return schedule, cost_model_like(instance, given, known, schedule.cost_model_sha256)
