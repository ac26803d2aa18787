"""``gpu fit`` and ``gpu roofline``: cost models from profiles or from data sheets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from optsched.cli.options import ABOVE_0, AT_LEAST_1, key_values, runs
from optsched.cli.output import emit_json, show_table, tell
from optsched.costs.batch import TERMS
from optsched.costs.cost import BatchCost
from optsched.costs.load import load_cost_model
from optsched.costs.model_file import to_toml
from optsched.files.read_write import write_bytes
from optsched.problem.errors import UsageError

if TYPE_CHECKING:
    from optsched.costs.fit import Fit


@runs("optsched.costs.fit.fit")
def fit(
    profile_dir: str,
    model: str | None = None,
    tensor_parallel: int | None = None,
    gpu: str | None = None,
    only: list[str] | None = None,
    link_gb_s: Annotated[float | None, ABOVE_0] = None,
    beside: list[str] | None = None,
    out: str | None = None,
    plot_out: str | None = None,
    json_out: str | None = None,
    **options: Any,
) -> None:
    """Fit a cost model to a profile, or to the log of a server's steps.

    It is a profile of Vidur, Splitwise, AIConfigurator or LLMServingSim, the steps.csv of
    `optsched gpu profile`, or a file: vLLM's log with --enable-logging-iteration-details, forward
    pass metrics as JSON lines, or a .csv of steps.

    Parameters:
      profile_dir PROFILE_DIR: The folder of profiles, or the log.
      model NAME: The model: a name, or a config.json or its folder. By default the one that the
        files or the folder name.
      tensor_parallel N: The GPUs that share every layer. By default the profile's, or 1.
      gpu NAME: The GPU, whose peaks no time may beat: a name, a .toml file, or KEY=VALUE,... of its
        peaks. By default the one that files name, or a100-80gb.
      only COLUMN=VALUE: Use the rows that have a value (repeatable).
      partial: Accept a profile without attention, which then costs nothing.
      link_gb_s GB/S: The bandwidth between GPUs, both ways. By default the peak.
      name NAME: The name of the cost model.
      held_out SHARE: The share of shapes that are held out for testing.
      target ERROR: The mean relative error that is wanted.
      beside MODEL: Evaluate another cost model on the same rows (repeatable).
      out -o --out FILE: Write the cost model to this .toml file.
      plot_out FILE: Plot predicted against measured times.
      Rare: only, partial, link_gb_s, held_out, target, beside
    """
    if plot_out is not None:
        from optsched.show.plot.style import check_suffix

        check_suffix(plot_out)

    from optsched.costs.fit import errors_of, fit as run

    others = [load_cost_model(other) for other in beside or []]
    found = run(
        profile_dir,
        model=model,
        hardware=gpu,
        link_gb_s=link_gb_s,
        tensor_parallel=tensor_parallel,
        only=key_values(only, "--only"),
        **options,
    )
    if others and not found.profile.tables:
        raise UsageError(
            "--beside: found a profile that is tabulated and holds no rows out; expected none"
        )

    profile = found.profile
    tell(
        f"fit: taken as {profile.shape.name} on {profile.hardware.name}, tensor parallel "
        f"{profile.tensor_parallel}, 16-bit"
    )
    for part in profile.missing:
        tell(f"fit: {part}: MISSING, costs nothing")
    for note in profile.notes:
        tell(f"fit: {note}")

    compared = errors_of(found, [found.cost_model, *others]) if others else []
    if out is not None:
        write_bytes(found.to_toml().encode(), out)
    if plot_out is not None:
        from optsched.show.plot import plot_fit, style

        canvas = style.figure((6.0, 5.0))
        plot_fit(found, canvas.subplots())
        style.save(canvas, plot_out)

    data = {
        "format": "optsched-fit",
        "version": 1,
        "cost_model": _model_dict(found.cost_model),
        "device": profile.hardware.name,
        "model": profile.shape.name,
        "tensor_parallel": profile.tensor_parallel,
        "notes": list(profile.notes),
        "missing": list(profile.missing),
        "seed": options["seed"],
        "target": options["target"],
        "operators": found.rows(),
        "rejected": [{"file": r.file, "line": r.line, "reason": r.reason} for r in found.rejected],
        "against": compared,
    }
    if not emit_json(data, json_out):
        _show_fit(found, compared, options["target"])


def _percents(row: dict[str, Any], *names: str) -> list[float | None]:
    """Return some shares of a row in percent."""
    return [None if row[name] is None else 100 * row[name] for name in names]


def _show_fit(found: Fit, compared: list[dict[str, Any]], target: float) -> None:
    """Print the errors of each operator, the model, other models, and rows that were rejected.

    `compared`: the rows of `errors_of`, this model's first. `target`: the error that is wanted.
    """
    errors = ("mean_error", "median_error", "p95_error")
    titles = ("mean\nerror [%]", "median\nerror [%]", "p95\nerror [%]")
    rows = []
    for row in found.rows():
        verdict = "ok"
        if not row["reached"]:
            # Without an error, no row is within the range of validity.
            verdict = "outside" if row["mean_error"] is None else f"above {target:.0%}"
        sizes = (row["rows"], row["held_out"], row["outside"])
        rows.append((row["operator"], *sizes, *_percents(row, *errors), row["r2"], verdict))

    headers = ("operator", "rows", "held\nout", "outside\nrange", *titles, "R2", "verdict")
    show_table(headers, rows, text_columns=(0, 8))
    if not found.profile.grids:
        print("errors are those of held-out rows within the range of validity")
    else:
        print("errors are those of values that were left out and interpolated")

    _show_model(found.cost_model)
    if compared:
        print()
        other_headers = ("cost model", "operator", "held-out\nrows", *titles, "bias [%]")
        cells = [
            (row["model"], row["operator"], row["rows"], *_percents(row, *errors, "bias"))
            for row in compared
        ]
        show_table(other_headers, cells, text_columns=(0, 1))

    if found.rejected:
        device = found.profile.hardware.name
        print(f"\n{len(found.rejected)} rows rejected, because they beat {device}:")
        for rejected in found.rejected[:10]:
            print(f"  {rejected}")
        if len(found.rejected) > 10:
            print(f"  and {len(found.rejected) - 10} more (--json lists all)")


def roofline(
    model: str,
    gpu: str = "a100-80gb",
    tensor_parallel: int = 1,
    usable: float = 0.9,
    request_tokens: Annotated[int | None, AT_LEAST_1] = None,
    out: str | None = None,
    json_out: str | None = None,
) -> None:
    """Make a cost model from published peaks alone.

    It says how many tokens of KV fit beside the weights, too. Elsewhere, --cost-model
    roofline:MODEL gives the same.

    Parameters:
      model MODEL: The model, for example llama2-7b, or a config.json or its folder.
      usable SHARE: The share of the memory that weights and KV may use.
      request_tokens N: The KV capacity for requests of N tokens, where attention slides.
      out -o --out FILE: Write the cost model to this .toml file.
    """
    from optsched.costs.cost import roofline as run

    cost = run(
        model, gpu, tensor_parallel=tensor_parallel, usable=usable, request_tokens=request_tokens
    )
    if out is not None:
        write_bytes(to_toml(cost).encode(), out)
    if not emit_json(_model_dict(cost), json_out):
        _show_model(cost)
        print(f"\n{cost.provenance}")


def _model_dict(cost: BatchCost) -> dict[str, Any]:
    """Return a cost model as an object of JSON."""
    window = {} if cost.kv_window is None else {"kv_window": str(cost.kv_window)}
    return {
        "name": cost.name,
        "sha256": cost.sha256,
        "layers": cost.layers,
        "coefficients_ms_per_layer": {k: float(v) for k, v in cost.coefficients.items()},
        "kv_capacity_tokens": cost.kv_capacity_tokens,
        **window,
        "valid": dict(cost.valid),
        "provenance": cost.provenance,
    }


def _show_model(cost: BatchCost) -> None:
    """Print the coefficients of a cost model, and what it is valid for."""
    capacity = f"{cost.kv_capacity_tokens} tokens"
    if cost.kv_window is not None:
        window, sliding, layers = cost.kv_window
        capacity += f" in all layers; {sliding} of {layers} keep the last {window} of a request"

    print(f"\n{cost.name}: {cost.layers} layers, KV capacity {capacity}")
    show_table(
        ("coefficient", "value", "unit"),
        [(key, text, TERMS[key]) for key, text in cost.coefficients.items()],
        text_columns=(0, 1, 2),
    )
    if cost.table is not None:
        grids = [" x ".join(map(str, grid.values.shape)) for grid in cost.table.grids]
        print(
            f"batches are priced by tables of {', '.join(grids)} values; the coefficients are a "
            f"linear approximation, and bounds take {len(cost.table.minorants)} minorants"
        )

    limits = ", ".join(f"{key} {value:g}" for key, value in sorted(cost.valid.items()))
    print(f"valid for: {limits}")
