"""``diagnose``: from a benchmark or a trace to what to change first on a server."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from optsched.cli.options import ABOVE_0, AT_LEAST_1, UNSET, Given, key_values
from optsched.cli.output import LiveLine, emit_json, show_table, stop_at_ctrl_c, tell
from optsched.costs.architectures import architecture
from optsched.costs.cost import PROFILED, roofline
from optsched.costs.devices import admitted_whole_by_vllm, device, served_by_vllm
from optsched.costs.hardware import VLLM_GIB
from optsched.costs.load import load_cost_model
from optsched.costs.model_file import to_toml
from optsched.files.measured import (
    Measured,
    read_measured,
    settings_beside,
    version_beside,
    write_measured,
)
from optsched.files.outputs import make_folder
from optsched.files.read_write import named_instance, read_instance, write_bytes, write_instance
from optsched.problem.errors import InputError, OptschedError
from optsched.problem.instance import Instance, Limits
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    from optsched.analysis.diagnose import Diagnosis


# The error of the twin beyond which its advice comes with a warning.
_OFF = 0.1

# The metrics that are shown of every change, and the words of those that are checked.
_METRICS = ("slo_attainment", "mean_latency", "p99_ttft", "p99_tpot")
_CHECKED = {
    "mean_latency": "latency [s]",
    "mean_ttft": "TTFT [s]",
    "mean_tpot": "TPOT [s]",
    "p95_itl": "95th percentile between tokens [s]",
    "slo_attainment": "share within SLOs",
}


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
    settings: list[str] | None = None,
    vllm_version: str | None = None,
    run: int | None = None,
    measured: str | None = None,
    sample: Annotated[int, AT_LEAST_1] = 1000,
    time_limit: Annotated[float | None, ABOVE_0] = None,
    twin_out: str | None = None,
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
      max_num_seqs N: As the server is set. By default the instance's, that of meta.json, or vLLM's.
      max_num_batched_tokens N: The same.
      vllm_version --vllm-version X.Y: The server's version, whose defaults are taken. By default
        that of meta.json, or a late one.
      settings --set KEY=VALUE: A further setting of the server (repeatable), by its name in the
        policy vllm-v1.
      run N: The run of a file of several, from 1, or -1.
      measured FILE: Measured times (`import --measured-out`).
      sample N: Take the first N requests of a longer run.
      twin_out --twin-out DIR: Write what repeats the run, for other commands: instance, cost
        model and measured times.
      Rare: format_name, run, measured, settings, sample
    """
    from optsched.analysis.diagnose import diagnose as diagnosis
    from optsched.analysis.twin import first_of

    if os.path.isdir(trace_file):
        trace_file = os.path.join(trace_file, "requests.jsonl")

    # The server: what options say, else the instance or meta.json, else estimates and defaults.
    file_instance = None if format_name is not None else _instance_in(trace_file)
    if file_instance is None:
        stated, source = settings_beside(trace_file), "from meta.json"
        version = vllm_version or version_beside(trace_file)
    else:
        stated, source = _stated_settings(file_instance), "of the instance"
        version = vllm_version

    devices = tensor_parallel or stated.get("tensor_parallel_size", 1)
    # Linear (an exponent of 1), since `diagnosis` tries further shapes of linear models.
    peaks = roofline(model, gpu, tensor_parallel=devices, exponent=1, beside_gib=VLLM_GIB)
    blocks, block_tokens = stated.get("num_gpu_blocks", 0), stated.get("block_size", 1)
    capacity = kv_capacity or blocks * block_tokens or peaks.kv_capacity_tokens
    origin = "an estimate"
    if kv_capacity or blocks:
        origin = "given" if kv_capacity else source

    seqs = max_num_seqs or stated.get("max_num_seqs", 0)
    tokens = max_num_batched_tokens or stated.get("max_num_batched_tokens", 0)
    if not (seqs and tokens):  # vLLM's own defaults depend on the GPU and on its version
        default_seqs, default_tokens = served_by_vllm(device(gpu), version)
        seqs, tokens = seqs or default_seqs, tokens or default_tokens

    # What follows from a known version may be overwritten by --set.
    further = {}
    admits_whole = admitted_whole_by_vllm(version)
    if admits_whole is not None:
        further["scheduler_reserve_full_isl"] = str(admits_whole).lower()
    further |= key_values(settings)
    cost, also = peaks, None
    if cost_model is not None:
        cost = load_cost_model(cost_model)
    elif devices == 1:  # a shipped profile is of one GPU
        profile = PROFILED.get((architecture(model).name, device(gpu).name))
        if profile is not None:
            cost, also = load_cost_model(profile), peaks

    times = None if measured is None else read_measured(measured)
    if file_instance is not None:
        if times is not None:
            times.check(file_instance)
            # The server's settings may be corrected below, and the requests not.
            times = replace(times, instance_sha256=None)

        # Its limits of a batch are now the server's settings.
        other_limits = Limits(max_prefill_tokens=file_instance.limits.max_prefill_tokens)
        capacity = capacity or file_instance.kv_capacity
        instance = replace(file_instance, kv_capacity=capacity, limits=other_limits)
    else:
        kv = {"kv_capacity": capacity, "kv_block_tokens": block_tokens}
        instance, trace_times = _read(trace_file, format_name, kv, run, model)
        times = times or trace_times

    if instance.clients is not None:
        tell(
            f"warning: {trace_file}: {instance.clients} clients waited for their answers: gains "
            "are of requests at these times, and not of clients that would wait less and send more"
        )
    if also is not None:
        tell(f"note: {cost.name}, a profile of this model on this GPU, is tried beside its peaks")

    count = instance.n
    instance, times = first_of(instance, times, sample)
    if instance.n < count:
        tell(f"note: of {count} requests the first {sample} are taken (--sample N takes others)")

    with LiveLine() as line, stop_at_ctrl_c() as stop:
        found = diagnosis(
            Problem(instance, cost, **slos),
            measured=times,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            settings=further,
            time_limit_s=time_limit,
            also=also,
            stop=stop,
            progress=line.show,
        )

    if len(found.changes) < found.tried:
        why = "interrupted" if stop.is_set() else "out of time"
        tell(f"note: {why} after {len(found.changes)} of {found.tried} changes")
    folder = None if twin_out is None else _write_twin(found, times, twin_out)
    if emit_json(found.to_dict(), json_out):
        return

    kv_words = f"KV capacity {instance.kv_capacity} tokens ({origin})"
    shown = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, **further}
    server = ", ".join([kv_words, *(f"{name}={value}" for name, value in shown.items())])
    _show(found, server)
    _show_next_command(found, folder, with_times=times is not None)


