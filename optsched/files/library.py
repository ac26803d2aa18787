"""The library of instances: its folder, and ``bks.json``, the best known schedules and bounds.

Each entry of ``bks.json`` stands on one line and is sealed by a digest, so that two people who
improve two instances change two lines, and no number changes unseen.
"""

import hashlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from optsched.files.strict_json import read_json, write_json
from optsched.problem.errors import InputError
from optsched.problem.instance import canonical_json

PREFIX = "library/"
"""What stands before the name of a library's instance where a file is expected."""
TABLE = "bks.json"


def shipped_folder() -> Path:
    """Return the folder of the shipped instances, in a checkout or an installed wheel."""
    inside = Path(str(resources.files("optsched"))) / "_data" / "instances"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "instances"


def library_folder(folder: str | Path | None = None) -> Path:
    """Return the folder of a library; None: the shipped one."""
    return shipped_folder() / "library" if folder is None else Path(folder)


def instance_file(name: str, folder: str | Path | None = None) -> Path:
    """Return the file of a library's instance."""
    return library_folder(folder) / f"{name}.json.gz"


def read_library(folder: str | Path | None = None) -> dict[str, Any]:
    """Return what a library's ``bks.json`` holds, checked for its shape alone.

    Parameters
    ----------
    folder : path, optional
        The library's folder; default: the shipped one.
    """
    return read_json(library_folder(folder) / TABLE, expect="library")


def write_library(data: dict[str, Any], folder: str | Path | None = None) -> None:
    """Write ``bks.json``, an instance on each line, families together."""
    order = list(data["families"])
    rows = sorted(data["instances"].items(), key=lambda row: order.index(row[1]["family"]))
    write_json({**data, "instances": dict(rows)}, library_folder(folder) / TABLE)


def entry_of(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of an instance, named with or without ``library/``."""
    bare = name.removeprefix(PREFIX)
    members = [key for key, entry in data["instances"].items() if entry["family"] == bare]
    if members:
        raise InputError(f"library: {bare!r} is a family; expected one of {', '.join(members)}")
    if bare not in data["instances"]:
        raise InputError(
            f"library: {bare!r} is unknown; `optsched list library` has the names, such as "
            f"{', '.join(list(data['instances'])[:4])}"
        )

    entry: dict[str, Any] = data["instances"][bare]
    return entry


def sealed(name: str, entry: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with the digest of itself, its name, its release and its family's summary."""
    content = {key: value for key, value in entry.items() if key != "sha256"}
    summary = data["families"].get(entry["family"])
    sealed_content = {"name": name, "release": data["release"], "summary": summary, **content}
    return {**content, "sha256": hashlib.sha256(canonical_json(sealed_content)).hexdigest()}


def cost_model_of(name: str) -> str | None:
    """Return the cost model of a shipped library's instance, or None for any other text."""
    if not name.startswith(PREFIX) or Path(name).is_file():
        return None

    found: str | None = entry_of(name, read_library()).get("cost_model")
    return found
