"""The fields of optsched's files as pydantic models, for JSON Schemas and for checks of shape.

Long columns have a precise schema and are not validated here. `optsched.problem.instance` checks
them in one pass, and its errors name the request and the value.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, JsonValue, SkipValidation
from pydantic.config import JsonDict
from pydantic_core import CoreSchema

from optsched.problem.columns import MAX_TOKENS
from optsched.problem.drafts import MAX_DRAFTS
from optsched.problem.errors import InputError
from optsched.problem.instance import MAX_ROUND
from optsched.problem.metrics import TABLE
from optsched.problem.specs import read_entries

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
_Counts = SkipValidation[list[Annotated[int, Field(ge=1, le=MAX_TOKENS)]]]
_Integers = SkipValidation[list[int]]
_Limit = SkipValidation[_Count | None]
_Some = SkipValidation[_Counts | None]
_Unit = Literal["round", "second"]
_Slos = SkipValidation[list[Annotated[float, Field(gt=0)] | None] | None]
_NOT_EMPTY: JsonDict = {"minItems": 1}


class _Strict(BaseModel):
    """Fields that a model's docstring describes, with an entry for each below ``Fields:``."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # What the handler returns may refer to a definition, which is what is filled in here.
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        docstring = inspect.cleandoc(cls.__doc__ or "")
        schema["description"], _, entries = docstring.partition("\n\nFields:\n")
        for name, (_, words) in read_entries(entries).items():
            schema["properties"][name]["description"] = words

        return reference


class _Open(_Strict):
    model_config = ConfigDict(extra="allow")


class _File(_Strict):
    format: str  # `schema` and `check_format` say which
    version: Literal[1]


class _OpenFile(_File):
    model_config = ConfigDict(extra="allow")


class LimitsFile(_Strict):
    """Hard limits of the machine for each batch; null or absent means no limit.

    Fields:
      max_batch_tokens: maximum tokens processed in one batch, prefill and decode together
      max_prefill_tokens: maximum prefill tokens processed in one batch
      max_running: maximum requests that hold KV after a batch
    """

    max_batch_tokens: _Limit = None
    max_prefill_tokens: _Limit = None
    max_running: _Limit = None


class ForecastFile(_Strict):
    """Predicted output tokens that requests have left, renewed every few tokens.

    Fields:
      every: tokens from one prediction to the next
      offsets: request i has the entries remaining[offsets[i]:offsets[i+1]], one or more
      remaining: tokens left; entry k of a request is for when it has produced every * k tokens
    """

    every: SkipValidation[_Count]
    offsets: _Integers
    remaining: SkipValidation[list[Annotated[float, Field(ge=0, le=MAX_TOKENS)]]]


class RequestsFile(_Strict):
    """Columns of equal length, one entry per request.

    Fields:
      arrival: whole rounds, or seconds; null beside after
      predicted: predicted output tokens
      predicted_lower: lower ends of intervals that contain output_tokens
      predicted_upper: upper ends of these intervals
      weight: how much each request counts in weighted objectives; 1 if left out
      slo_ttft: max time to first token; null: no limit
      slo_tpot: max mean time per output token after the first
      slo_gap: max time between two output tokens in succession
      slo_latency: max time from arrival to last token
      prefix_parent: earlier request with which each shares the beginning of its sequence; null:
        none
      prefix_tokens: tokens that its prompt and output share with the parent's
      after: the request, or the list of requests, that must end before each is released
      delay: time from the end of the last of these to the release, in the instance's unit
      accepted: accepted drafts of each decode step of each request
      id: external names, unique
    """

    arrival: Annotated[
        SkipValidation[list[Annotated[float, Field(ge=0, le=MAX_ROUND)] | None]],
        Field(json_schema_extra=_NOT_EMPTY),
    ]
    prompt_tokens: Annotated[_Counts, Field(json_schema_extra=_NOT_EMPTY)]
    output_tokens: Annotated[_Counts, Field(json_schema_extra=_NOT_EMPTY)]
    predicted: SkipValidation[list[Annotated[float, Field(ge=1, le=MAX_TOKENS)]] | None] = None
    predicted_lower: _Some = None
    predicted_upper: _Some = None
    weight: _Some = None
    forecast: ForecastFile | None = None
    slo_ttft: _Slos = None
    slo_tpot: _Slos = None
    slo_gap: _Slos = None
    slo_latency: _Slos = None
    prefix_parent: SkipValidation[list[Annotated[int, Field(ge=-1)] | None] | None] = None
    prefix_tokens: SkipValidation[list[Annotated[int, Field(ge=0, le=2 * MAX_TOKENS)]] | None] = (
        None
    )
    after: SkipValidation[list[int | list[int] | None] | None] = None
    delay: SkipValidation[list[Annotated[float, Field(ge=0, le=MAX_ROUND)] | None] | None] = None
    accepted: SkipValidation[list[list[Annotated[int, Field(ge=0, le=MAX_DRAFTS)]]] | None] = None
    id: Annotated[
        SkipValidation[list[str | int] | None], Field(json_schema_extra={"uniqueItems": True})
    ] = None


