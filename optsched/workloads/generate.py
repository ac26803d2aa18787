"""Random instances by name: synthetic workloads of the papers, and plain distributions.

Every number comes from one ``numpy.random.Generator`` that is made from the seed. A name, its
parameters and a seed therefore always give the same instance. Giving a parameter does not change
what is drawn for the others.

``generators.toml`` says of each generator what it draws, and has its parameters. They come to its
function as ``values``, with the instance's name as ``label``. Elsewhere ``name`` is that of the
generator, for errors.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from optsched.problem import specs
from optsched.problem.columns import MAX_TOKENS, check_whole
from optsched.problem.errors import InputError, named
from optsched.problem.instance import MAX_WEIGHT, Instance, KvAccounting
from optsched.problem.registry import Registry
from optsched.problem.sessions import UNKNOWN
from optsched.problem.streams import Seed
from optsched.workloads.bisection import bisect

MAX_REQUESTS = 10_000_000
"""Maximum number of requests that a generator makes."""

# Classes of requests: the two lengths of a prompt, and of an output.
_SHORT, _LONG = (8, 16), (512, 1024)
_CLASSES = {
    "SISO": (_SHORT, _SHORT),
    "SILO": (_SHORT, _LONG),
    "LISO": (_LONG, _SHORT),
    "LILO": (_LONG, _LONG),
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a generator. Floats are above ``low``. Without a default it is drawn."""

    type: Literal["int", "float", "text"]
    doc: str
    default: int | float | str | None = None
    low: float = 1
    high: float = MAX_TOKENS
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class InstanceGenerator:
    """A registered generator: ``draw`` makes an `Instance` of a Generator and parameters."""

    name: str
    summary: str
    parameters: Mapping[str, Parameter]
    draw: Callable[[Generator, Any], Instance]


_REGISTRY: Registry[InstanceGenerator] = Registry("generator")
_TABLE = tomllib.loads(Path(__file__).with_name("generators.toml").read_text(encoding="utf-8"))


def generators() -> dict[str, InstanceGenerator]:
    """Return every generator, sorted by name."""
    return _REGISTRY.all()


def generate(name: str, *, seed: Seed = 0, **parameters: Any) -> Instance:
    """Return a random instance.

    Parameters
    ----------
    name : str
        One of `generators`.
    seed : int or sequence of int
        An integer >= 0, or several.
    **parameters
        Parameters of the generator. None stands for the default.
    """
    spec = _REGISTRY.get(name)
    values = {key: parameter.default for key, parameter in spec.parameters.items()}
    for key, value in parameters.items():
        parameter = named(f"generate {name}: parameter", key, spec.parameters)
        if value is not None:
            values[key] = _check_value(value, parameter, f"generate {name}: {key}")

    # The integers of the seed, one or several, of any size.
    numbers = np.atleast_1d(np.array(seed, dtype=object)).tolist()
    for number in numbers:
        check_whole(number, f"generate {name}: seed", 0)

    label = f"{name}-seed{'-'.join(map(str, numbers))}"
    rng, max_weight = np.random.default_rng(seed), values["weight_max"]
    instance = spec.draw(rng, SimpleNamespace(label=label, **values))
    if max_weight is None:
        return instance

    return replace(instance, weight=rng.integers(1, int(max_weight) + 1, instance.n))


def parse_parameters(name: str, texts: Mapping[str, str]) -> dict[str, int | float | str | None]:
    """Return a generator's parameters from their texts, as on a command line."""
    # ``none`` becomes None, which stands for the default. The other texts are converted.
    kinds: dict[str, type] = {"int": int, "float": float, "text": str}
    parameters = _REGISTRY.get(name).parameters.items()
    known = {key: specs.Parameter(kinds[p.type], False, None) for key, p in parameters}
    with_value = {key: text for key, text in texts.items() if text.lower() not in ("none", "null")}
    return {**dict.fromkeys(texts), **specs.convert_all(with_value, known, f"generate {name}")}


Draw = Callable[[Generator, Any], Instance]
_WEIGHTS = "largest weight; weights are uniform from 1, drawn after all else; none: no weights"
_OF_ALL = {"weight_max": Parameter("int", _WEIGHTS, high=MAX_WEIGHT)}


def _generator(name: str) -> Callable[[Draw], Draw]:
    """Return a decorator that registers a function beside its row of ``generators.toml``."""

    def register(draw: Draw) -> Draw:
        row = _TABLE[name]
        parameters = {key: Parameter(**entry) for key, entry in row["parameters"].items()}
        parameters |= _OF_ALL
        _REGISTRY.add(name, InstanceGenerator(name, row["summary"], parameters, draw))
        return draw

    return register


