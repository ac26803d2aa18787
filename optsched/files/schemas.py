"""The fields of optsched's files as pydantic models, for JSON Schemas and for checks of shape.

Long columns have a precise schema and are not validated here. `optsched.problem.instance` checks
them in one pass, and its errors name the request and the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError, create_model

from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError
from optsched.problem.instance import MAX_ROUND
from optsched.problem.metrics import TABLE

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
_Counts = SkipValidation[list[Annotated[int, Field(ge=1, le=MAX_TOKENS)]]]
_Integers = SkipValidation[list[int]]
_Limits = SkipValidation[list[Annotated[float, Field(gt=0)] | None] | None]


class LimitsFile(BaseModel):
    """Hard limits of the machine for each batch; null or absent means no limit."""

    model_config = _STRICT
    max_batch_tokens: SkipValidation[_Count | None] = Field(
        None, description="maximum tokens processed in one batch, prefill and decode together"
    )
    max_prefill_tokens: SkipValidation[_Count | None] = Field(
        None, description="maximum prefill tokens processed in one batch"
    )
    max_running: SkipValidation[_Count | None] = Field(
        None, description="maximum requests that hold KV after a batch"
    )


class ForecastFile(BaseModel):
    """Predicted output tokens that requests have left, renewed every few tokens."""

    model_config = _STRICT
    every: SkipValidation[_Count] = Field(description="tokens from one prediction to the next")
    offsets: _Integers = Field(
        description="request i has the entries remaining[offsets[i]:offsets[i+1]], one or more"
    )
    remaining: SkipValidation[list[Annotated[float, Field(ge=0, le=MAX_TOKENS)]]] = Field(
        description="tokens left; entry k of a request is for when it has produced every * k tokens"
    )


class RequestsFile(BaseModel):
    """Columns of equal length, one entry per request."""

    model_config = _STRICT
    arrival: SkipValidation[list[Annotated[float, Field(ge=0, le=MAX_ROUND)]]] = Field(
        description="whole rounds, or seconds", json_schema_extra={"minItems": 1}
    )
    prompt_tokens: _Counts = Field(json_schema_extra={"minItems": 1})
    output_tokens: _Counts = Field(json_schema_extra={"minItems": 1})
    predicted: SkipValidation[list[Annotated[float, Field(ge=1, le=MAX_TOKENS)]] | None] = Field(
        None, description="predicted output tokens"
    )
    predicted_lower: SkipValidation[_Counts | None] = Field(
        None, description="lower ends of intervals that contain output_tokens"
    )
    predicted_upper: SkipValidation[_Counts | None] = Field(
        None, description="upper ends of these intervals"
    )
    forecast: ForecastFile | None = None
    slo_ttft: _Limits = Field(None, description="max time to first token; null: no limit")
    slo_tpot: _Limits = Field(None, description="max mean time per output token after the first")
    slo_gap: _Limits = Field(None, description="max time between two output tokens in succession")
    slo_latency: _Limits = Field(None, description="max time from arrival to last token")
    id: SkipValidation[list[str | int] | None] = Field(
        None, description="external names, unique", json_schema_extra={"uniqueItems": True}
    )


class KnownFile(BaseModel):
    """What is known of the optimum, in the instance's unit."""

    model_config = _STRICT
    optimum: float | None = None
    bound: float | None = None
    best_known: float | None = None
    reference: str | None = None


class InstanceFile(BaseModel):
    """An instance: requests, the KV capacity and the limits of the machine."""

    model_config = ConfigDict(
        **_STRICT,
        json_schema_extra={
            "if": {"properties": {"time_unit": {"const": "round"}}},
            "then": {
                "properties": {
                    "requests": {"properties": {"arrival": {"items": {"type": "integer"}}}}
                }
            },
        },
    )
    format: Literal["optsched-instance"]
    version: Literal[1]
    name: str | None = Field(None, description="absent: the name of the file")
    time_unit: SkipValidation[Literal["round", "second"]]
    kv_capacity: SkipValidation[_Count] = Field(description="in tokens")
    kv_accounting: SkipValidation[Literal["generated", "cached"]] = Field(
        description="whether the KV of a running request's newest token counts"
    )
    kv_block_tokens: SkipValidation[Annotated[int, Field(ge=1, le=MAX_TOKENS)]] = Field(
        1, description="KV tokens of a block; a request holds whole blocks of kv_capacity"
    )
    limits: LimitsFile | None = None
    hybrid_batching: bool | None = None
    chunked_prefill: bool | None = None
    requests: RequestsFile
    known: KnownFile | None = None


