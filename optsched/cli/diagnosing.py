"""``diagnose``: from a benchmark or a trace to what to change first on a server."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Annotated, Any

from optsched.cli.options import AT_LEAST_1, UNSET, Given, check_outputs
from optsched.cli.output import emit_json, number, show_table, stop_at_ctrl_c, tell
from optsched.problem.errors import InputError, OptschedError

if TYPE_CHECKING:
    from optsched.analysis.diagnose import Diagnosis
    from optsched.files.measured import Measured
    from optsched.problem.instance import Instance


def diagnose(
    trace_file: str,
    gpu: str,
    model: str,
    slos: Given = UNSET,
    format_name: str | None = None,
    cost_model: str | None = None,
    kv_capacity: Annotated[int | None, AT_LEAST_1] = None,
    tensor_parallel: Annotated[int, AT_LEAST_1] = 1,
    max_num_seqs: Annotated[int, AT_LEAST_1] = 256,
    max_num_batched_tokens: Annotated[int, AT_LEAST_1] = 2048,
    measured: str | None = None,
    json_out: str | None = None,
) -> None:
    """Say what to change first on a server of vLLM, with the expected gain.

    Parameters:
      trace_file BENCH|TRACE: A benchmark's result, a trace, or an instance.
      gpu --gpu NAME: The device, by any of its names, or KEY=VALUE,... of its peaks.
      model --model NAME: The model: a known name, one of Hugging Face, or a config.json.
      format_name --format NAME: The format of the file. By default it is found out.
      cost_model NAME|FILE.toml: A cost model from a profile, in place of the GPU's peaks.
      kv_capacity N: The KV capacity in tokens. By default it follows from GPU and model.
      tensor_parallel N: The number of devices that share every layer.
      max_num_seqs N: As the server is set.
      max_num_batched_tokens N: As the server is set.
      measured FILE: Measured times of an instance, from `import --measured-out`.
    """
    check_outputs(json_out)
    from optsched.analysis.diagnose import diagnose as run
    from optsched.costs.cost import load_cost_model, roofline

    cost = roofline(model, gpu, tensor_parallel=tensor_parallel)
    capacity = kv_capacity or cost.kv_capacity_tokens
    if cost_model is not None:
        cost = load_cost_model(cost_model)

    instance, times = _read(trace_file, format_name, capacity)
    if measured is not None:
        from optsched.files.measured import read_measured

        times = read_measured(measured)

    settings: dict[str, Any] = {"max_num_seqs": max_num_seqs, "measured": times}
    settings |= {"max_num_batched_tokens": max_num_batched_tokens, **slos}
    with stop_at_ctrl_c() as stop:
        found = run(instance, cost, **settings, stop=stop)

    if stop.is_set():
        tell(f"note: interrupted after {len(found.changes)} changes")
    if not emit_json(found.to_dict(), json_out):
        _show(found)


def _read(file: str, name: str | None, capacity: int | None) -> tuple[Instance, Measured | None]:
    """Return a file's requests and measured times; which format it is in, is found out."""
    from dataclasses import replace

    from optsched.files.read_write import named_instance, read_instance
    from optsched.workloads.traces import read_trace_report, trace_formats

    if not os.path.isfile(named_instance(file)) or not os.path.getsize(named_instance(file)):
        raise InputError(f"{file}: found no file with anything in it; expected requests")
    if name is None:
        try:
            instance = read_instance(file)
            return replace(instance, kv_capacity=capacity or instance.kv_capacity), None
        except OptschedError:
            pass

    for form in trace_formats() if name is None else [name]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                instance, report = read_trace_report(form, file, kv_capacity=capacity)
        except OptschedError:
            if name is not None:
                raise

            continue

        tell(f"note: {file}: taken as {form}, {instance.n} requests")
        for note in report.notes:
            tell(f"warning: {file}: {note}")

        return instance, report.measured

    raise InputError(
        f"{file}: found no format that it is in; expected one of {', '.join(trace_formats())} "
        "(--format NAME says why), or an instance"
    )


def _show(found: Diagnosis) -> None:
    """Print the verdict first, and then what it is made of."""
    loss = "of the requests that miss their SLOs" if found.misses else "of the mean latency"
    first, base = found.first, found.base
    if first is None:
        print("first: nothing; no change tried takes away 5 % " + loss)
    else:
        sure = (
            "whatever the cost model's error" if found.sure == 1 else "if the cost model is right"
        )
        gains = (100 * first.gain, 100 * first.low, 100 * first.high)
        print(f"first: {first.what}")
        print("gain: {:.0f} % ({:.0f} to {:.0f} %) ".format(*gains) + f"{loss}, {sure}")

    within = "" if found.attainable is None else f", {100 * found.attainable:.1f} % within SLOs"
    print(f"nobody can have: less than {number(found.bound)} s of mean latency{within} at most")
    if found.error is None:
        print("twin: no measured times; the cost model is taken as it is, give or take 20 %")
    else:
        print(f"twin: repeats the run's latencies to {100 * found.error:.1f} % in the median")

    waits, whole = found.waits, sum(found.waits.values())
    shares = ", ".join(f"{name} {100 * value / whole:.0f} %" for name, value in waits.items())
    print(f"time goes to: {shares}\n")

    def cells(metrics: dict[str, Any]) -> list[Any]:
        attained = metrics.get("slo_attainment")
        shown = (metrics[name] for name in ("mean_latency", "p99_ttft", "p99_tpot"))
        return [None if attained is None else 100.0 * attained, *shown]

    rows: list[tuple[Any, ...]] = [("as it is", None, None, None, *cells(base))]
    for one in found.changes:
        gains = (100 * one.gain, 100 * one.low, 100 * one.high)
        rows.append((one.what, *(round(value) for value in gains), *cells(one.metrics)))

    headers = ("change", "gain\n[%]", "from\n[%]", "to\n[%]", "SLOs\n[%]", "mean latency\n[s]",
               "p99 TTFT\n[s]", "p99 TPOT\n[s/token]")  # fmt: skip
    show_table(headers, rows)
