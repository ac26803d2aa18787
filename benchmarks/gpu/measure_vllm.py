"""Profile vLLM on one GPU, and replay requests under its own schedulers and ours, in one start.

    python benchmarks/gpu/measure_vllm.py MODEL_FOLDER OUT [--seconds S]

vLLM starts once, in this process. Its scheduler is replaced between replays: vLLM's own by arrival
or by priority, or a policy of optsched (`optsched.engines.vllm`), with the prefix cache on or off.
First the batches of `PROFILE` are timed, the most telling first. A cost model is then fitted to the
first of them in another process, which also makes the instances: load 1 is the number of requests
over the time that the twin needs for all of them at once. What is measured is written at once, and
nothing begins after S seconds.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optsched import Problem, run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
SEATS, TOKENS, LONGEST, BLOCK = 256, 2048, 32768, 16
FACTS = {"max_num_seqs": SEATS, "max_num_batched_tokens": TOKENS, "max_model_len": LONGEST}
LOADS = {"chat": (1.0, 2.0), "long": (1.0, 2.0), "sessions": (1.0,)}


class Mix(NamedTuple):
    """Blocks of KV that a mix has, and the schedulers that serve it, by name."""

    kv_blocks: int
    schedulers: dict[str, str]


OURS = {"least-work": "least-work", "spf-work": "spf-work", "spf": "spf"}
VLLM = {"fcfs": "vllm-v1", "priority": "vllm-v1:policy=priority,priority=work"}
MIXES = {
    "chat": Mix(16384, {**VLLM, "spf-work": "spf-work", "least-work": "least-work"}),
    "long": Mix(20480, {**VLLM, "spf-work": "spf-work", "spf": "spf"}),
    "sessions": Mix(16384, {"fcfs": "vllm-v1", "no-cache": "vllm-v1:prefix_caching=false"}),
}


def requests(mix: str, n: int, seed: int = 0) -> Any:
    """Return the requests of a mix, one a second, or sessions whose calls repeat what was said."""
    from optsched.problem.instance import Instance, Limits
    from optsched.workloads.generate import generate
    from optsched.workloads.predict import predict

    small = LONGEST < 32768  # a rehearsal with a small model
    scale = 8 if small else 1
    random = np.random.default_rng(seed)
    if mix == "sessions":
        calls = np.asarray(random.poisson(5, n)) + 1
        first = np.cumsum(calls) - calls
        begins = np.repeat(first, calls) == np.arange(calls.sum())
        before = np.where(begins, -1, np.arange(len(begins)) - 1)
        output = np.clip(random.lognormal(np.log(100), 0.7, len(begins)), 1, 500).astype(int)
        output = np.maximum(1, output // scale)
        prompt = random.integers(1000 // scale, 3000 // scale, len(begins))
        shared = np.zeros(len(begins), dtype=int)
        for i in np.flatnonzero(~begins):
            shared[i] = prompt[i - 1] + output[i - 1]
            prompt[i] = shared[i] + random.integers(1, 800 // scale)

        arrival = np.full(len(begins), -1.0)
        arrival[begins] = np.cumsum(random.exponential(size=n))
        arrival[begins] -= arrival[0]
        drawn = Instance(
            *(arrival, prompt, output, 1 << 24, "second"),
            after=tuple(() if i < 0 else (int(i),) for i in before),
            delay=np.where(begins, 0.0, random.exponential(1.0, len(begins)).round(6)),
            prefix_parent=before,
            prefix_tokens=shared,
            prefix_block_tokens=BLOCK,
        )
    else:
        lengths = {"prompt_mean": 500 // scale, "prompt_median": 320 // scale}
        lengths |= {"prompt_max": 3000 // scale, "output_max": 800 // scale}
        lengths |= {"output_mean": 160 // scale, "output_median": 110 // scale}
        drawn = generate("lognormal", seed=seed, n=n, arrivals="poisson", rate=1.0, **lengths)
        if mix == "long":
            prompt = drawn.prompt_tokens.copy()
            prompt[random.permutation(n)[: round(0.03 * n)]] = 16384 // scale
            drawn = replace(drawn, prompt_tokens=prompt, kv_capacity=1 << 24)

    return replace(
        predict(drawn, "noisy:mae=30" if not small else "noisy:mae=4", seed=seed),
        kv_capacity=MIXES[mix].kv_blocks * BLOCK,
        kv_accounting="cached",
        kv_block_tokens=BLOCK,
        limits=Limits(TOKENS, None, SEATS),
        chunked_prefill=True,
    )


def plan(folder: Path, sizes: dict[str, int]) -> None:
    """Fit a cost model to a profile, and write the instances and the priorities of each."""
    from optsched.costs.fit import fit
    from optsched.costs.load import load_cost_model
    from optsched.engines.vllm import Desk
    from optsched.files.read_write import write_instance
    from optsched.policies import make_policy
    from optsched.problem.instance import Limits

    about = json.loads((folder / "device.json").read_text())
    asked: Any = {} if "device" in about else {"hardware": "cpu"}
    try:
        text = fit(folder / "first", name="first", **asked).to_toml()
    except Exception as error:
        print(f"no fit: {error}", flush=True)
        text = (ROOT / "models" / "llama-3.1-8b-h100-torch.toml").read_text(encoding="utf-8")

    (folder / "first.toml").write_text(text, encoding="utf-8")
    cost = load_cost_model(folder / "first.toml")
    for mix, n in sizes.items():
        for _ in range(2):  # the number is scaled to some 22 seconds of work
            base = requests(mix, n)
            delay = None if base.delay is None else 0 * base.delay
            at_once = replace(base, arrival=np.minimum(base.arrival, 0), delay=delay)
            busy = run(Problem(at_once, cost), "vllm-v1").metrics["makespan"]
            n = round(n * min(2.0, 22 / busy))

        for load in LOADS[mix]:
            stretch = busy / len(base.given_arrivals) / load
            arrival = np.where(base.arrival < 0, base.arrival, (base.arrival * stretch).round(6))
            instance = replace(base, arrival=arrival, name=f"{mix}-load-{load:g}")
            write_instance(instance, folder / f"{instance.name}.json")
            if mix != "sessions":
                work = priorities(instance, cost)
                (folder / f"{instance.name}-work.json").write_text(json.dumps(work))

            print(f"{instance.name}: {instance.n} requests, busy {busy:.1f} s", flush=True)

    for name in OURS.values():  # compiles what they need in a server
        desk = Desk(make_policy(name)[0], cost, 1024, BLOCK, Limits(TOKENS, None, SEATS))
        desk.add(0.0, 1, 1)
        none = np.zeros(1, np.int64)
        desk.ask(0.0, [0], [], none, none, none > 0)


def priorities(instance: Any, cost: Any) -> list[int]:
    """Return the rank of each request by predicted work."""
    from optsched.policies.runner import waiting_rank
    from optsched.workloads.predict import estimates

    return np.asarray(waiting_rank("work", instance, estimates(instance)[0], cost)).tolist()


def shapes(tiny: bool) -> list[tuple[list[Any], int, int]]:
    """Return the batches to time in three parts, each with its repeats and max seconds."""
    from optsched.engines import profiling
    from optsched.engines.profiling import Shape

    one = [Shape(c, 0, 0, 0, p) for c in (16, 128, 512, 1024, 2048) for p in (1,)]
    one += [Shape(c, 0, 0, 0, p) for c, p in ((128, 2), (128, 8), (512, 2), (512, 4), (64, 16))]
    decodes = [(1, 128), (8, 128), (32, 512), (64, 1024), (128, 512), (256, 256), (256, 1024)]
    decodes += [(8, 4096), (32, 4096), (2, 16384)]
    mixed = [(128, 32, 512), (512, 32, 512), (1536, 32, 512), (512, 128, 512), (1536, 128, 512)]
    mixed += [(1024, 240, 256), (1792, 240, 256), (256, 8, 4096)]  # prefills need seats, too
    first = [*one, *[Shape(c, m, 0, 0) for m, c in ((2048, 2048), (8192, 2048), (14336, 2048))]]
    first += [Shape(0, 0, n, k) for n, k in decodes] + [Shape(c, 0, n, k) for c, n, k in mixed]
    more = [Shape(c, 0, 0, 0) for c in (32, 64, 256, 1536, 768)]
    more += [Shape(c, m, 0, 0) for m, c in ((2048, 256), (8192, 512), (28672, 2048), (4096, 1024))]
    more += [Shape(0, 0, n, k) for n, k in ((1, 1024), (4, 256), (16, 256), (96, 256), (192, 768))]
    more += [Shape(0, 0, n, k) for n, k in ((4, 8192), (16, 2048), (1, 30000), (64, 4096))]
    more += [Shape(c, 0, n, k) for c, n, k in ((64, 64, 256), (1024, 64, 1024), (1536, 16, 8192))]
    more += [Shape(256, 0, 128, 512, 4), Shape(512, 0, 32, 512, 3), Shape(256, 0, 240, 512, 6)]
    if tiny:
        fits = profiling.shapes(TOKENS, SEATS, 512)
        return [(fits[::8], 2, 12), (fits[1::40], 2, 3)]

    return [(first, 3, 110), (more, 3, 45)]


class Run:
    """One start of vLLM, what is written of it, and until when."""

    def __init__(self, model: str, out: Path, options: dict[str, Any], until: float) -> None:
        from optsched.engines.in_process import InProcess

        self.out, self.until = out, until
        self.began = time.time()
        self.process = InProcess(model, options)
        self.engine = self.process.engine
        self.core = self.engine.engine_core.engine_core
        self.hasher = self.core.request_block_hasher
        self.whole = self.core.scheduler.kv_cache_config
        self.log("started", options=options, blocks=self.whole.num_blocks)

    def log(self, what: str, **facts: Any) -> None:
        line = {"what": what, "at": round(time.time() - self.began, 1), **facts}
        print(json.dumps(line, default=str), flush=True)
        with (self.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def use(self, scheduler: str, blocks: int | None = None, caching: bool = False) -> None:
        """Give the engine another scheduler, with an empty KV cache."""
        from vllm.v1.core.sched.scheduler import Scheduler

        config, old, cls = self.core.vllm_config, self.core.scheduler, Scheduler
        config.cache_config.enable_prefix_caching = caching
        config.scheduler_config.policy = "priority" if scheduler == "priority" else "fcfs"
        if scheduler in OURS:
            own = {"policy": OURS[scheduler], "cost_model": str(self.out / "first.toml")}
            config.additional_config = {"optsched": own}
            cls = policy_scheduler()

        held = self.whole
        if blocks is not None:
            held = replace(held, num_blocks=min(blocks + 1, held.num_blocks))

        more = {"hash_block_size": old.hash_block_size} if hasattr(old, "hash_block_size") else {}
        self.core.scheduler = new = cls(
            vllm_config=config,
            kv_cache_config=held,
            structured_output_manager=self.core.structured_output_manager,
            log_stats=self.core.log_stats,
            block_size=old.block_size,
            **more,
        )
        new.finished_req_ids |= old.finished_req_ids  # what the worker is still to be told
        self.core.request_block_hasher = self.hasher if caching else None

    def profile(self, part: list[Any], repeats: int, seconds: float, folder: Path) -> None:
        from optsched.engines.profiling import COLUMNS, _Bench

        folder.mkdir(exist_ok=True)
        table, until = folder / "steps.csv", min(self.until, time.time() + seconds)
        bench = _Bench(self.engine, np.random.default_rng(0))
        with table.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if not file.tell():
                writer.writerow(["shape", *COLUMNS])
            for shape in part:
                if time.time() > until:
                    break
                try:
                    writer.writerow([shape.label, *bench.measure(shape, repeats)])
                    file.flush()
                except Exception as error:
                    self.log("failed", shape=shape.label, error=repr(error)[:300])
                    bench._clear()

        self.log("profiled", folder=folder.name, rows=sum(1 for _ in table.open()) - 1)

    def replay(self, mix: str, scheduler: str, load: float, head: int | None = None) -> None:
        from optsched.engines.replay import replay
        from optsched.files.measured import write_measured
        from optsched.files.read_write import read_instance

        name = f"{mix}-load-{load:g}"
        out = self.out / f"{mix}-{scheduler}-load-{load:g}.measured.json"
        if time.time() > self.until:
            return self.log("no time", run=out.name)

        instance = read_instance(self.out / f"{name}.json")
        order = None
        if scheduler == "priority":
            order = json.loads((self.out / f"{name}-work.json").read_text())

        self.use(scheduler, MIXES[mix].kv_blocks, mix == "sessions" and scheduler != "no-cache")
        begun = time.time()
        vocabulary = self.core.vllm_config.model_config.get_vocab_size()
        found = replay(
            instance, self.process, priority=order, vocabulary=vocabulary, timeout_s=200.0
        )
        write_measured(found, out)
        facts = {"errors": len(found.errors or {})}
        facts["latency"] = round(float(np.nanmean(found.latency)), 3)
        if found.ttft is not None:
            facts["ttft"] = round(float(np.nanmean(found.ttft)), 3)

        self.log("replayed", run=out.name, seconds=round(time.time() - begun, 1), **facts)

    def all(self, runs: list[Any]) -> None:
        """Serve mixes under schedulers at loads; the first is a warm-up, and measured again."""
        for mix, scheduler, load in runs:
            try:
                self.replay(mix, scheduler, load)
            except Exception as error:
                self.log("failed", run=f"{mix}-{scheduler}-{load:g}", error=repr(error)[:600])

        self.log("done")
        os._exit(0)


def policy_scheduler() -> type:
    """Return `optsched.engines.vllm.PolicyScheduler`, made to fit vLLM 0.26 if that is it."""
    from vllm.v1.core.sched import output

    import optsched.engines.vllm as plug_in

    made = plug_in.PolicyScheduler
    if hasattr(output.NewRequestData, "_adapted") or "ec_manager_metadata" in (
        output.SchedulerOutput.__dataclass_fields__
    ):
        return made

    whole, from_request = output.SchedulerOutput, output.NewRequestData.from_request
    output.NewRequestData._adapted = True
    output.NewRequestData.from_request = lambda *given, uses_mrope=False: from_request(*given)
    output.SchedulerOutput = lambda ec_manager_metadata=None, **given: whole(
        num_common_prefix_blocks=[0], **given
    )
    from vllm.v1.core import encoder_cache_manager as encoder

    encoder.EncoderCacheManager.get_manager_metadata = lambda self: None
    made.model_uses_mrope = False
    return made


def device(out: Path) -> None:
    """Write what ran."""
    import torch
    import vllm

    words = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    facts = {"vllm": vllm.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
        facts["smi"] = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    (out / "device.json").write_text(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--set", type=json.loads, default={}, help="arguments of vllm.LLM")
    parser.add_argument("--only", type=json.loads, help="mixes, schedulers and loads to go on with")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--plan", action="store_true")
    args = parser.parse_args()
    out, tiny = args.out, args.tiny
    if tiny:
        globals().update(SEATS=16, TOKENS=512, LONGEST=2048, BLOCK=32)
        for mix, content in MIXES.items():
            MIXES[mix] = content._replace(kv_blocks=96)
    sizes = {"chat": 20, "long": 12, "sessions": 3} if tiny else {}
    sizes = sizes or {"chat": 800, "long": 400, "sessions": 64}
    if args.plan:
        return plan(out, sizes)

    until = time.time() + args.seconds
    out.mkdir(parents=True, exist_ok=True)
    limits = dict(zip(FACTS, (SEATS, TOKENS, LONGEST), strict=True))
    options = {**limits, "async_scheduling": False, "enable_prefix_caching": True, **args.set}
    run = Run(str(args.model), out, options, until)
    if args.only:
        return run.all(args.only)

    device(out)
    first, *rest = shapes(tiny)
    run.use("fcfs")
    run.profile(*first, out / "first")
    (out / "first" / "config.json").write_bytes((args.model / "config.json").read_bytes())
    (out / "first" / "device.json").write_bytes((out / "device.json").read_bytes())
    words = [sys.executable, __file__, str(args.model), str(out), "--plan"]
    with (out / "plan.log").open("w") as log:
        words = ["true"] if (out / "chat-load-2.json").is_file() else words
        planned = subprocess.Popen([*words, *(["--tiny"] * tiny)], stdout=log, stderr=log)
        for part in rest:
            run.profile(*part, out / "more")
        status = planned.wait(timeout=150)

    run.log("planned", status=status, said=(out / "plan.log").read_text()[-600:])
    runs = [(mix, s, load) for mix in MIXES for load in LOADS[mix][-1:] for s in MIXES[mix][1]]
    runs += [(mix, s, load) for mix in MIXES for load in LOADS[mix][:-1] for s in MIXES[mix][1]]
    order = ("long", "sessions", "chat")
    runs.sort(key=lambda r: (r[2] != LOADS[r[0]][-1], order.index(r[0])))
    run.all([runs[-4], *runs])


if __name__ == "__main__":
    main()