class ScheduleFile(BaseModel):
    """A schedule: start times (kind "starts") or flat columns of batches (kind "batches")."""

    model_config = ConfigDict(
        **_STRICT,
        json_schema_extra={
            "if": {"properties": {"kind": {"const": "starts"}}},
            "then": {"anyOf": [{"required": ["starts"]}, {"required": ["columns"]}]},
            "else": {
                "anyOf": [
                    {
                        "required": [
                            "batch_offsets", "request", "tokens", "evicted_offsets", "evicted",
                        ]
                    },
                    {"required": ["columns"]},
                ]
            },
        },
    )  # fmt: skip
    format: Literal["optsched-schedule"]
    version: Literal[1]
    instance_sha256: Sha256 | None = None
    kind: Literal["starts", "batches"]
    starts: _Integers | None = Field(
        None, description="start of each request, which runs from the round after it"
    )
    batch_offsets: _Integers | None = Field(
        None, description="batch j processes the entries batch_offsets[j]:batch_offsets[j+1]"
    )
    request: _Integers | None = Field(None, description="request of each entry, from 0")
    tokens: _Integers | None = Field(None, description="tokens that each entry processes")
    evicted_offsets: _Integers | None = Field(
        None, description="batch j follows the evictions evicted_offsets[j]:evicted_offsets[j+1]"
    )
    evicted: _Integers | None = None
    start: SkipValidation[list[float] | None] = Field(
        None,
        description="start of each batch, in the instance's unit; absent: as early as possible",
    )
    worker: _Integers | None = Field(None, description="worker of each batch, from 0")
    evict_mode: Literal["restart", "recompute"] | None = None
    cost_model_sha256: Sha256 | None = None
    columns: Annotated[str, Field(pattern=r"^[^/\\]+\.parquet$")] | None = Field(
        None, description="Parquet file beside this one that holds the columns, one row of lists"
    )
    columns_sha256: Sha256 | None = Field(None, description="digest of that file's bytes")


class InstanceReference(BaseModel):
    """The instance that a result is about."""

    model_config = _OPEN
    name: str
    sha256: Sha256
    requests: Annotated[int, Field(ge=1)]


if TYPE_CHECKING:
    MetricsFile = BaseModel  # its fields are rows of the table of metrics
else:
    MetricsFile = create_model(
        "MetricsFile",
        __config__=_OPEN,
        __doc__="Metrics in the instance's unit; null: unknown or undefined.",
        **{
            metric.name: (
                (int if metric.unit == "count" else float) | None,
                Field(None, description=metric.meaning or None),
            )
            for metric in TABLE.values()
        },
    )


class ProgressFile(BaseModel):
    """Incumbent and bound whenever one changed, as columns of equal length; null: unknown."""

    model_config = _OPEN
    elapsed_s: list[float]
    incumbent: list[float | None]
    bound: list[float | None]


class ResultFile(BaseModel):
    """What `solve`, `bound`, `simulate` and `evaluate` write; further fields may appear."""

    model_config = _OPEN
    format: Literal["optsched-result"]
    version: Literal[1]
    optsched: str = Field(description="version of optsched")
    command: str
    instance: InstanceReference
    time_unit: Literal["round", "second"] | None = None
    formulation: str | None = None
    method: str | None = None
    workers: int | None = Field(None, description="number of equal workers; absent: 1")
    objective_name: str | None = None
    status: Literal["optimal", "feasible", "infeasible", "no_incumbent", "error"] | None = None
    objective: float | None = Field(None, description="null without an incumbent")
    bound: float | None = Field(None, description="null when unknown")
    gap: float | None = None
    gap_definition: str | None = None
    scope: dict[str, Any] | None = Field(
        None, description="the schedules for which the bound holds: workers, without, words"
    )
    certificate: str | None = Field(None, description="file")
    certificate_missing: str | None = Field(None, description="why there is no certificate")
    metrics: MetricsFile | None = None
    build_s: float | None = None
    solve_s: float | None = None
    progress: ProgressFile | None = None
    seed: int | None = None
    threads: int | None = None
    versions: dict[str, str] | None = None
    schedule: str | None = Field(None, description="file")


class ComparedPolicy(BaseModel):
    """One scheduler in a comparison."""

    model_config = _OPEN
    policy: str
    metrics: MetricsFile | None = None
    ratio_to_best_known: float | None = None
    ratio_to_bound: float | None = None
    wall_s: float | None = None


class ComparisonFile(BaseModel):
    """What `compare` writes; further fields may appear."""

    model_config = _OPEN
    format: Literal["optsched-comparison"]
    version: Literal[1]
    optsched: str = Field(description="version of optsched")
    command: str
    instance: InstanceReference
    bound: float | None = None
    best_known: float | None = None
    policies: list[ComparedPolicy]


class CapacityFile(BaseModel):
    """What `capacity` writes; further fields may appear. Rates are multiples of the instance's."""

    model_config = _OPEN
    format: Literal["optsched-capacity"]
    version: Literal[1]
    optsched: str = Field(description="version of optsched")
    command: str
    instance: InstanceReference
    attainment: float = Field(description="share of requests within all their SLOs", gt=0, le=1)
    policies: list[dict[str, Any]]
    best_rate_scale: float | None = None
    best_origin: str | None = None
    impossible_rate_scale: float | None = Field(
        None, description="no schedule attains it at this rate or a larger one"
    )
    bound_origin: str | None = None
    workers: dict[str, float | int | None] | None = Field(
        None, description="workers given, or the fewest found and those proved too few"
    )


