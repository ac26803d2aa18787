"""The fields of optsched's files as pydantic models, for JSON Schemas and for checks of shape.

Long columns have a precise schema and are not validated here. `optsched.problem.instance` checks
them in one pass, and its errors name the request and the value.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field, JsonValue, SkipValidation
from pydantic.config import JsonDict

from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError
from optsched.problem.instance import MAX_ROUND
from optsched.problem.metrics import TABLE

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
_Counts = SkipValidation[list[Annotated[int, Field(ge=1, le=MAX_TOKENS)]]]
_Integers = SkipValidation[list[int]]
_Limit = SkipValidation[_Count | None]
_Some = SkipValidation[_Counts | None]
_Unit = Literal["round", "second"]
_Slos = SkipValidation[list[Annotated[float, Field(gt=0)] | None] | None]
_NOT_EMPTY: JsonDict = {"minItems": 1}


def _null(description: str, **more: Any) -> Any:
    """Return a field that may be absent."""
    return Field(None, description=description, **more)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Open(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class LimitsFile(_Strict):
    """Hard limits of the machine for each batch; null or absent means no limit."""

    max_batch_tokens: _Limit = _null(
        "maximum tokens processed in one batch, prefill and decode together"
    )
    max_prefill_tokens: _Limit = _null("maximum prefill tokens processed in one batch")
    max_running: _Limit = _null("maximum requests that hold KV after a batch")


class ForecastFile(_Strict):
    """Predicted output tokens that requests have left, renewed every few tokens."""

    every: SkipValidation[_Count] = Field(description="tokens from one prediction to the next")
    offsets: _Integers = Field(
        description="request i has the entries remaining[offsets[i]:offsets[i+1]], one or more"
    )
    remaining: SkipValidation[list[Annotated[float, Field(ge=0, le=MAX_TOKENS)]]] = Field(
        description="tokens left; entry k of a request is for when it has produced every * k tokens"
    )


class RequestsFile(_Strict):
    """Columns of equal length, one entry per request."""

    arrival: SkipValidation[list[Annotated[float, Field(ge=0, le=MAX_ROUND)] | None]] = Field(
        description="whole rounds, or seconds; null beside after", json_schema_extra=_NOT_EMPTY
    )
    prompt_tokens: _Counts = Field(json_schema_extra=_NOT_EMPTY)
    output_tokens: _Counts = Field(json_schema_extra=_NOT_EMPTY)
    predicted: SkipValidation[list[Annotated[float, Field(ge=1, le=MAX_TOKENS)]] | None] = _null(
        "predicted output tokens"
    )
    predicted_lower: _Some = _null("lower ends of intervals that contain output_tokens")
    predicted_upper: _Some = _null("upper ends of these intervals")
    forecast: ForecastFile | None = None
    slo_ttft: _Slos = _null("max time to first token; null: no limit")
    slo_tpot: _Slos = _null("max mean time per output token after the first")
    slo_gap: _Slos = _null("max time between two output tokens in succession")
    slo_latency: _Slos = _null("max time from arrival to last token")
    prefix_parent: SkipValidation[list[Annotated[int, Field(ge=-1)] | None] | None] = _null(
        "earlier request with which each shares the beginning of its sequence; null: none"
    )
    prefix_tokens: SkipValidation[list[Annotated[int, Field(ge=0, le=2 * MAX_TOKENS)]] | None] = (
        _null("tokens that its prompt and output share with the parent's")
    )
    after: SkipValidation[list[int | list[int] | None] | None] = _null(
        "the request, or the list of requests, that must end before each is released"
    )
    delay: SkipValidation[list[Annotated[float, Field(ge=0, le=MAX_ROUND)] | None] | None] = _null(
        "time from the end of the last of these to the release, in the instance's unit"
    )
    id: SkipValidation[list[str | int] | None] = _null(
        "external names, unique", json_schema_extra={"uniqueItems": True}
    )


class KnownFile(_Strict):
    """What is known of the optimum, in the instance's unit."""

    optimum: float | None = None
    bound: float | None = None
    best_known: float | None = None
    reference: str | None = None


_WHOLE: JsonDict = {"type": ["integer", "null"]}
_WHOLE_TIMES: JsonDict = {"arrival": {"items": _WHOLE}, "delay": {"items": _WHOLE}}