class KnownFile(_Strict):
    """What is known of the optimum, in the instance's unit."""

    optimum: float | None = None
    bound: float | None = None
    best_known: float | None = None
    reference: str | None = None


_WHOLE: JsonDict = {"type": ["integer", "null"]}
_WHOLE_TIMES: JsonDict = {"arrival": {"items": _WHOLE}, "delay": {"items": _WHOLE}}


class InstanceFile(_File):
    """An instance: requests, the KV capacity and the limits of the machine.

    Fields:
      name: absent: the name of the file
      kv_capacity: in tokens
      kv_accounting: whether the KV of a running request's newest token counts
      kv_block_tokens: KV tokens of a block; a request holds whole blocks of kv_capacity
      prefix_block_tokens: tokens of the blocks in which KV is shared, a multiple of kv_block_tokens
      clients: of a measured run, the number of clients, each of which waited for its answer
      num_speculative_tokens: drafts that a decode step verifies; 0 or absent: none
      kv_window: "128:12/24" if 12 of 24 layers keep the KV of the last 128 tokens alone
    """

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"time_unit": {"const": "round"}}},
            "then": {"properties": {"requests": {"properties": _WHOLE_TIMES}}},
        },
    )
    name: str | None = None
    time_unit: SkipValidation[_Unit]
    kv_capacity: SkipValidation[_Count]
    kv_accounting: SkipValidation[Literal["generated", "cached"]]
    kv_block_tokens: SkipValidation[Annotated[int, Field(ge=1, le=MAX_TOKENS)]] = 1
    prefix_block_tokens: _Limit = None
    limits: LimitsFile | None = None
    hybrid_batching: bool | None = None
    chunked_prefill: bool | None = None
    clients: _Limit = None
    num_speculative_tokens: SkipValidation[Annotated[int, Field(ge=0, le=MAX_DRAFTS)] | None] = None
    kv_window: SkipValidation[str | None] = None
    requests: RequestsFile
    known: KnownFile | None = None


_OF_BATCHES: list[JsonValue] = ["batch_offsets", "request", "tokens", "evicted_offsets", "evicted"]


