"""``fit``, ``roofline`` and ``kv-capacity``: cost models from profiles and from data sheets."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optsched.cli.options import JsonOut, Seed, check_outputs
from optsched.cli.output import emit_json, show_table

if TYPE_CHECKING:
    from optsched.costs.cost import BatchCost

Out = Annotated[
    str | None,
    typer.Option("-o", "--out", metavar="FILE.toml", help="Write the cost model."),
]
DeviceName = Annotated[
    str, typer.Option("--device", metavar="NAME", help="Device whose peaks nothing may beat.")
]
Degree = Annotated[
    int, typer.Option("--tensor-parallel", metavar="N", help="Devices that share every layer.")
]
Usable = Annotated[
    float, typer.Option("--usable", metavar="SHARE", help="Share of memory for weights and KV.")
]


def fit(
    profile_dir: Annotated[
        str,
        typer.Argument(metavar="PROFILE_DIR", show_default=False, help="Folder of profiles."),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Model profiled; default: the folder's name."),
    ] = None,
    tensor_parallel: Degree = 1,
    device: DeviceName = "a100-80gb",
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the cost model.")
    ] = None,
    held_out: Annotated[
        float, typer.Option("--held-out", metavar="SHARE", help="Share of shapes kept for testing.")
    ] = 0.2,
    target: Annotated[
        float, typer.Option("--target", metavar="ERROR", help="Mean relative error wanted.")
    ] = 0.08,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="NAME|FILE.toml",
            help="Judge another cost model on the same rows (repeatable).",
        ),
    ] = None,
    seed: Seed = 0,
    out: Out = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Plot measured against predicted."),
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Fit a cost model to profiles: Vidur's columns, Splitwise's, or aiconfigurator's."""
    check_outputs(out, plot, json_out)
    if plot is not None:
        from optsched.show.plot.style import check_suffix

        check_suffix(plot)
    from optsched.costs.cost import load_cost_model
    from optsched.costs.fit import errors_of
    from optsched.costs.fit import fit as run
    from optsched.files.read_write import write_bytes

    others = [load_cost_model(other) for other in against or []]
    found = run(
        profile_dir,
        model=model,
        tensor_parallel=tensor_parallel,
        hardware=device,
        name=name,
        held_out=held_out,
        target=target,
        seed=seed,
    )
    for note in found.profile.notes:
        print(f"fit: {note}", file=sys.stderr)
    compared = errors_of(found, [found.cost_model, *others]) if others else []
    if out is not None:
        write_bytes(found.to_toml().encode(), out)
    if plot is not None:
        from optsched.show.plot import plot_fit, style

        canvas = style.figure((6.0, 5.0))
        plot_fit(found, canvas.subplots())
        style.save(canvas, plot)
    cost = found.cost_model
    data = {
        "format": "optsched-fit",
        "version": 1,
        "cost_model": _model_dict(cost),
        "device": device,
        "seed": seed,
        "target": target,
        "operators": found.rows(),
        "rejected": [{"file": r.file, "line": r.line, "reason": r.reason} for r in found.rejected],
        "against": compared,
    }
    emit_json(data, json_out)
    if json_out == "-":
        return
    show_table(
        ("operator", "rows", "held\nout", "outside\nrange", "mean\nerror [%]", "median\nerror [%]",
         "p95\nerror [%]", "R2", "verdict"),
        [
            (r["operator"], r["rows"], r["held_out"], r["outside"],
             *(None if r[key] is None else 100 * r[key]
               for key in ("mean_error", "median_error", "p95_error")), r["r2"],
             "ok" if r["reached"] else "outside" if r["mean_error"] is None
             else f"above {target:.0%}")
            for r in found.rows()
        ],
        text_columns=(0, 8),
    )  # fmt: skip
    print("errors are of held-out rows within the range of validity")
    _show_model(cost)
    if compared:
        print()
        show_table(
            ("cost model", "operator", "held-out\nrows", "mean\nerror [%]", "median\nerror [%]",
             "p95\nerror [%]", "bias [%]"),
            [
                (c["model"], c["operator"], c["rows"], 100 * c["mean_error"],
                 100 * c["median_error"], 100 * c["p95_error"], 100 * c["bias"])
                for c in compared
            ],
            text_columns=(0, 1),
        )  # fmt: skip
    if found.rejected:
        print(f"\n{len(found.rejected)} rows rejected, because they beat {device}:")
        for row in found.rejected[:10]:
            print(f"  {row}")
        if len(found.rejected) > 10:
            print(f"  and {len(found.rejected) - 10} more (--json lists all)")