class InstanceFile(_Strict):
    """An instance: requests, the KV capacity and the limits of the machine."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"time_unit": {"const": "round"}}},
            "then": {"properties": {"requests": {"properties": _WHOLE_TIMES}}},
        },
    )
    format: Literal["optsched-instance"]
    version: Literal[1]
    name: str | None = _null("absent: the name of the file")
    time_unit: SkipValidation[_Unit]
    kv_capacity: SkipValidation[_Count] = Field(description="in tokens")
    kv_accounting: SkipValidation[Literal["generated", "cached"]] = Field(
        description="whether the KV of a running request's newest token counts"
    )
    kv_block_tokens: SkipValidation[Annotated[int, Field(ge=1, le=MAX_TOKENS)]] = Field(
        1, description="KV tokens of a block; a request holds whole blocks of kv_capacity"
    )
    prefix_block_tokens: _Limit = _null(
        "tokens of the blocks in which KV is shared, a multiple of kv_block_tokens"
    )
    limits: LimitsFile | None = None
    hybrid_batching: bool | None = None
    chunked_prefill: bool | None = None
    requests: RequestsFile
    known: KnownFile | None = None


_OF_BATCHES: list[JsonValue] = ["batch_offsets", "request", "tokens", "evicted_offsets", "evicted"]


class ScheduleFile(_Strict):
    """A schedule: start times (kind "starts") or flat columns of batches (kind "batches")."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"kind": {"const": "starts"}}},
            "then": {"anyOf": [{"required": ["starts"]}, {"required": ["columns"]}]},
            "else": {
                "anyOf": [{"required": _OF_BATCHES}, {"required": ["columns"]}],
            },
        },
    )
    format: Literal["optsched-schedule"]
    version: Literal[1]
    instance_sha256: Sha256 | None = None
    kind: Literal["starts", "batches"]
    starts: _Integers | None = _null("start of each request, which runs from the round after it")
    batch_offsets: _Integers | None = _null(
        "batch j processes the entries batch_offsets[j]:batch_offsets[j+1]"
    )
    request: _Integers | None = _null("request of each entry, from 0")
    tokens: _Integers | None = _null("tokens that each entry processes")
    reused: _Integers | None = _null(
        "cached tokens that each entry claims before, in whole blocks of prefix_block_tokens"
    )
    evicted_offsets: _Integers | None = _null(
        "batch j follows the evictions evicted_offsets[j]:evicted_offsets[j+1]"
    )
    evicted: _Integers | None = None
    start: SkipValidation[list[float] | None] = _null(
        "start of each batch, in the instance's unit; absent: as early as possible",
    )
    worker: _Integers | None = _null("worker of each batch, from 0")
    moved_offsets: _Integers | None = _null(
        "batch j follows the moves moved_offsets[j]:moved_offsets[j+1]"
    )
    moved: _Integers | None = _null("request of each move of KV, from 0")
    moved_to: _Integers | None = _null("worker to which each move goes, from 0")
    moved_start: SkipValidation[list[float] | None] = _null(
        "start of each move, in the instance's unit; absent: as early as possible",
    )
    evict_mode: Literal["restart", "recompute"] | None = None
    cost_model_sha256: Sha256 | None = None
    columns: Annotated[str, Field(pattern=r"^[^/\\]+\.parquet$")] | None = _null(
        "Parquet file beside this one that holds the columns, one row of lists"
    )
    columns_sha256: Sha256 | None = _null("digest of that file's bytes")


class InstanceReference(_Open):
    """The instance that a result is about."""

    name: str
    sha256: Sha256
    requests: Annotated[int, Field(ge=1)]


class _Answer(_Open):
    format: str
    version: Literal[1]
    optsched: str = Field(description="version of optsched")
    command: str
    instance: InstanceReference
    pools: dict[str, Any] | None = _null("the machines: roles, link, deflect_below")


if TYPE_CHECKING:
    MetricsFile = BaseModel  # its fields are rows of the table of metrics
else:
    MetricsFile = pydantic.create_model(
        "MetricsFile",
        __base__=_Open,
        __doc__="Metrics in the instance's unit; null: unknown or undefined.",
        **{
            metric.name: (
                (int if metric.unit == "count" else float) | None,
                _null(metric.meaning or None),
            )
            for metric in TABLE.values()
        },
    )


class ProgressFile(_Open):
    """Incumbent and bound whenever one changed, as columns of equal length; null: unknown."""

    elapsed_s: list[float]
    incumbent: list[float | None]
    bound: list[float | None]