class ScheduleFile(_File):
    """A schedule: start times (kind "starts") or flat columns of batches (kind "batches").

    Fields:
      starts: start of each request, which runs from the round after it
      batch_offsets: batch j processes the entries batch_offsets[j]:batch_offsets[j+1]
      request: request of each entry, from 0
      tokens: tokens that each entry processes
      reused: cached tokens that each entry claims before, in whole blocks of prefix_block_tokens
      evicted_offsets: batch j follows the evictions evicted_offsets[j]:evicted_offsets[j+1]
      start: start of each batch, in the instance's unit; absent: as early as possible
      worker: worker of each batch, from 0
      moved_offsets: batch j follows the moves moved_offsets[j]:moved_offsets[j+1]
      moved: request of each move of KV, from 0
      moved_to: worker to which each move goes, from 0
      moved_start: start of each move, in the instance's unit; absent: as early as possible
      columns: Parquet file beside this one that holds the columns, one row of lists
      columns_sha256: digest of that file's bytes
    """

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"kind": {"const": "starts"}}},
            "then": {"anyOf": [{"required": ["starts"]}, {"required": ["columns"]}]},
            "else": {
                "anyOf": [{"required": _OF_BATCHES}, {"required": ["columns"]}],
            },
        },
    )
    instance_sha256: Sha256 | None = None
    kind: Literal["starts", "batches"]
    starts: _Integers | None = None
    batch_offsets: _Integers | None = None
    request: _Integers | None = None
    tokens: _Integers | None = None
    reused: _Integers | None = None
    evicted_offsets: _Integers | None = None
    evicted: _Integers | None = None
    start: SkipValidation[list[float] | None] = None
    worker: _Integers | None = None
    moved_offsets: _Integers | None = None
    moved: _Integers | None = None
    moved_to: _Integers | None = None
    moved_start: SkipValidation[list[float] | None] = None
    evict_mode: Literal["restart", "recompute"] | None = None
    cost_model_sha256: Sha256 | None = None
    columns: Annotated[str, Field(pattern="^[^/\\\\]+\\.parquet$")] | None = None
    columns_sha256: Sha256 | None = None


class InstanceReference(_Open):
    """The instance that a result is about."""

    name: str
    sha256: Sha256
    requests: Annotated[int, Field(ge=1)]


class _Answer(_OpenFile):
    optsched: str = Field(description="version of optsched")
    command: str
    instance: InstanceReference
    pools: dict[str, Any] | None = Field(
        None, description="the machines: roles, link, deflect_below"
    )


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
                Field(None, description=metric.meaning or None),
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
    """What `solve`, `bound` and `simulate` write; further fields may appear.

    Fields:
      workers: number of equal workers; absent: 1
      objective: null without an incumbent
      bound: null when unknown
      scope: the schedules for which the bound holds: workers, without, words
      certificate: file
      certificate_missing: why there is no certificate
      schedule: file
    """

    time_unit: _Unit | None = None
    formulation: str | None = None
    method: str | None = None
    workers: int | None = None
    objective_name: str | None = None
    status: Literal["optimal", "feasible", "infeasible", "no_incumbent", "error"] | None = None
    objective: float | None = None
    bound: float | None = None
    gap: float | None = None
    gap_definition: str | None = None
    scope: dict[str, Any] | None = None
    certificate: str | None = None
    certificate_missing: str | None = None
    metrics: MetricsFile | None = None
    build_s: float | None = None
    solve_s: float | None = None
    progress: ProgressFile | None = None
    seed: int | None = None
    threads: int | None = None
    versions: dict[str, str] | None = None
    schedule: str | None = None


class ComparedPolicy(_Open):
    """One scheduler in a comparison.

    Fields:
      meaning: both ratios in words
    """

    policy: str
    metrics: MetricsFile | None = None
    ratio_to_best_known: float | None = None
    ratio_to_bound: float | None = None
    meaning: str | None = None
    wall_s: float | None = None


class ComparisonFile(_Answer):
    """What `compare` writes; further fields may appear.

    Fields:
      best: the best known schedule, with the metrics of a policy
      bounds: what no schedule on one worker beats, by the metric's name
    """

    bound: float | None = None
    best_known: float | None = None
    best: ComparedPolicy | None = None
    bounds: dict[str, float] | None = None
    policies: list[ComparedPolicy]