def _show_next_command(found: Diagnosis, folder: str | None, *, with_times: bool) -> None:
    """Print the command that looks closer, with the files of ``--twin-out``."""
    place = folder or "DIR"
    words = f"{place}/instance.json {place}/cost-model.toml --policy {found.served}"
    words += f" --objective {found.problem.goal.name}"
    if with_times:
        words += f" --measured {place}/measured.json"

    print(f"closer: optsched compare {words}")
    if folder is None:
        print("  DIR: what --twin-out DIR writes; solve and bound take it, too")


def _write_twin(found: Diagnosis, times: Measured | None, folder: str) -> str:
    """Write the problem of a diagnosis, and its measured times; return the folder's name."""
    path, instance = make_folder(folder), found.problem.instance
    write_instance(instance, path / "instance.json")
    write_bytes(to_toml(found.cost_model).encode(), path / "cost-model.toml")
    if times is not None:
        # The instance has the server's limits now, so times are tied to its requests only.
        digest = instance.requests_sha256
        times = replace(times, instance_sha256=None, requests_sha256=digest)
        write_measured(times, path / "measured.json")

    return str(path)


def _instance_in(file: str) -> Instance | None:
    """Return the instance in a file; None if there is none in it."""
    # Each of our files names its format, which begins so. In a compressed one it is not visible.
    is_plain = os.path.isfile(file) and not file.endswith(".gz")
    if is_plain and b"optsched-" not in Path(file).read_bytes():
        return None  # which is quicker than to read a long benchmark as what it is not

    with suppress(OptschedError):
        return read_instance(file)

    times = None
    with suppress(OptschedError):
        times = read_measured(file)
    if times is not None:  # a frequent mistake, which is worth its own words
        raise InputError(
            f"{file}: found measured times; expected their instance, with `--measured {file}`"
        )

    return None