def _check_value(value: Any, parameter: Parameter, place: str) -> int | float | str:
    """Return a parameter's value in its type. A float is above `low`, an integer may be it.

    `place`: what errors begin with.
    """
    plain = value.item() if isinstance(value, np.generic) else value
    low, high, whole = parameter.low, parameter.high, parameter.type == "int"

    if parameter.type == "text":
        expected = f"one of {', '.join(parameter.choices)}"
        if isinstance(plain, str) and (not parameter.choices or plain in parameter.choices):
            return plain
    elif isinstance(plain, bool) or not isinstance(plain, (int, float)):
        expected = "an integer" if whole else "a number"
    elif whole and isinstance(plain, float) and not plain.is_integer():
        expected = "an integer"
    elif low <= plain <= high and (whole or low < plain):
        return int(plain) if whole else float(plain)
    elif whole:
        expected = f"a number from {low:.0f} to {high:.0f}"
    else:
        expected = f"a number above {low:g}, at most {high:g}"

    raise InputError(f"{place}: found {value!r:.80}; expected {expected}")


@_generator("jaillet-model-1")
def _jaillet_model_1(rng: Generator, values: Any) -> Instance:
    # Both are drawn in any case, so that giving one does not change what is drawn next.
    capacity, n = int(rng.integers(30, 51)), int(rng.integers(40, 61))
    capacity, n = values.kv_capacity or capacity, values.n or n
    return _jaillet(rng, values.label, np.zeros(n, dtype=np.int64), capacity)


@_generator("jaillet-model-2")
def _jaillet_model_2(rng: Generator, values: Any) -> Instance:
    # The KV capacity, the rounds in which requests arrive, and arrivals per round: all are drawn in
    # any case, so that giving one does not change what is drawn next.
    capacity, horizon = int(rng.integers(30, 51)), int(rng.integers(40, 61))
    rate = float(rng.uniform(0.5, 1.5))
    capacity, horizon = values.kv_capacity or capacity, values.horizon or horizon
    rate = rate if values.rate is None else values.rate

    if values.n is not None:
        # A Poisson process: exponential gaps, with arrivals rounded up to rounds 1, 2, ...
        arrival = np.ceil(np.cumsum(rng.exponential(1 / rate, size=values.n))).astype(np.int64)
        return _jaillet(rng, values.label, np.maximum(arrival, 1), capacity)

    if rate * horizon > MAX_REQUESTS:
        raise InputError(
            f"generate jaillet-model-2: rate: found {rate:g} over {horizon} rounds, which makes "
            f"more than {MAX_REQUESTS} requests; expected a smaller rate or horizon"
        )

    counts = rng.poisson(rate, size=horizon)
    if not counts.any():
        # An instance has one or more requests. Drawing again might take for ever.
        counts[rng.integers(horizon)] = 1

    return _jaillet(rng, values.label, np.repeat(np.arange(1, horizon + 1), counts), capacity)


def _jaillet(rng: Generator, label: str, arrival: NDArray[np.int64], capacity: int) -> Instance:
    # Prompts are uniform from 1 to 5, and outputs from 1 to what fits beside the prompt.
    prompt = rng.integers(1, 6, size=len(arrival))
    return Instance(
        arrival=arrival,
        prompt_tokens=prompt,
        output_tokens=rng.integers(1, capacity - prompt + 1),
        kv_capacity=capacity,
        name=label,
    )


@_generator("uniform")
def _uniform(rng: Generator, values: Any) -> Instance:
    return _with_arrivals(rng, values, "uniform", *_ranges(rng, values, "uniform"))


@_generator("prefix-trees")
def _prefix_trees(rng: Generator, values: Any) -> Instance:
    prompt, output = _ranges(rng, values, "prefix-trees")
    instance = _with_arrivals(rng, values, "prefix-trees", prompt, output)
    parent, shared = np.full(values.n, -1), np.zeros(values.n, dtype=np.int64)
    # The first requests are roots. Each other one is a child of one that is not too deep, and
    # shares a part of its own prompt with it, as far as the parent goes (`sizes`). `level` is how
    # deep each is, and `possible` are those that may be parents.
    sizes, level = prompt + output, [0] * min(values.trees, values.n)
    possible = list(range(len(level))) if values.depth else []
    draws = rng.random(values.n)

    for i in range(len(level), values.n):
        up = possible[int(draws[i] * len(possible))] if possible else -1
        level.append(level[up] + 1 if up >= 0 else 0)
        if level[i] < values.depth:
            possible.append(i)
        if up >= 0:
            parent[i] = up
            shared[i] = min(round(values.reuse * prompt[i]), sizes[up])

    block = values.prefix_block_tokens
    return replace(instance, prefix_parent=parent, prefix_tokens=shared, prefix_block_tokens=block)