class TradeoffBound(BaseModel):
    """A bound on the weighted sum of mean latency and mean TTFT."""

    model_config = _OPEN
    ttft_weight: Annotated[float, Field(ge=0, le=1)]
    bound: float
    bound_origin: str


class TradeoffCurve(BaseModel):
    """Corners of the curve that no schedule crosses, as columns of equal length."""

    model_config = _OPEN
    mean_latency: list[float]
    mean_ttft: list[float]


class TradeoffPolicy(BaseModel):
    """What a policy reaches, and the bound on TTFT at its latency."""

    model_config = _OPEN
    policy: str
    mean_latency: float
    mean_ttft: float
    mean_ttft_bound: float | None = None


class TradeoffFile(BaseModel):
    """What `tradeoff` writes, in seconds; further fields may appear."""

    model_config = _OPEN
    format: Literal["optsched-tradeoff"]
    version: Literal[1]
    optsched: str = Field(description="version of optsched")
    command: str
    instance: InstanceReference
    bounds: list[TradeoffBound]
    curve: TradeoffCurve
    policies: list[TradeoffPolicy]


class CertificateFile(BaseModel):
    """A bound or an optimum that the checker recomputes exactly; further fields may appear."""

    model_config = _OPEN
    format: Literal["optsched-certificate"]
    version: Literal[1]
    instance_sha256: Sha256
    model: str
    objective: str
    claim: Literal["bound", "optimal"]
    value: int | float
    denominator: Annotated[int, Field(ge=1)] | None = None
    cost_model: SkipValidation[dict[str, Any] | None] = Field(
        None, description="in seconds: the layers, and the decimal text of every coefficient"
    )
    ticks_per_second: Annotated[int, Field(ge=1)] | None = Field(
        None, description="in seconds: the value is an integer number of ticks"
    )
    tree: SkipValidation[dict[str, Any]] = Field(
        description="a leaf names its relaxation; a branch splits the starts of one request"
    )
    schedule: SkipValidation[dict[str, Any] | None] = Field(
        None, description="a schedule file with that value, if the claim is optimal"
    )
    sha256: Sha256 = Field(description="digest of the rest of the file in canonical JSON")


class MeasuredFile(BaseModel):
    """Times that a real server took for an instance's requests, in the instance's order."""

    model_config = _STRICT
    format: Literal["optsched-measured"]
    version: Literal[1]
    name: str | None = Field(None, description="what tables call the server")
    instance_sha256: Sha256 | None = None
    ttft: SkipValidation[list[Annotated[float, Field(ge=0)] | None] | None] = Field(
        None, description="seconds from each arrival to the first token; null: not measured"
    )
    latency: SkipValidation[list[Annotated[float, Field(gt=0)] | None]] = Field(
        description="seconds from each arrival to the last token; null: see errors",
        json_schema_extra={"minItems": 1},
    )
    errors: dict[Annotated[str, Field(pattern=r"^[0-9]+$")], str] | None = Field(
        None, description="requests, from 0, that were not served as the instance says, and why"
    )


MODELS: Mapping[str, type[BaseModel]] = {
    "instance": InstanceFile,
    "schedule": ScheduleFile,
    "result": ResultFile,
    "comparison": ComparisonFile,
    "certificate": CertificateFile,
    "measured": MeasuredFile,
    "capacity": CapacityFile,
    "tradeoff": TradeoffFile,
}
"""The model of each file format."""


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a file format."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **MODELS[name].model_json_schema(),
        "title": f"optsched-{name}",
    }


def check_shape(name: str, data: Mapping[str, Any]) -> None:
    """Check that a parsed file has the fields of its format, of the right types."""
    try:
        MODELS[name].model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(_words(name, first)) from None


def _words(name: str, error: Mapping[str, Any]) -> str:
    path = [part for part in error["loc"] if not str(part).startswith("function-")]
    place = ".".join(str(part) for part in path)
    if error["type"] == "missing":
        return f"{place}: found nothing; expected this field of the format {name!r}"
    if error["type"] == "extra_forbidden":
        known = ", ".join(_fields_at(name, path[:-1]))
        return f"{place}: unknown field; known here are {known}"

    if error["type"] == "model_type":
        return f"{place}: found {_brief(error['input'])}; expected an object with named fields"

    return f"{place}: found {_brief(error['input'])}; {error['msg'][0].lower()}{error['msg'][1:]}"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fields_at(name: str, path: list[Any]) -> list[str]:
    model: Any = MODELS[name]
    for part in path:
        kinds = [model.model_fields[part].annotation] if part in model.model_fields else []
        for kind in kinds:
            for option in (kind, *getattr(kind, "__args__", ())):
                if isinstance(option, type) and issubclass(option, BaseModel):
                    model = option

    return list(model.model_fields)