class CapacityFile(_Answer):
    """What `capacity` writes; further fields may appear. Rates are multiples of the instance's.

    Fields:
      attainment: share of requests within all their SLOs
      verdict: what is attained and what is impossible, in a sentence
      requests_per_second: the mean rate at rate scale 1
      percentiles: limits of percentiles by name, which stand in place of the attainment
      impossible_rate_scale: no schedule attains it at this rate or a larger one
      workers: workers given, or the fewest found and those proved too few
    """

    attainment: Annotated[float, Field(gt=0, le=1)]
    policies: list[dict[str, Any]]
    percentiles: dict[str, float] | None = None
    verdict: str | None = None
    requests_per_second: float | None = None
    best_rate_scale: float | None = None
    best_origin: str | None = None
    impossible_rate_scale: float | None = None
    bound_origin: str | None = None
    workers: dict[str, float | int | None] | None = None


class SplitsFile(_Answer):
    """What `splits` writes; further fields may appear.

    Fields:
      link: what a move of KV takes
      splits: each split's pools, and by metric its bound, found, policy and verdict
    """

    link: dict[str, float | bool]
    metrics: list[str]
    slos: dict[str, float]
    splits: list[dict[str, Any]]
    interrupted: bool


class CertificateFile(_OpenFile):
    """A bound or an optimum that the checker recomputes exactly; further fields may appear.

    Fields:
      cost_model: in seconds: the layers, and the decimal text of every coefficient
      ticks_per_second: in seconds: the value is an integer number of ticks
      pools: several machines: how many prefill and decode, or are mixed, and what moves take
      tree: a leaf, which names its relaxation
      schedule: a schedule file with that value, if the claim is optimal
      sha256: digest of the rest of the file in canonical JSON
    """

    instance_sha256: Sha256
    model: str
    objective: str
    claim: Literal["bound", "optimal"]
    value: int | float
    denominator: Annotated[int, Field(ge=1)] | None = None
    cost_model: SkipValidation[dict[str, Any] | None] = None
    ticks_per_second: Annotated[int, Field(ge=1)] | None = None
    pools: SkipValidation[dict[str, Any] | None] = None
    tree: SkipValidation[dict[str, Any]]
    schedule: SkipValidation[dict[str, Any] | None] = None
    sha256: Sha256


class MeasuredFile(_File):
    """Times that a real server took for an instance's requests, in the instance's order.

    Fields:
      name: what tables call the server
      requests_sha256: digest of the requests alone, whatever the KV capacity and the limits
      ttft: seconds from each arrival to the first token; null: not measured
      latency: seconds from each arrival to the last token; null: see errors
      gaps: quantiles of the times between two tokens, in seconds, as `measured.GAP_PLACES` says
      errors: requests, from 0, that were not served as the instance says, and why
    """

    name: str | None = None
    instance_sha256: Sha256 | None = None
    requests_sha256: Sha256 | None = None
    ttft: SkipValidation[list[Annotated[float, Field(ge=0)] | None] | None] = None
    latency: Annotated[
        SkipValidation[list[Annotated[float, Field(gt=0)] | None]],
        Field(json_schema_extra=_NOT_EMPTY),
    ]
    gaps: list[Annotated[float, Field(ge=0)]] | None = None
    errors: dict[Annotated[str, Field(pattern="^[0-9]+$")], str] | None = None


class LibraryRecord(_Strict):
    """A best known schedule, or a bound with its certificate, and where it is from.

    Fields:
      sha256: digest of that file's bytes
      by: who found it
      seconds: time that it took
    """

    value: int | float
    file: Annotated[str, Field(pattern=r"^(schedules|certificates)/[^/\\\\]+$")]
    sha256: Sha256
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    by: str
    method: str | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None
    threads: Annotated[int, Field(ge=1)] | None = None


class LibraryEntry(_Strict):
    """What is known of an instance of the library.

    Fields:
      purpose: what the instance is for
      source: the generator, its parameters and the seed
      cost_model: a shipped one, for an instance in seconds
      workers: max workers of a schedule
      pools: roles of these workers, such as 2p2d; absent: all prefill and decode
      link: what a move of KV between pools takes
      status: closed: the best known value is proved optimal by the bound's certificate
      bound: absent: nothing is proved
      sha256: digest of the rest with name, release and the family's summary as canonical JSON
    """

    family: str
    purpose: str
    source: str
    objective: str
    cost_model: str | None = None
    workers: Annotated[int, Field(ge=1)] = 1
    pools: str | None = None
    link: str | None = None
    requests: Annotated[int, Field(ge=1)]
    instance_sha256: Sha256
    status: Literal["closed", "open"]
    best: LibraryRecord
    bound: LibraryRecord | None = None
    sha256: Sha256


