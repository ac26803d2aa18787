"""Measure how long the batches of a real engine take: vLLM in this process.

Every batch is made by requests alone, through the engine's public interface: a prompt on an idle
engine is a prefill, requests that have their first token decode, and a prompt that comes then is
prefilled beside them. A batch takes as long as the engine's step, with its scheduling.
"""

import csv
import io
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from optsched.engines.in_process import configuration, drain, start, submit
from optsched.engines.sending import FIRST_ID
from optsched.files.outputs import check_folder, make_folder
from optsched.files.strict_json import write_json
from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError
from optsched.problem.text_files import read_object

BATCH = ("n_prefill", "prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
COLUMNS = (*BATCH, "time_us", "spread_us", "repeats")
"""Columns of ``steps.csv``; the KV of a decode is the mean over its repetitions."""
DEFAULTS = {"async_scheduling": False}
"""Arguments of ``vllm.LLM`` beside those of a replay: a step's tokens come with the step."""
# The tokens that a prompt without decodes beside it produces, for which there must be KV, too.
_OUTPUT = 2


class Progressed(NamedTuple):
    """How many batches are in a profile, and how many belong into it."""

    measured: int
    wanted: int


class Shape(NamedTuple):
    """What a batch holds: ``prefills`` of a ``chunk`` over ``cached`` tokens, and equal decodes."""

    chunk: int
    cached: int
    decodes: int
    kv: int
    prefills: int = 1

    @property
    def prefilling(self) -> int:
        """Requests that prefill."""
        return self.prefills if self.chunk else 0

    @property
    def label(self) -> str:
        """The name of the batch in a profile."""
        return f"{self.prefills}*{self.chunk}/{self.cached}+{self.decodes}x{self.kv}"

    def output(self, max_tokens: int, repeats: int) -> int:
        """Return the max tokens of a decode until its batch, after all prefills, is measured."""
        if not self.decodes:
            return 0

        left = max(1, max_tokens - self.decodes)
        # The batches that prefill all, at most one more for each decode as one ends within a batch,
        # and those that are measured.
        return -(-self.decodes * self.kv // left) + self.decodes + repeats + 2


def shapes(max_tokens: int, max_requests: int, max_kv: int, repeats: int = 5) -> list[Shape]:
    """Return the batches that a profile measures.

    These are prefills alone, one or several on an idle engine or one over cached tokens, decodes
    alone, and both together. Sizes are powers of 2, and what the limits exclude is left out.
    A `Shape` has, in order, the chunk c, the tokens m cached before it, the number n of decodes,
    the KV tokens k of each, and how many prefill, p. Where nothing decodes beside it, a prompt
    needs KV for the `_OUTPUT` tokens that it produces, too.
    """
    chunks = [c for c in _powers(16, max_tokens) if c + _OUTPUT <= max_kv]
    wanted = [Shape(c, 0, 0, 0) for c in chunks]
    prefill_counts = [p for p in (2, 4, 8) if p <= max_requests]
    alone = [Shape(c, 0, 0, 0, p) for c, p in product(chunks, prefill_counts)]
    wanted += [s for s in alone if s.prefills * s.chunk <= max_tokens]
    # A prompt is split where the batch is full, so KV before a chunk is a multiple of that.
    cached = [m for m in _powers(max_tokens, max_kv) if m + _OUTPUT <= max_kv]
    later = [Shape(c, m, 0, 0) for m, c in product(cached, chunks[::2])]
    wanted += [s for s in later if s.chunk + s.cached + _OUTPUT <= max_kv]
    kv_sizes, decodes = _powers(32, max_kv), _powers(1, max_requests)
    wanted += [Shape(0, 0, n, k) for n, k in product(decodes, kv_sizes)]
    # Every second or third size will do for what is mixed. A prefill takes a seat beside them.
    decodes_beside = [n for n in decodes[1::2] if n < max_requests]
    mixed = [Shape(c, 0, n, k) for c, n, k in product(chunks[1::2], decodes_beside, kv_sizes[::3])]
    wanted += [s for s in mixed if s.chunk + s.decodes <= max_tokens]

    # Two prefills come only beside the largest number of decodes, if they have seats.
    if decodes_beside and decodes_beside[-1] + 2 <= max_requests:
        two_prefills = [s._replace(prefills=2) for s in mixed if s.decodes == decodes_beside[-1]]
        wanted += [s for s in two_prefills if 2 * s.chunk + s.decodes <= max_tokens]

    # A decode must have room for all tokens that it produces until its batch is measured.
    return [s for s in wanted if s.kv + s.output(max_tokens, repeats) <= max_kv]


def _powers(low: int, high: int) -> list[int]:
    """Return low, 2 low, 4 low and so on, up to high."""
    return [low << k for k in range(64) if low << k <= high]


def profile(
    folder: str | Path,
    out: str | Path,
    *,
    max_tokens: int = 2048,
    max_requests: int = 64,
    max_kv: int = 4096,
    repeats: int = 5,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
) -> Progressed:
    """Measure a model on the device at hand, and write a profile that `optsched.costs.fit` reads.

    `out` gets ``steps.csv``, a copy of ``config.json``, ``settings.json`` and ``device.json``. What
    is in it is not measured again. Each batch is measured `repeats` times, after one that does not
    count.
    """
    sizes = {"max_tokens": max_tokens, "max_requests": max_requests, "max_kv": max_kv}
    for name, value in {**sizes, "repeats": repeats}.items():
        check_whole(value, name, 1)

    wanted, table = shapes(max_tokens, max_requests, max_kv, repeats), Path(out) / "steps.csv"
    check_folder(table.parent)
    settings = {"config.json": configuration(folder), "settings.json": dict(options or {})}
    measured = _read_measured(table)
    if measured:
        _check_same(table.parent, settings)

    missing = [shape for shape in wanted if shape not in measured]
    if not missing:
        return Progressed(len(wanted), len(wanted))

    limits = {"max_num_batched_tokens": max_tokens, "max_num_seqs": max_requests}
    limits["max_model_len"] = max_kv
    engine = start(str(folder), {**DEFAULTS, **limits, **(options or {})}).llm_engine
    make_folder(table.parent)
    device = _device(engine)
    if device is not None:
        if measured and (table.parent / "device.json").is_file():
            _check_same(table.parent, {"device.json": {"device": device}})

        settings["device.json"] = {"device": device}

    for name, content in settings.items():
        write_json(content, table.parent / name)

    cache = engine.vllm_config.cache_config
    # No limit is known if the engine does not say how many blocks it has.
    kv_capacity = (cache.num_gpu_blocks or 0) * cache.block_size or math.inf
    bench = _Bench(engine, np.random.default_rng(seed))

    with table.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        # Only a new file gets a row of names.
        if not file.tell():
            writer.writerow(["shape", *COLUMNS])
        for shape in missing:
            kv_of_decode = shape.kv + shape.output(max_tokens, repeats)
            # The engine has no room for the batch.
            if shape.cached + shape.chunk + shape.decodes * kv_of_decode > kv_capacity:
                continue
            if stop is not None and stop.is_set():
                break
            if progress is not None:
                progress(len(measured), len(wanted))

            writer.writerow([shape.label, *bench.measure(shape, repeats)])
            file.flush()
            measured.add(shape)

    return Progressed(len(measured & set(wanted)), len(wanted))


def _device(engine: Any) -> str | None:
    """Return the name of the device that an engine runs on, or None if it does not say."""
    kind = getattr(getattr(engine.vllm_config, "device_config", None), "device_type", None)
    if kind == "cuda":
        return str(import_module("torch").cuda.get_device_name())  # vLLM has it

    return "cpu" if kind == "cpu" else None


def _read_measured(table: Path) -> set[Shape]:
    """Return the shapes of a profile that was begun. A row that was cut off is taken away.

    `Shape.label` has the numbers in the order prefills, chunk, cached, decodes, KV.
    """
    if not table.is_file():
        return set()

    text = table.read_bytes()
    whole_rows = text[: text.rfind(b"\n") + 1]
    if whole_rows != text:
        table.write_bytes(whole_rows)
    try:
        rows = list(csv.DictReader(io.StringIO(whole_rows.decode(errors="replace"))))
        shapes_read = [map(int, re.split(r"[*/+x]", row["shape"])) for row in rows]
        return {Shape(c, m, n, k, p) for p, c, m, n, k in shapes_read}
    except (KeyError, TypeError, ValueError, csv.Error):
        raise InputError(f"{table}: shape: found another table; expected a profile") from None


def _check_same(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that a profile that goes on is one of the same model and options.

    ``settings`` has the present content of each of its files. A key that one side lacks differs.
    """
    for name, own_content in settings.items():
        stored = read_object(folder / name, "that of the profile")
        for key in {**stored, **own_content}:
            if stored.get(key) != own_content.get(key):
                raise InputError(
                    f"{folder / name}: {key}: found {own_content.get(key)!r} for a profile of "
                    f"{stored.get(key)!r}; expected the same model and options, or another folder"
                )


class _Bench:
    """An engine that is made to run batches of given shapes."""

    def __init__(self, engine: Any, generator: np.random.Generator) -> None:
        self.engine, self.generator = engine, generator
        self.produced: dict[str, int] = {}
        self.numbers = count()

    def measure(self, shape: Shape, repeats: int) -> list[float]:
        """Return the columns of a batch: its content, median time, spread and repetitions."""
        run = self._run_decodes if shape.decodes else self._run_prefills
        _, *steps = run(shape, repeats)  # the first does not count
        times = [1e6 * seconds for seconds, _ in steps]
        kv = round(sum(kv_held for _, kv_held in steps) / len(steps))
        batch = (shape.prefilling, shape.chunk, shape.cached, shape.decodes, kv)
        return [*batch, round(median(times), 1), round(max(times) - min(times), 1), len(times)]

    def _run_prefills(self, shape: Shape, repeats: int) -> Iterator[tuple[float, float]]:
        """Yield the seconds of batches that prefill only, and 0 KV of decodes.

        Cached tokens are the earlier chunks of the same prompts, so a batch is the step that gives
        their first tokens. There is one more than `repeats`: `measure` does not count the first.
        """
        for _ in range(repeats + 1):
            names = [self._add(shape.cached + shape.chunk, _OUTPUT) for _ in range(shape.prefills)]
            seconds = 0.0
            while not self.produced[names[0]]:
                seconds = self._step()  # the last one has the chunk

            self._check_together(shape, names)
            self._clear()
            yield seconds, 0.0

    def _run_decodes(self, shape: Shape, repeats: int) -> Iterator[tuple[float, float]]:
        """Yield the seconds of batches with decodes, and the mean KV of a decode in each.

        The same requests decode in all of them, so their KV grows. There is one batch more than
        `repeats`, since `measure` does not count the first.
        """
        # They decode without end, and all have their first token before a batch is measured.
        running = [self._add(shape.kv, 10**6) for _ in range(shape.decodes)]
        while not all(self.produced[name] for name in running):
            self._step()
        for _ in range(repeats + 1):
            before = sum(self.produced[name] for name in running)
            # A decode holds its prompt and what it has produced but the last token.
            kv_held = (shape.decodes * (shape.kv - 1) + before) / shape.decodes
            prompts = [self._add(shape.chunk, 1) for _ in range(shape.prefilling)]
            seconds = self._step()
            # All must have decoded in this one step, beside the prefills.
            n_decoded = sum(self.produced[name] for name in running) - before
            if n_decoded != shape.decodes:
                raise InputError(
                    f"profile: found {n_decoded} decodes in a batch; expected the "
                    f"{shape.decodes} of {shape.label}"
                )

            self._check_together(shape, prompts)
            yield seconds, kv_held

        self._clear()

    def _check_together(self, shape: Shape, names: list[str]) -> None:
        """Check that prompts were prefilled in one batch."""
        if not all(self.produced[name] for name in names):
            raise InputError(
                f"profile: found prompts of {shape.label} in several batches; expected one"
            )

    def _add(self, prompt: int, output: int) -> str:
        """Submit a request of random tokens, and return its name."""
        config, name = self.engine.model_config, f"r{next(self.numbers)}"
        tokens = self.generator.integers(FIRST_ID, config.get_vocab_size(), prompt).tolist()
        self.produced[name] = 0
        submit(self.engine, name, tokens, min(output, config.max_model_len - prompt))
        return name

    def _step(self) -> float:
        """Let the engine take a step. Note the tokens produced, and return the seconds."""
        begin = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - begin

        for output in outputs:
            if output.request_id in self.produced:
                self.produced[output.request_id] = len(output.outputs[0].token_ids)

        return seconds

    def _clear(self) -> None:
        """Leave the engine idle, without requests."""
        self.engine.abort_request(list(self.produced))
        drain(self.engine)
        self.produced.clear()
