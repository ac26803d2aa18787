"""Cost models by name: shipped, from a file, of data sheets, or of the log of a server's steps."""

from pathlib import Path

from optsched.costs.cost import (
    BatchCost,
    CostModel,
    UnitCost,
    cost_model_from_dict,
    models_folder,
    roofline,
    shipped_models,
)
from optsched.costs.hardware import roofline_from_spec
from optsched.problem.errors import InputError, UsageError, kind_of, meant
from optsched.problem.instance import Instance
from optsched.problem.text_files import read_toml


def load_cost_model(name_or_file: str | Path) -> BatchCost:
    """Return a shipped cost model, one from a TOML file, or a roofline.

    Parameters
    ----------
    name_or_file : str or Path
        A name of `shipped_models`, a ``.toml`` file, or ``roofline:MODEL,device=NAME,tp=N``, a
        machine that runs at its published peaks (`roofline`), with ``exponent=inf`` if wanted, or
        ``steps:FILE``, what the log of a server's steps says (`optsched.costs.fit.fit`).

    Raises
    ------
    InputError
        There is no such model or file, the file is not valid TOML, or a field is missing or wrong.
    """
    text = str(name_or_file)
    if text.startswith("roofline:"):
        return roofline(**roofline_from_spec(text))
    if text.startswith("steps:"):
        from optsched.costs.fit import fit

        return fit(text.removeprefix("steps:")).cost_model

    path = Path(text)
    if not text.endswith(".toml"):
        path = models_folder() / f"{text}.toml"
        if not path.is_file():
            hint = meant(text, shipped_models())
            raise InputError(f"cost model: {text!r} is unknown; {hint}{_shipped()}")

    data = read_toml(path, "a cost model in TOML", parse_float=str)
    try:
        return cost_model_from_dict(data, default_name=path.stem)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def cost_for(instance: Instance, cost_model: CostModel | str | Path | None) -> CostModel:
    """Return the cost model of an instance, loaded by name if needed."""
    if instance.in_rounds:
        if cost_model is not None and not isinstance(cost_model, UnitCost):
            raise UsageError(
                "cost model: found one for an instance in rounds, where every batch takes one "
                "round; expected none, or an instance in seconds"
            )

        return cost_model or UnitCost()

    if cost_model is None or isinstance(cost_model, UnitCost):
        found = "cost model: found none for an instance in seconds"
        raise UsageError(f"{found}; expected one, {_shipped()}")

    if not isinstance(cost_model, (BatchCost, str, Path)):
        found = kind_of(cost_model)
        raise UsageError(f"cost model: found {found}; expected one, its name or its file")

    return cost_model if isinstance(cost_model, BatchCost) else load_cost_model(cost_model)


def _shipped() -> str:
    shipped = ", ".join(shipped_models())
    return f"shipped are {shipped}, or give a .toml file, roofline:MODEL or steps:LOG"