def _stated_settings(instance: Instance) -> dict[str, int]:
    """Return what an instance says of its server, by the names of vLLM."""
    limits = instance.limits
    settings = {
        "max_num_seqs": limits.max_running,
        "max_num_batched_tokens": limits.max_batch_tokens,
        "num_gpu_blocks": instance.kv_capacity,  # in blocks of one token
    }
    return {name: value for name, value in settings.items() if value is not None}


def _read(
    file: str, format_name: str | None, kv: dict[str, int | None], run: int | None, model: str
) -> tuple[Instance, Measured | None]:
    """Return a file's requests and measured times; without a format's name, it is found out.

    `kv`: the KV capacity and the tokens of a block, as `read_trace_report` takes them.
    """
    from optsched.workloads.traces import read_trace_report
    from optsched.workloads.traces.recognized import recognize

    if not os.path.isfile(named_instance(file)) or not os.path.getsize(named_instance(file)):
        raise InputError(f"{file}: found no file with anything in it; expected requests")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what matters is among the notes of the report
        form = recognize(file, run) if format_name is None else format_name
        picked = {} if run is None else {"run": run}
        instance, report = read_trace_report(form, file, **kv, **picked)

    if report.model and not _same_model(report.model, model):
        raise InputError(f"{file}: model_id: found {report.model}; expected {model} of --model")
    # Latencies that were measured without arrivals do not make a run.
    if report.unmeasured.startswith("latencies"):
        raise InputError(
            f"{file}: found {report.unmeasured}, so the measured run cannot be repeated; expected "
            f"both, or an instance of `import {form} --rate R`"
        )

    tell(f"note: {file}: taken as {form}, {instance.n} requests")
    for note in report.notes:
        tell(f"warning: {file}: {note}")

    return instance, report.measured


def _same_model(stated: str, expected: str) -> bool:
    """Return whether a benchmark's model may be the expected one."""
    try:
        return architecture(stated) == architecture(expected)
    except InputError:
        return True  # a name that a server gives itself says nothing


def _show(found: Diagnosis, server: str) -> None:
    """Print the verdict first, and then what it is made of."""
    loss = "requests that miss their SLOs" if found.of_shares else "mean latency"
    _show_doubts(found)
    attainment = found.base["slo_attainment"]
    share = None if attainment is None else 100 * attainment
    if found.room is not None:
        room = f"Room: {found.room:.2g} times the rate" if found.room > 1 else "There is no room"
        print(f"You are within your SLOs ({share:.1f} %). Nothing to change. {room}.")
    elif share is not None and share < 99 and not found.of_shares:
        # SLOs are missed (`IN_TIME` of `diagnose` is 99 %), and yet gains are not of shares: no
        # change brings anybody in time.
        print("No request is within its SLOs, whatever is changed; gains are of the mean latency.")

    if found.room is None:  # otherwise there is nothing to change
        _show_changes(found, loss)
    # Without measured times, `_show_doubts` has asked for those of the server as it is.
    if (unknown := found.untold) is not None and found.error is not None:
        span = "{1} to {2} %".format(*unknown.percents)  # the ends of the gain's range
        print(
            f"not known from this run: what {unknown.what} does ({span}); run the benchmark once "
            f"with it, five minutes, and diagnose that\n  {unknown.how}"
        )

    _show_limits(found)
    _show_twin(found, server)
    _show_table(found, loss)


def _show_doubts(found: Diagnosis) -> None:
    """Print why the answer may not be about this server."""
    if found.error is None:
        print(
            f"about: a server as fast as {found.cost_model.name}, not yours, which may be several "
            "times slower; its own times as --measured FILE make it about yours"
        )
    elif found.error > _OFF:
        print(
            f"warning: the twin is {100 * found.error:.0f} % off, and the advice may be the "
            "opposite of right; usual causes are the KV capacity, the seats (max_num_seqs), and "
            "whether the run had prefix caching"
        )


