"""``diagnose``: from a benchmark or a trace to what to change first on a server."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from optsched.cli.options import AT_LEAST_1, UNSET, Given
from optsched.cli.output import emit_json, show_table, stop_at_ctrl_c, tell
from optsched.costs.cost import load_cost_model, roofline
from optsched.costs.model_file import to_toml
from optsched.files.measured import Measured, read_measured, settings_beside
from optsched.files.read_write import named_instance, read_instance, write_bytes
from optsched.problem.errors import InputError, OptschedError
from optsched.problem.instance import Instance, Limits
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    from optsched.analysis.diagnose import Diagnosis


# The error of the twin beyond which its advice comes with a warning.
_OFF = 0.1

# The metrics that are shown of every change.
_METRICS = ("slo_attainment", "mean_latency", "p99_ttft", "p99_tpot")


def diagnose(
    trace_file: str,
    gpu: str,
    model: str,
    slos: Given = UNSET,
    format_name: str | None = None,
    cost_model: str | None = None,
    kv_capacity: Annotated[int | None, AT_LEAST_1] = None,
    tensor_parallel: Annotated[int | None, AT_LEAST_1] = None,
    max_num_seqs: Annotated[int | None, AT_LEAST_1] = None,
    max_num_batched_tokens: Annotated[int | None, AT_LEAST_1] = None,
    measured: str | None = None,
    cost_model_out: str | None = None,
    json_out: str | None = None,
) -> None:
    """Say what to change first on a server of vLLM, and the gain.

    Parameters:
      trace_file BENCH|TRACE: A benchmark's result, its folder, a trace, or an instance.
      gpu --gpu NAME: The GPU: a name (`optsched list gpus`) or KEY=VALUE,... of its peaks.
      model --model NAME: The model: a known name, one of Hugging Face, or config.json.
      format_name --format NAME: The file's format. By default it is found out.
      cost_model MODEL: A cost model from a profile, in place of peaks.
      kv_capacity N: What vLLM prints at start. By default the instance's, that of meta.json, or
        an estimate.
      max_num_seqs N: As the server is set. By default the instance's, that of meta.json, or 256.
      max_num_batched_tokens N: The same; by default 2048.
      measured FILE: Measured times (`import --measured-out`).
      cost_model_out --cost-model-out FILE: Write the cost model that repeats the run.
      Rare: format_name, measured, cost_model_out
    """
    from optsched.analysis.diagnose import diagnose as run

    if os.path.isdir(trace_file):
        trace_file = os.path.join(trace_file, "requests.jsonl")

    own = None if format_name is not None else _own(trace_file)
    beside = settings_beside(trace_file) if own is None else _limits(own)
    devices = tensor_parallel or beside.get("tensor_parallel_size", 1)
    cost = roofline(model, gpu, tensor_parallel=devices)
    blocks, size = beside.get("num_gpu_blocks", 0), beside.get("block_size", 1)
    source = "from meta.json" if own is None else "of the instance"
    origin = "given" if kv_capacity else source if blocks else "an estimate"
    capacity = kv_capacity or blocks * size or cost.kv_capacity_tokens
    seqs = max_num_seqs or beside.get("max_num_seqs", 256)
    tokens = max_num_batched_tokens or beside.get("max_num_batched_tokens", 2048)
    if cost_model is not None:
        cost = load_cost_model(cost_model)

    times = None if measured is None else read_measured(measured)
    if own is not None:
        if times is not None:
            times.check(own)  # the server's settings may be corrected, and the requests not
            times = replace(times, instance_sha256=None)

        rest = Limits(max_prefill_tokens=own.limits.max_prefill_tokens)
        instance = replace(own, kv_capacity=capacity or own.kv_capacity, limits=rest)
    else:
        options = {"kv_capacity": capacity, "kv_block_tokens": size}
        instance, taken = _read(trace_file, format_name, options)
        times = times or taken

    if instance.clients is not None:
        tell(
            f"warning: {trace_file}: {instance.clients} clients waited for their answers: gains "
            "are of requests at these times, and not of clients that would wait less and send more"
        )

    settings: dict[str, Any] = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    with stop_at_ctrl_c() as stop:
        problem = Problem(instance, cost, **slos)
        found = run(problem, measured=times, **settings, stop=stop)

    if stop.is_set():
        tell(f"note: interrupted after {len(found.changes)} changes")
    if cost_model_out is not None:
        write_bytes(to_toml(found.cost_model).encode(), cost_model_out)
    if not emit_json(found.to_dict(), json_out):
        held = f"KV capacity {instance.kv_capacity} tokens ({origin})"
        _show(found, f"{held}, max_num_seqs={seqs}, max_num_batched_tokens={tokens}")
        twin = f"vllm-v1:max_num_seqs={seqs},max_num_batched_tokens={tokens}"
        same = own is not None and own.kv_capacity == capacity
        words = f"{trace_file if same else 'INSTANCE.json'} --policy {twin}"
        words += f" --cost-model {cost_model_out or 'CAL.toml'}"
        words += "" if times is None else f" --measured {measured or 'FILE'}"
        print(f"how far from the best: optsched compare {words}")
        if cost_model_out is None:
            print("  CAL.toml: what --cost-model-out writes")
        if not same:
            print("  INSTANCE.json, FILE: what `import --measured-out` writes, with the KV above")


def _own(file: str) -> Instance | None:
    """Return the instance in a file; None if there is none in it."""
    with suppress(OptschedError):
        return read_instance(file)

    times = None
    with suppress(OptschedError):
        times = read_measured(file)
    if times is not None:
        raise InputError(
            f"{file}: found measured times; expected their instance, with `--measured {file}`"
        )

    return None


def _limits(instance: Instance) -> dict[str, int]:
    """Return what an instance says of its server, by the names of vLLM."""
    given = instance.limits
    found = {"max_num_seqs": given.max_running, "max_num_batched_tokens": given.max_batch_tokens}
    found["num_gpu_blocks"] = instance.kv_capacity
    return {name: value for name, value in found.items() if value is not None}


def _read(
    file: str, name: str | None, options: dict[str, int | None]
) -> tuple[Instance, Measured | None]:
    """Return a file's requests and measured times; which format it is in, is found out."""
    from optsched.workloads.traces import read_trace_report
    from optsched.workloads.traces.recognized import recognize

    if not os.path.isfile(named_instance(file)) or not os.path.getsize(named_instance(file)):
        raise InputError(f"{file}: found no file with anything in it; expected requests")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        form = recognize(file) if name is None else name
        instance, report = read_trace_report(form, file, **options)

    if report.unmeasured.startswith("latencies"):
        raise InputError(
            f"{file}: found {report.unmeasured}, so the measured run cannot be repeated; expected "
            f"both, or an instance of `import {form} --rate R`"
        )

    tell(f"note: {file}: taken as {form}, {instance.n} requests")
    for note in report.notes:
        tell(f"warning: {file}: {note}")

    return instance, report.measured


