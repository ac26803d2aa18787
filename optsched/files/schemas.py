"""The fields of optsched's files as pydantic models, for JSON Schemas and for checks of shape.

``schemas.toml`` has the fields. Long columns have a precise schema and are not validated here.
`optsched.problem.instance` checks them in one pass, and its errors name the request and the value.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError
from optsched.problem.instance import MAX_ROUND
from optsched.problem.metrics import TABLE


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Open(_Strict):
    model_config = ConfigDict(extra="allow")


class _File(_Strict):
    format: str  # `schema` and `check_format` say which
    version: Literal[1]


class _OpenFile(_File):
    model_config = ConfigDict(extra="allow")


def _limited(kind: Any, **limits: Any) -> Any:
    return Annotated[kind, Field(**limits)]


_TYPES: dict[str, Any] = {
    "Any": Any,
    "Literal": Literal,
    "Long": SkipValidation,
    "Object": dict[str, Any],
    "MAX_TOKENS": MAX_TOKENS,
    "unit": Literal["round", "second"],
    "Sha256": _limited(str, pattern="^[0-9a-f]{64}$"),
    "count": _limited(int, ge=1, le=2**63 - 1),
    "tokens": _limited(int, ge=1, le=MAX_TOKENS),
    "moment": _limited(float, ge=0, le=MAX_ROUND),
    "at_least_0": _limited(float, ge=0),
    "at_least_1": _limited(int, ge=1),
    "above_0": _limited(float, gt=0),
    "whole": partial(_limited, int),
    "number": partial(_limited, float),
    "text": partial(_limited, str),
    "not_empty": partial(_limited, json_schema_extra={"minItems": 1}),
    "unique": partial(_limited, json_schema_extra={"uniqueItems": True}),
    "Strict": _Strict,
    "Open": _Open,
    "File": _File,
    "OpenFile": _OpenFile,
}


def _model(name: str, base: type[BaseModel], says: str | None, fields: dict[str, Any]) -> None:
    """Add a model to the types, from types, defaults and words by field."""
    made: dict[str, Any] = {
        field: (kind, Field(default, description=words or None))
        for field, (kind, default, words) in fields.items()
    }
    _TYPES[name] = pydantic.create_model(name, __base__=base, __doc__=says, **made)


def _field(entry: str) -> tuple[Any, Any, str]:
    """Return the type, the default and the words of a field in ``schemas.toml``."""
    head, _, words = entry.partition(": ")
    text, _, default = head.partition(" = ")
    kind = eval(text.rstrip("?"), _TYPES)  # the package's own table
    if text.endswith("?"):
        return kind | None, None, words

    return kind, eval(default or "...", _TYPES), words


_model(
    "MetricsFile",
    _Open,
    "Metrics in the instance's unit; null: unknown or undefined.",
    {
        metric.name: ((int if metric.unit == "count" else float) | None, None, metric.meaning)
        for metric in TABLE.values()
    },
)
for _name, _table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items():
    _base, _says = _TYPES[_table.pop("_base")], _table.pop("_says", None)
    _entries = {one: _field(entry) for names, entry in _table.items() for one in names.split()}
    _model(_name, _base, _says, _entries)

MODELS: Mapping[str, type[BaseModel]] = {
    name.removesuffix("File").lower(): model
    for name, model in _TYPES.items()
    if name[-4:] == "File" and issubclass(model, _File) and model not in (_File, _OpenFile)
}
"""The model of each file format."""

_WHOLE_TIMES = {key: {"items": {"type": ["integer", "null"]}} for key in ("arrival", "delay")}
_OF_BATCHES = ["batch_offsets", "request", "tokens", "evicted_offsets", "evicted"]
_IN_COLUMNS = {"required": ["columns"]}
_CONDITIONS: Mapping[str, dict[str, Any]] = {
    "instance": {
        "if": {"properties": {"time_unit": {"const": "round"}}},
        "then": {"properties": {"requests": {"properties": _WHOLE_TIMES}}},
    },
    "schedule": {
        "if": {"properties": {"kind": {"const": "starts"}}},
        "then": {"anyOf": [{"required": ["starts"]}, _IN_COLUMNS]},
        "else": {"anyOf": [{"required": _OF_BATCHES}, _IN_COLUMNS]},
    },
}


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a file format."""
    made = MODELS[name].model_json_schema()
    fields = made["properties"]
    fields["format"] = {"const": f"optsched-{name}", **fields["format"]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**head, **made, "title": f"optsched-{name}", **_CONDITIONS.get(name, {})}


def check_shape(name: str, data: Mapping[str, Any]) -> None:
    """Check that a parsed file has the fields of its format, of the right types."""
    try:
        MODELS[name].model_validate(data)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = [part for part in first["loc"] if not str(part).startswith("function-")]
        found = repr(first["input"])
        words = {
            "missing": f"found nothing; expected this field of the format {name!r}",
            "extra_forbidden": f"unknown field; known here are {_fields_at(name, path[:-1])}",
        }.get(first["type"])
        if words is None:
            right = first["msg"][0].lower() + first["msg"][1:]
            if first["type"] == "model_type":
                right = "expected an object with named fields"

            words = f"found {found if len(found) <= 80 else found[:77] + '...'}; {right}"

        raise InputError(f"{'.'.join(map(str, path))}: {words}") from None


def _fields_at(name: str, path: Sequence[int | str]) -> str:
    model: type[BaseModel] = MODELS[name]
    for part in path:
        field = model.model_fields.get(str(part))
        for kind in () if field is None else (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind

    return ", ".join(model.model_fields)