class LibraryFile(_File):
    """A library's best known schedules and bounds, by family and instance.

    Fields:
      families: what each family is for
    """

    release: str
    families: dict[str, str]
    instances: dict[str, LibraryEntry]


class ScoreFile(_OpenFile):
    """What `score` writes; further fields may appear.

    Fields:
      score: null: the policy failed on an instance
      floor: no policy's score is smaller
      combined_score: floor / score, or 0
    """

    policy: str
    score: float | None = None
    floor: float
    best_known: float
    combined_score: Annotated[float, Field(ge=0)]
    instances: list[dict[str, Any]]


class WhyFile(_Answer):
    """What `why` writes, in the instance's unit.

    Fields:
      total: what is lost to each cause, over all requests
      requests: the parts of each latency, by cause
      against: the same of the other schedule
    """

    total: dict[str, float]
    requests: dict[str, list[float]]
    against: dict[str, list[float]] | None = None


class DiagnosisFile(_Answer):
    """What `diagnose` writes, in seconds; further fields may appear.

    Fields:
      error: by how much the twin misses measured latencies in the median
      changes: what was tried: gain, low and high
      first: what to change first; null: nothing
    """

    error: float | None = None
    metrics: MetricsFile
    waits_s: dict[str, float]
    changes: list[dict[str, Any]]
    first: dict[str, Any] | None = None


class RatiosFile(_OpenFile):
    """What `ratios` writes.

    Fields:
      summary: a row for each policy
      paired: the first policy beside each other one
      ratios: columns of one length; rule has the constraint that a policy's schedule breaks
    """

    reference: str
    summary: list[dict[str, Any]]
    paired: list[dict[str, Any]]
    ratios: dict[str, list[Any]]


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
    "why": WhyFile,
    "diagnosis": DiagnosisFile,
    "ratios": RatiosFile,
}
"""The model of each file format."""

HOME = "https://optsched.github.io/optsched"
"""The site, which has the schemas; a format's next version has an address of its own."""


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a file format."""
    of_model = MODELS[name].model_json_schema()
    fields = of_model["properties"]
    version = fields["version"]["const"]
    fields["format"] = {"const": f"optsched-{name}", **fields["format"]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    head["$id"] = f"{HOME}/schemas/{name}-{version}.json"
    return {**head, **of_model, "title": f"optsched-{name}"}


def check_shape(name: str, data: Mapping[str, Any]) -> None:
    """Check that a parsed file has the fields of its format, of the right types."""
    try:
        MODELS[name].model_validate(data)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        # A check of ours adds its own part to the path.
        path = [part for part in first["loc"] if not str(part).startswith("function-")]
        if first["type"] == "missing":
            words = f"found nothing; expected this field of the format {name!r}"
        elif first["type"] == "extra_forbidden":
            words = f"unknown field; known here are {_fields_at(name, path[:-1])}"
        else:
            found = repr(first["input"])
            found = found if len(found) <= 80 else found[:77] + "..."
            expected = first["msg"][0].lower() + first["msg"][1:]
            if first["type"] == "model_type":
                expected = "expected an object with named fields"

            words = f"found {found}; {expected}"

        raise InputError(f"{'.'.join(map(str, path))}: {words}") from None


def _fields_at(name: str, path: Sequence[int | str]) -> str:
    """Return the names of the fields at a path inside a file of a format."""
    model: type[BaseModel] = MODELS[name]
    for part in path:
        field = model.model_fields.get(str(part))
        for kind in () if field is None else (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind

    return ", ".join(model.model_fields)