def _twin(found: Diagnosis) -> tuple[float, str]:
    """Return by how much the twin misses the run, in the median or the mean, and words for it."""
    if found.error is None or found.measured is None:
        return 0.0, "no measured times; the cost model is taken as it is, give or take 20 %"

    off = found.base["mean_latency"] / found.measured["mean_latency"] - 1
    error = f"{100 * found.error:.1f} % in the median, their mean to {100 * off:+.1f} %"
    return max(found.error, abs(off)), f"repeats the run's latencies to {error}"


def _show(found: Diagnosis, server: str) -> None:
    """Print the verdict first, and then what it is made of."""
    loss = "requests that miss their SLOs" if found.misses else "mean latency (no SLO is missed)"
    base, steps = found.base, {"first": found.first}
    off, twin = _twin(found)
    if found.error is None:
        print(
            f"about: a server as fast as {found.cost_model.name}, not yours, which may be several "
            "times slower; its own times as --measured FILE make it about yours"
        )
    elif off > _OFF:
        print(
            f"warning: the twin is {100 * off:.0f} % off, and the advice may be the opposite of "
            "right; usual causes are the KV capacity, the seats (max_num_seqs), and whether the "
            "run had prefix caching"
        )

    if found.of_settings != found.first:
        steps["of settings alone"] = found.of_settings

    for words, one in steps.items():
        if one is None:
            print(f"{words}: nothing; no change tried gains 5 %")
            continue

        span = "{} % ({} to {} %)".format(*one.percents)
        sure = f"worth it under {round(one.sure * found.models)} of {found.models} cost models"
        print(f"{words}: {one.what}" + ", extrapolated" * one.extrapolated)
        print(f"gain: takes away {span} of the {loss}, {sure}")
        shown = [name for name in _METRICS if base[name] is not None]
        moves = (f"{name} {base[name]:.3g} -> {one.metrics[name]:.3g}" for name in shown)
        print(f"  {', '.join(moves)}")

    limits = [f"a mean latency below {found.bound:.4g} s"]
    if found.attainable not in (None, 1.0):
        limits.append(f"more than {100 * found.attainable:.1f} % within SLOs")

    under = f"under each of the {found.models} cost models"
    print(f"impossible with this worker and KV, {under}: {', '.join(limits)}")
    mean = (found.measured or base)["mean_latency"]
    run = "the run took" if found.measured else "the twin takes"
    if found.bound > 0:
        print(f"from the best: {run} at most {mean / found.bound:.3g} times what any schedule can")
    print(f"server: {server}")
    if "estimate" in server and off > 0.03:
        twin += "; is the KV capacity right? Give what vLLM printed at start as --kv-capacity"

    if found.prefix_caching is not None:
        why = "as is assumed" if found.error is None else "which repeats the run better"
        twin += f"; prefix caching {'on' if found.prefix_caching else 'off'}, {why}"

    print(f"twin: {twin}")
    waits, whole = found.waits, sum(found.waits.values())
    shares = ", ".join(f"{name} {100 * value / whole:.0f} %" for name, value in waits.items())
    print(f"time goes to: {shares}\n")

    runs = {"measured": found.measured, "as it is": base}
    rows = [(what, None, None, None, *map(m.get, _METRICS)) for what, m in runs.items() if m]
    for one in found.changes:
        what = one.what + ", extrapolated" * one.extrapolated
        rows.append((what, *one.percents, *map(one.metrics.get, _METRICS)))

    headers = ("change", "gain\n[%]", "from\n[%]", "to\n[%]", "SLO\nattainment",
               "mean latency\n[s]", "p99 TTFT\n[s]", "p99 TPOT\n[s/token]")  # fmt: skip
    show_table(headers, rows)
    print(f"from, to: the range over {found.models} cost models, which has no other error in it")