def roofline(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", show_default=False, help="For example llama2-7b.")
    ],
    device: DeviceName = "a100-80gb",
    tensor_parallel: Degree = 1,
    usable: Usable = 0.9,
    out: Out = None,
    json_out: JsonOut = None,
) -> None:
    """Make a cost model from published peaks alone (also --cost-model roofline:MODEL)."""
    check_outputs(out, json_out)
    from optsched.costs.model_file import to_toml
    from optsched.costs.roofline import roofline as run
    from optsched.files.read_write import write_bytes

    cost = run(model, device, tensor_parallel=tensor_parallel, usable=usable)
    if out is not None:
        write_bytes(to_toml(cost).encode(), out)
    emit_json(_model_dict(cost), json_out)
    if json_out != "-":
        _show_model(cost)
        print(f"\n{cost.provenance}")


def kv_capacity(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Take weights and KV from a known model."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="Take the memory from a known device."),
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", metavar="GIB", help="Memory of one device.")
    ] = None,
    model_gib: Annotated[
        float | None, typer.Option("--model-gib", metavar="GIB", help="Weights, all devices.")
    ] = None,
    bytes_per_token: Annotated[
        float | None, typer.Option("--bytes-per-token", metavar="N", help="KV of one token.")
    ] = None,
    tensor_parallel: Degree = 1,
    usable: Usable = 0.9,
    json_out: JsonOut = None,
) -> None:
    """Tell how many tokens of KV fit beside the weights."""
    check_outputs(json_out)
    from optsched.costs import hardware
    from optsched.problem.errors import UsageError

    shape = hardware.architecture(model) if model is not None else None
    memory = memory_gib
    if memory is None and device is not None:
        memory = hardware.device(device).memory_gib
    weights = 2**30 * model_gib if model_gib is not None else None
    each = bytes_per_token
    if shape is not None:
        weights = shape.weight_bytes if weights is None else weights
        each = shape.kv_bytes if each is None else each
    if memory is None or weights is None or each is None:
        raise UsageError(
            "kv-capacity: --device or --memory-gib, and --model or both --model-gib and "
            "--bytes-per-token, are needed"
        )
    tokens = hardware.kv_capacity(memory, weights, each, usable=usable, devices=tensor_parallel)
    data = {
        "kv_capacity_tokens": tokens, "memory_gib": memory, "model_bytes": weights,
        "bytes_per_token": each, "usable": usable, "devices": tensor_parallel,
    }  # fmt: skip
    emit_json(data, json_out)
    if json_out != "-":
        print(f"{tokens} tokens")


def _model_dict(cost: BatchCost) -> dict[str, Any]:
    return {
        "name": cost.name,
        "sha256": cost.sha256,
        "layers": cost.layers,
        "coefficients_ms_per_layer": {k: float(v) for k, v in cost.coefficients.items()},
        "kv_capacity_tokens": cost.kv_capacity_tokens,
        "valid": dict(cost.valid),
        "provenance": cost.provenance,
    }


def _show_model(cost: BatchCost) -> None:
    from optsched.costs.model_file import UNITS

    print(f"\n{cost.name}: {cost.layers} layers, KV capacity {cost.kv_capacity_tokens} tokens")
    show_table(
        ("coefficient", "value", "unit"),
        [(key, text, UNITS[key]) for key, text in cost.coefficients.items()],
        text_columns=(0, 1, 2),
    )
    limits = ", ".join(f"{key} {value:g}" for key, value in sorted(cost.valid.items()))
    print(f"valid for: {limits}")