def _show_changes(found: Diagnosis, loss: str) -> None:
    """Print what to change first, and what hardware adds; or why nothing is.

    `loss`: what a change takes away, in words.
    """
    for words, change in {"first": found.first, "beyond settings": found.beyond}.items():
        if change is None:
            continue

        # The gain and the ends of its range over the cost models.
        span = "{} % ({} to {} %)".format(*change.percents)
        sure = f"worth it under {round(change.sure * found.models)} of {found.models} cost models"
        print(f"{words}: {change.what}" + ", extrapolated" * change.extrapolated)
        print(f"  {change.how}")
        print(f"gain: takes away {span} of the {loss}, {sure}")
        names = [name for name in _METRICS if found.base[name] is not None]
        moves = (f"{name} {found.base[name]:.3g} -> {change.metrics[name]:.3g}" for name in names)
        print(f"  {', '.join(moves)}")

    if found.first is not None:
        return

    # `tried` counts the changes that were to be tried, of which time may have left some out. If no
    # schedule serves half of the requests within their SLOs, these are to blame and no setting is.
    attainable = found.attainable
    if len(found.changes) < found.tried:
        print(f"first: not known; {len(found.changes)} of {found.tried} changes were tried")
    elif attainable is not None and attainable < 0.5:
        print(f"first: the SLOs; no schedule of this GPU meets those of over {attainable:.0%}")
    else:
        print("first: nothing; no change tried gains 5 %")


def _show_table(found: Diagnosis, loss: str) -> None:
    """Print a row for the run, the twin and each change that makes a difference.

    `loss`: what gains are shares of, in words.
    """
    runs = {"measured": found.measured or {}, "as it is": found.base}
    rows = [
        (name, None, None, None, *map(metrics.get, _METRICS))
        for name, metrics in runs.items()
        if metrics
    ]
    without_effect = []
    for change in found.changes:
        if change.low == change.high and change.metrics == found.base:
            without_effect.append(change.what)
            continue

        # A long name is cut. The line "first" above has that of the change to begin with in full.
        what = change.what if len(change.what) < 50 else f"{change.what[:48]}..."
        what += ", extrapolated" * change.extrapolated
        rows.append((what, *change.percents, *map(change.metrics.get, _METRICS)))

    headers = ("change", "gain\n[%]", "from\n[%]", "to\n[%]", "SLO\nattainment",
               "mean latency\n[s]", "p99 TTFT\n[s]", "p99 TPOT\n[s/token]")  # fmt: skip
    show_table(headers, rows)
    print(f"gain: of the {loss}; from, to: the range over {found.models} cost models")
    if without_effect:
        print(f"no difference: {', '.join(without_effect)}")


def _show_limits(found: Diagnosis) -> None:
    """Print how far schedules can get under the server's own limits."""
    if found.bound is None:
        return

    is_measured = (found.measured or {}).get(found.problem.goal.name) is not None
    server, side = "the run" if is_measured else "the twin", "below"
    values = found.served_value, found.value, found.bound
    reached, best, bound = (f"{value:.4g} s" for value in values)
    reached = f"a mean latency of {reached}"
    if found.of_shares:
        reached, best, bound = (f"{value:.1%}" for value in values)
        reached, side = f"{reached} within SLOs", "over"

    print(
        f"how far: {server} has {reached}; the best known has {best} ({found.found_by}), and none "
        f"{side} {bound}"
    )
    print("  of schedules with these seats, tokens of a batch and KV, under the twin's cost model")


def _show_twin(found: Diagnosis, server: str) -> None:
    """Print the server, how well the twin repeats it, and what its requests wait for."""
    is_fitted = found.error is not None
    # The server admits a request when the first chunk of its input fits, and not only all of it.
    chunk = "scheduler_reserve_full_isl=false"
    print(f"server: {server}", end="")
    if chunk in found.served and chunk not in server:  # nobody has said it
        print(f", {chunk}{' (which repeats the run better)' if is_fitted else ''}", end="")

    print()
    twin = "no measured times; the cost model is taken as it is, give or take 20 %"
    if found.error is not None:
        twin = f"repeats the run's latencies to {100 * found.error:.1f} % in the median"
        pairs = (f"{_CHECKED[name]} {a:.3g} and {b:.3g}" for name, (a, b) in found.checks.items())
        twin += f"; measured and twin: {', '.join(pairs)}"
        if "estimate" in server:
            twin += "; is the KV capacity right? Give what vLLM printed at start as --kv-capacity"

    if found.prefix_caching is not None:
        why = "which repeats the run better" if is_fitted else "as is assumed"
        twin += f"; prefix caching {'on' if found.prefix_caching else 'off'}, {why}"

    print(f"twin: {twin}")
    print(f"a step takes {', or '.join(found.shapes)}")
    total = sum(found.waits.values())
    shares = (f"{cause} {100 * wait / total:.0f} %" for cause, wait in found.waits.items())
    print(f"time goes to: {', '.join(shares)}\n")