class ResultFile(_Answer):
    """What `solve`, `bound`, `simulate` and `evaluate` write; further fields may appear."""

    format: Literal["optsched-result"]
    time_unit: _Unit | None = None
    formulation: str | None = None
    method: str | None = None
    workers: int | None = _null("number of equal workers; absent: 1")
    objective_name: str | None = None
    status: Literal["optimal", "feasible", "infeasible", "no_incumbent", "error"] | None = None
    objective: float | None = _null("null without an incumbent")
    bound: float | None = _null("null when unknown")
    gap: float | None = None
    gap_definition: str | None = None
    scope: dict[str, Any] | None = _null(
        "the schedules for which the bound holds: workers, without, words"
    )
    certificate: str | None = _null("file")
    certificate_missing: str | None = _null("why there is no certificate")
    metrics: MetricsFile | None = None
    build_s: float | None = None
    solve_s: float | None = None
    progress: ProgressFile | None = None
    seed: int | None = None
    threads: int | None = None
    versions: dict[str, str] | None = None
    schedule: str | None = _null("file")


class ComparedPolicy(_Open):
    """One scheduler in a comparison."""

    policy: str
    metrics: MetricsFile | None = None
    ratio_to_best_known: float | None = None
    ratio_to_bound: float | None = None
    meaning: str | None = _null("both ratios in words")
    lost: dict[str, float] | None = _null(
        "shares of the total latency: known, its parts (lengths, order, admission, batching, "
        "rest), and not_known"
    )
    lost_missing: str | None = _null("why the known loss has no parts")
    wall_s: float | None = None


class ComparisonFile(_Answer):
    """What `compare` writes; further fields may appear."""

    format: Literal["optsched-comparison"]
    bound: float | None = None
    best_known: float | None = None
    lost_target: str | None = _null("the rules to which order, admission and batching are lost")
    best: ComparedPolicy | None = _null("the best known schedule, with the metrics of a policy")
    bounds: dict[str, float] | None = _null(
        "what no schedule on one worker beats, by the metric's name"
    )
    policies: list[ComparedPolicy]


class CapacityFile(_Answer):
    """What `capacity` writes; further fields may appear. Rates are multiples of the instance's."""

    format: Literal["optsched-capacity"]
    attainment: float = Field(description="share of requests within all their SLOs", gt=0, le=1)
    policies: list[dict[str, Any]]
    verdict: str | None = _null("what is attained and what is impossible, in a sentence")
    requests_per_second: float | None = _null("the mean rate at rate scale 1")
    best_rate_scale: float | None = None
    best_origin: str | None = None
    impossible_rate_scale: float | None = _null(
        "no schedule attains it at this rate or a larger one"
    )
    bound_origin: str | None = None
    workers: dict[str, float | int | None] | None = _null(
        "workers given, or the fewest found and those proved too few"
    )


class SplitsFile(_Answer):
    """What `splits` writes; further fields may appear."""

    format: Literal["optsched-splits"]
    link: dict[str, float | bool] = Field(description="what a move of KV takes")
    metrics: list[str]
    slos: dict[str, float]
    splits: list[dict[str, Any]] = Field(
        description="each split's pools, and by metric its bound, found, policy and verdict"
    )
    interrupted: bool


class CertificateFile(_Open):
    """A bound or an optimum that the checker recomputes exactly; further fields may appear."""

    format: Literal["optsched-certificate"]
    version: Literal[1]
    instance_sha256: Sha256
    model: str
    objective: str
    claim: Literal["bound", "optimal"]
    value: int | float
    denominator: Annotated[int, Field(ge=1)] | None = None
    cost_model: SkipValidation[dict[str, Any] | None] = _null(
        "in seconds: the layers, and the decimal text of every coefficient"
    )
    ticks_per_second: Annotated[int, Field(ge=1)] | None = _null(
        "in seconds: the value is an integer number of ticks"
    )
    pools: SkipValidation[dict[str, Any] | None] = _null(
        "several machines: how many prefill and decode, or are mixed, and what moves take"
    )
    tree: SkipValidation[dict[str, Any]] = Field(description="a leaf, which names its relaxation")
    schedule: SkipValidation[dict[str, Any] | None] = _null(
        "a schedule file with that value, if the claim is optimal"
    )
    sha256: Sha256 = Field(description="digest of the rest of the file in canonical JSON")


class MeasuredFile(_Strict):
    """Times that a real server took for an instance's requests, in the instance's order."""

    format: Literal["optsched-measured"]
    version: Literal[1]
    name: str | None = _null("what tables call the server")
    instance_sha256: Sha256 | None = None
    ttft: SkipValidation[list[Annotated[float, Field(ge=0)] | None] | None] = _null(
        "seconds from each arrival to the first token; null: not measured"
    )
    latency: SkipValidation[list[Annotated[float, Field(gt=0)] | None]] = Field(
        description="seconds from each arrival to the last token; null: see errors",
        json_schema_extra=_NOT_EMPTY,
    )
    errors: dict[Annotated[str, Field(pattern=r"^[0-9]+$")], str] | None = _null(
        "requests, from 0, that were not served as the instance says, and why"
    )


