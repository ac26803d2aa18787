"""Time the kernels of a transformer in PyTorch on one GPU, and write a profile that `fit` reads.

    python benchmarks/gpu/profile_torch.py OUT_FOLDER [--seconds S]
    optsched gpu fit OUT_FOLDER -o MODEL.toml

The model has the shape of Llama 3.1 8B, random weights and bfloat16. Each kernel runs many times in
one CUDA graph, so the launches of Python cost nothing, over copies of its weights and inputs which
are together larger than the second-level cache. What is written are medians of replays. KV lies in
one piece per request, not in pages. Nothing of optsched is imported: the script runs wherever
PyTorch does. The format is that of LLMServingSim's tables.

Last come whole steps: all layers, one after another in one graph, for batches that are not in the
tables, so that the sum of the kernels can be held against what a step takes.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD, LAYERS, VOCAB = 4096, 14336, 32, 8, 128, 32, 128256
QKV = (HEADS + 2 * KV_HEADS) * HEAD
CACHE = 200e6
"""Bytes over which a kernel's weights and inputs are spread at least: more than the cache has."""
TOKENS = sorted(
    {*range(1, 17), *range(24, 65, 8), *range(80, 257, 16), *range(288, 1025, 32)}
    | {*range(1152, 2049, 128), *range(2304, 4097, 256), 5120, 6144, 7168, 8192}
)
SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CHUNKS = (16, 64, 256, 1024, 2048, 4096, 8192)
CACHED = (0, 1024, 4096, 16384)
DECODES = (1, 4, 16, 32, 64, 128, 256)
KV = (16, 256, 1024, 2048, 4096, 16384)
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}

Kernel = Callable[[int], object]


@torch.compile(dynamic=True)
def rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x + residual, (HIDDEN,), weight)


@torch.compile(dynamic=True)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x[:, :MIDDLE]) * x[:, MIDDLE:]