@_generator("agent-sessions")
def _agent_sessions(rng: Generator, values: Any) -> Instance:
    # Draw lognormal numbers of a median. The spreads are those of 49,334 calls of coding agents:
    # logarithms of P90 / P50, over 1.28, the standard normal's P90. `high`: the largest number.
    def draw(median: float, spread: float, size: int, high: float = 2e6) -> NDArray[np.float64]:
        return np.clip(np.rint(median * np.exp(spread * rng.standard_normal(size))), 1, high)

    # The calls of a session follow one another, each with all that was said before in its prompt.
    calls = draw(values.calls, 0.9, values.n, 561).astype(np.int64)
    begin = np.cumsum(calls) - calls  # the first call of each session
    total, first_call = int(calls.sum()), np.repeat(begin, calls)
    is_first = np.arange(total) == first_call
    # `new`: tokens that each prompt adds to what was said. An output takes half of a context at
    # most, so that a prompt fits beside it.
    new = draw(values.new_tokens, 1.47, total)
    output = np.minimum(draw(values.output_tokens, 1.11, total, 4e3), values.context // 2)
    new[begin] = draw(values.first_tokens, 0.5, values.n)

    # What was said up to each call, its own output excluded, since its session began. A context
    # that is full forgets the rest.
    said = np.cumsum(new + output)
    in_session = said - output - (said - new - output)[first_call]
    prompt = np.minimum(in_session, values.context - output).astype(np.int64)
    # Prompt and output of the call before, with which a later prompt begins as far as it goes.
    previous_size = np.append(0, prompt[:-1] + output[:-1].astype(np.int64))

    think = np.exp(2.17 * rng.standard_normal(total))  # as a multiple of the median
    # Only first calls have an arrival. The others come after the call before them and a delay.
    arrival = np.full(total, float(UNKNOWN))
    arrival[begin] = np.cumsum(rng.exponential(1 / values.rate, size=values.n))
    previous = np.where(is_first, -1, np.arange(total) - 1)

    return Instance(
        arrival,
        prompt,
        output.astype(np.int64),
        values.kv_capacity,
        time_unit="second",
        kv_accounting="cached",
        after=tuple(() if i < 0 else (i,) for i in previous.tolist()),
        delay=np.where(is_first, 0, values.think_s * think),
        prefix_parent=previous,
        prefix_tokens=np.where(is_first, 0, np.minimum(previous_size, prompt)),
        prefix_block_tokens=values.prefix_block_tokens,
        name=values.label,
    )


def _ranges(rng: Generator, values: Any, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return prompts and outputs that are uniform on ranges."""
    for kind in ("prompt", "output"):
        low, high = getattr(values, f"{kind}_min"), getattr(values, f"{kind}_max")
        if low > high:
            raise InputError(
                f"generate {name}: {kind}_min: found {low}; expected at most {kind}_max {high}"
            )

    prompt = rng.integers(values.prompt_min, values.prompt_max + 1, size=values.n)
    return prompt, rng.integers(values.output_min, values.output_max + 1, size=values.n)


@_generator("lognormal")
def _lognormal(rng: Generator, values: Any) -> Instance:
    # Mean, median and maximum determine the clipped lognormal. Its variance is higher than the
    # published one: 6,600 instead of 4,961 for prompts, 14,300 instead of 9,702 for outputs.
    columns = []
    for kind in ("prompt", "output"):
        mean, median, longest = (getattr(values, f"{kind}_{k}") for k in ("mean", "median", "max"))
        sigma = _sigma(mean, median, longest, kind)
        drawn = np.exp(math.log(median) + sigma * rng.standard_normal(values.n))
        columns.append(np.clip(np.rint(drawn), 1, longest).astype(np.int64))

    return _with_arrivals(rng, values, "lognormal", *columns)


def _sigma(mean: float, median: float, longest: int, kind: str) -> float:
    """Return the sigma of a lognormal with this median that has the mean ``mean`` once clipped.

    The published figures are those of clipped data. The sigma of the unclipped lognormal,
    sqrt(2 ln(mean / median)), would give the prompts a mean of 33 instead of 40.62. The clipped
    mean rises with sigma from the median to (1 + longest) / 2, so bisection finds it. `kind` is
    ``prompt`` or ``output``, for errors.
    """
    place = f"generate lognormal: {kind}"
    if not 1 <= median <= longest:
        raise InputError(f"{place}_median: found {median:g}; expected 1 to {kind}_max {longest}")

    if mean == median:
        return 0.0

    low, high = 1e-6, 20.0  # nearly no spread, and nearly all at the two ends
    if not _clipped_mean(median, low, longest) < mean < _clipped_mean(median, high, longest):
        raise InputError(
            f"{place}_mean: found {mean:g}; expected a mean between the median {median:g} and "
            f"{(1 + longest) / 2:g} for a lognormal clipped to 1..{longest}"
        )

    return bisect(lambda sigma: _clipped_mean(median, sigma, longest) < mean, low, high, 100)


def _clipped_mean(median: float, sigma: float, longest: int) -> float:
    """Return the mean of min(max(X, 1), longest) for a lognormal X, in closed form.

    `sigma`: the standard deviation of X's logarithm.
    """
    mu = math.log(median)
    low, high = -mu / sigma, (math.log(longest) - mu) / sigma  # the two ends, in sigmas

    def cdf(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    # 1 below the lower end, the lognormal's partial mean between, `longest` above the upper one.
    inside = math.exp(mu + sigma**2 / 2) * (cdf(high - sigma) - cdf(low - sigma))
    return cdf(low) + inside + longest * (1 - cdf(high))


def _with_arrivals(
    rng: Generator, values: Any, name: str, prompt: NDArray[np.int64], output: NDArray[np.int64]
) -> Instance:
    """Return the instance of drawn lengths, with arrivals as the parameters say."""
    in_rounds = values.time_unit == "round"
    accounting: KvAccounting = values.kv_accounting or ("generated" if in_rounds else "cached")
    # What the largest request holds at its peak: cached accounting leaves out its newest token.
    need = values.prompt_max + values.output_max - (accounting == "cached")

    if need > values.kv_capacity:
        raise InputError(
            f"generate {name}: kv_capacity: found {values.kv_capacity}; expected at least {need} "
            f"for prompt_max {values.prompt_max} and output_max {values.output_max}"
        )

    n = len(prompt)
    if values.arrivals == "all-at-once":
        arrival = np.zeros(n)
    elif values.arrivals == "poisson":
        arrival = np.cumsum(rng.exponential(1 / values.rate, size=n))
    else:
        # Gamma gaps of mean 1 / rate and standard deviation cv / rate.
        shape = values.cv**-2
        arrival = np.cumsum(rng.gamma(shape, 1 / (shape * values.rate), size=n))

    return Instance(
        arrival=np.floor(arrival).astype(np.int64) if in_rounds else arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        kv_capacity=values.kv_capacity,
        time_unit=values.time_unit,
        kv_accounting=accounting,
        name=values.label,
    )


@_generator("infermax-fixed")
def _infermax_fixed(rng: Generator, values: Any) -> Instance:
    # By default M is what two prompts take, or one request at its peak if that is more: cached
    # accounting leaves out the newest token.
    n, prompt, output = values.n, values.prompt, values.output
    return Instance(
        arrival=np.zeros(n),
        prompt_tokens=np.full(n, prompt),
        output_tokens=np.full(n, output),
        kv_capacity=values.kv_capacity or max(2 * prompt, prompt + output - 1),
        time_unit="second",
        kv_accounting="cached",
        name=f"infermax-b{n}-o{output}-i{prompt}",
    )


@_generator("infermax-mix")
def _infermax_mix(rng: Generator, values: Any) -> Instance:
    classes = values.mix.split("+")
    if not set(classes) <= set(_CLASSES) or len(set(classes)) < len(classes):
        raise InputError(
            f"generate infermax-mix: mix: found {values.mix!r}; expected one or more of "
            f"{', '.join(_CLASSES)}, joined by +"
        )

    # As many requests of each class, in random order. Each has one of the class's two prompts, and
    # one of its two outputs.
    class_of = rng.permutation(np.arange(values.n) % len(classes))
    pick = rng.integers(0, 2, size=(2, values.n))
    inputs = np.array([_CLASSES[c][0] for c in classes])
    outputs = np.array([_CLASSES[c][1] for c in classes])

    return Instance(
        arrival=np.zeros(values.n),
        prompt_tokens=inputs[class_of, pick[0]],
        output_tokens=outputs[class_of, pick[1]],
        kv_capacity=values.kv_capacity,
        time_unit="second",
        kv_accounting="cached",
        name=values.label,
    )