class LibraryRecord(_Strict):
    """A best known schedule, or a bound with its certificate, and where it is from."""

    value: int | float
    file: Annotated[str, Field(pattern=r"^(schedules|certificates)/[^/\\\\]+$")]
    sha256: Sha256 = Field(description="digest of that file's bytes")
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    by: str = Field(description="who found it")
    method: str | None = None
    seconds: Annotated[float, Field(ge=0)] | None = _null("time that it took")
    threads: Annotated[int, Field(ge=1)] | None = None


class LibraryEntry(_Strict):
    """What is known of an instance of the library."""

    family: str
    purpose: str = Field(description="what the instance is for")
    source: str = Field(description="the generator, its parameters and the seed")
    objective: str
    cost_model: str | None = _null("a shipped one, for an instance in seconds")
    workers: Annotated[int, Field(ge=1)] = Field(1, description="max workers of a schedule")
    requests: Annotated[int, Field(ge=1)]
    instance_sha256: Sha256
    status: Literal["closed", "open"] = Field(
        description="closed: the best known value is proved optimal by the bound's certificate"
    )
    best: LibraryRecord
    bound: LibraryRecord | None = _null("absent: nothing is proved")
    sha256: Sha256 = Field(
        description="digest of the rest with name, release and the family's summary as canonical "
        "JSON"
    )


class LibraryFile(_Strict):
    """A library's best known schedules and bounds, by family and instance."""

    format: Literal["optsched-library"]
    version: Literal[1]
    release: str
    families: dict[str, str] = Field(description="what each family is for")
    instances: dict[str, LibraryEntry]


class ScoreFile(_Open):
    """What `score` writes; further fields may appear."""

    format: Literal["optsched-score"]
    version: Literal[1]
    policy: str
    score: float | None = _null("null: the policy failed on an instance")
    floor: float = Field(description="no policy's score is smaller")
    best_known: float
    combined_score: Annotated[float, Field(ge=0)] = Field(description="floor / score, or 0")
    instances: list[dict[str, Any]]


class HitsFile(_Answer):
    """What `hits` writes: tokens found, and seconds of prefill saved, by cache."""

    format: Literal["optsched-hits"]
    asked_tokens: int = Field(description="prompt tokens of all requests")
    own: dict[str, Any]
    infinite: dict[str, Any] = Field(description="without a limit of memory")
    caches: list[dict[str, Any]] = Field(description="best and lru, by kv_capacity")


class WhyFile(_Answer):
    """What `why` writes, in the instance's unit."""

    format: Literal["optsched-why"]
    total: dict[str, float] = Field(description="what is lost to each cause, over all requests")
    requests: dict[str, list[float]] = Field(description="the parts of each latency, by cause")
    against: dict[str, list[float]] | None = _null("the same of the other schedule")


class DiagnosisFile(_Answer):
    """What `diagnose` writes, in seconds; further fields may appear."""

    format: Literal["optsched-diagnosis"]
    error: float | None = _null("by how much the twin misses measured latencies in the median")
    metrics: MetricsFile
    waits_s: dict[str, float]
    changes: list[dict[str, Any]] = Field(description="what was tried: gain, low and high")
    first: dict[str, Any] | None = _null("what to change first; null: nothing")


class RatiosFile(_Open):
    """What `ratios` writes."""

    format: Literal["optsched-ratios"]
    version: Literal[1]
    reference: str
    summary: list[dict[str, Any]] = Field(description="a row for each policy")
    paired: list[dict[str, Any]] = Field(description="the first policy beside each other one")
    ratios: dict[str, list[Any]] = Field(description="columns of one length")


MODELS: Mapping[str, type[BaseModel]] = {
    "instance": InstanceFile,
    "schedule": ScheduleFile,
    "result": ResultFile,
    "comparison": ComparisonFile,
    "certificate": CertificateFile,
    "measured": MeasuredFile,
    "capacity": CapacityFile,
    "splits": SplitsFile,
    "library": LibraryFile,
    "score": ScoreFile,
    "hits": HitsFile,
    "why": WhyFile,
    "diagnosis": DiagnosisFile,
    "ratios": RatiosFile,
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