@torch.compile(dynamic=True)
def rotary(qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = qk.view(-1, HEADS + KV_HEADS, HEAD)
    half = torch.cat((-x[..., HEAD // 2 :], x[..., : HEAD // 2]), dim=-1)
    return x * cos[:, None] + half * sin[:, None]


def rand(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, **BF16).normal_(0, 0.02)


def micros(kernel: Kernel, copies: int, repeats: int = 5) -> float:
    """Return the time of one call in microseconds; `kernel(k)` works on the k-th copy."""
    for k in range(min(copies, 2)):
        kernel(k)

    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    kernel(0)
    end.record()
    torch.cuda.synchronize()
    calls = max(1, min(copies * 8, int(4 / max(start.elapsed_time(end), 0.01))))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(calls):
            kernel(k % copies)

    times = []
    for _ in range(repeats + 1):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)

    return statistics.median(times[1:])


def copies_of(*shapes: tuple[int, ...]) -> int:
    """Return how many copies of such tensors are more than the cache holds."""
    size = 2 * sum(torch.Size(shape).numel() for shape in shapes)
    return max(1, min(64, int(CACHE / size) + 1))


def tensors(*shapes: tuple[int, ...]) -> list[list[torch.Tensor]]:
    return [[rand(*shape) for shape in shapes] for _ in range(copies_of(*shapes))]


def dense(tokens: int) -> Iterator[tuple[str, float]]:
    """Yield each layer that processes every token and its time."""
    matrices = {
        "qkv_proj": (HIDDEN, QKV),
        "o_proj": (HIDDEN, HIDDEN),
        "gate_up_proj": (HIDDEN, 2 * MIDDLE),
        "down_proj": (MIDDLE, HIDDEN),
    }
    for name, (width, out) in matrices.items():
        data = tensors((tokens, width), (out, width))
        yield name, micros(lambda k, data=data: F.linear(*data[k]), len(data))

    weight = rand(HIDDEN)
    data = tensors((tokens, HIDDEN), (tokens, HIDDEN))
    norm = micros(lambda k: rms_norm(*data[k], weight), len(data))
    yield from (("layernorm", norm), ("final_layernorm", norm))

    gates = tensors((tokens, 2 * MIDDLE))
    yield "act_fn", micros(lambda k: silu_and_mul(*gates[k]), len(gates))

    shape = (tokens, (HEADS + KV_HEADS) * HEAD)
    turned = tensors(shape, (tokens, HEAD), (tokens, HEAD))
    yield "rotary_emb", micros(lambda k: rotary(*turned[k]), len(turned))

    table = rand(VOCAB, HIDDEN)
    ids = torch.randint(0, VOCAB, (16, tokens), device="cuda")
    yield "embedding", micros(lambda k: F.embedding(ids[k], table), 16)


def per_sequence(n: int) -> Iterator[tuple[str, float]]:
    """Yield the output layer and the greedy sampler, and their times."""
    data = tensors((n, HIDDEN), (VOCAB, HIDDEN))
    yield "lm_head", micros(lambda k: F.linear(*data[k]), len(data))
    logits = tensors((n, VOCAB))
    yield "sampler", micros(lambda k: logits[k][0].float().argmax(-1), len(logits))


class Attention:
    """Attention of one layer: a prefill over cached KV, and decodes of equal KV."""

    def __init__(self, chunk: int, cached: int, decodes: int, kv: int) -> None:
        prefill = [(1, HEADS, chunk, HEAD)] + [(1, KV_HEADS, chunk + cached, HEAD)] * 2
        decode = [(decodes, HEADS, 1, HEAD)] + [(decodes, KV_HEADS, kv, HEAD)] * 2
        self.shapes = (prefill if chunk else []) + (decode if decodes else [])
        self.chunk, self.decodes = chunk, decodes
        self.mask = causal_lower_right(chunk, chunk + cached) if chunk else None
        self.data = tensors(*self.shapes)

    def __call__(self, k: int) -> None:
        tensors = self.data[k % len(self.data)]
        if self.chunk:
            F.scaled_dot_product_attention(*tensors[:3], attn_mask=self.mask, enable_gqa=True)

        if self.decodes:
            F.scaled_dot_product_attention(*tensors[-3:], enable_gqa=True)


def attention_points() -> Iterator[tuple[int, int, int, int]]:
    for n, kv in itertools.product(DECODES, KV):
        yield 0, 0, n, kv

    for chunk, cached in itertools.product(CHUNKS, CACHED):
        yield chunk, cached, 0, 0
        for n, kv in itertools.product(DECODES, KV):
            yield chunk, cached, n, kv


def whole_step(chunk: int, cached: int, decodes: int, kv: int, layers: int) -> float:
    """Return the time of a step of `layers` layers, output layer and sampler, in microseconds."""
    tokens = chunk + decodes
    weights = [
        [rand(QKV, HIDDEN), rand(HIDDEN, HIDDEN), rand(2 * MIDDLE, HIDDEN), rand(HIDDEN, MIDDLE)]
        for _ in range(layers)
    ]
    table, norm = rand(VOCAB, HIDDEN), rand(HIDDEN)
    cos, sin = rand(tokens, HEAD), rand(tokens, HEAD)
    ids = torch.randint(0, VOCAB, (tokens,), device="cuda")
    last = torch.randint(0, tokens, (decodes + bool(chunk),), device="cuda")
    attention = Attention(chunk, cached, decodes, kv)

    def step(_: int) -> torch.Tensor:
        x = residual = F.embedding(ids, table)
        for k, (qkv, out, up, down) in enumerate(weights):
            y = F.linear(rms_norm(x, residual, norm), qkv)
            rotary(y[:, : (HEADS + KV_HEADS) * HEAD], cos, sin)
            attention(k)
            x = F.linear(y[:, :HIDDEN], out)
            x = F.linear(silu_and_mul(F.linear(rms_norm(x, residual, norm), up)), down)

        return F.linear(rms_norm(x, residual, norm)[last], table).float().argmax(-1)

    return micros(step, 1)


def write(path: Path, header: Iterable[str], rows: Iterable[tuple[object, ...]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for row in rows:
            writer.writerow([f"{x:.5g}" if isinstance(x, float) else x for x in row])
            file.flush()


def attention_rows() -> Iterator[tuple[object, ...]]:
    for point in attention_points():
        one = Attention(*point)
        yield *point, micros(one, len(one.data))


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile a transformer in PyTorch on a GPU.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=24, help="whole steps to check with")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    began = time.time()

    meta = {
        "profiler_version": "optsched benchmarks/gpu/profile_torch.py",
        "torch_version": torch.__version__,
        "cuda_version": f"'{torch.version.cuda}'",
        "gpu": torch.cuda.get_device_name(),
        "profiled_at": time.strftime("'%Y-%m-%dT%H:%M:%S+00:00'", time.gmtime()),
        "model": "meta-llama/Llama-3.1-8B",
        "variant": "bf16",
        "tp_degrees": "[1]",
    }
    text = "".join(f"{key}: {value}\n" for key, value in meta.items())
    (args.out / "meta.yaml").write_text(text + "skew_profile:\n  enabled: false\n")

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        rows = ((name, n, t) for n in SEQUENCES for name, t in per_sequence(n))
        write(args.out / "per_sequence.csv", ("layer", "sequences", "time_us"), rows)
        print(f"per_sequence.csv after {time.time() - began:.0f} s", flush=True)

        names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        write(args.out / "attention.csv", (*names, "time_us"), attention_rows())
        print(f"attention.csv after {time.time() - began:.0f} s", flush=True)

        rows = ((name, n, t) for n in TOKENS for name, t in dense(n))
        write(args.out / "dense.csv", ("layer", "tokens", "time_us"), rows)
        print(f"dense.csv after {time.time() - began:.0f} s", flush=True)

        pick = random.Random(0)
        batches = []
        for _ in range(args.steps):
            prefill = pick.choice((0, pick.randint(16, 2048))), pick.randint(0, 4096)
            batches.append((*prefill, pick.randint(1, 128), pick.randint(64, 4096)))

        rows = ((*batch, whole_step(*batch, LAYERS)) for batch in batches)
        write(args.out / "steps.csv", (*names, "time_us"), rows)
        print(f"steps.csv after {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
