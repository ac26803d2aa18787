"""``predict``: write an instance with the predictions of a named predictor."""

from optsched.cli.options import Seed, check_outputs
from optsched.files.read_write import read_instance, write_instance
from optsched.problem.instance import Instance


def predict(instance_file: str, predictor: str, out: str, seed: Seed = 0) -> None:
    """Add predictions of output lengths, which policies then see instead of the true lengths.

    Parameters:
      predictor NAME[:key=value,...]: The predictor: oracle, interval:low=1,high=1000,
        classes:width=100, relative:x=0.1, noisy:mae=20,bias=0, trail:noise=60,
        column:file=FILE.csv, FILE.py:FUNCTION, or another one.
      out -o --out FILE: Write the instance to this file.
    """
    from optsched.workloads.predict import check_predictor, predict as run

    check_predictor(predictor)
    instance = read_instance(instance_file)
    check_outputs(out)
    predicted = run(instance, predictor, seed=seed)
    write_instance(predicted, out)
    print(f"{out}: {predicted.n} requests; {summary(predicted)}")


def summary(instance: Instance) -> str:
    """Return words for the predictions that an instance has."""
    names = {"points": "predicted", "intervals": "predicted_lower", "a forecast": "forecast"}
    kinds = [name for name, key in names.items() if getattr(instance, key) is not None]
    return " and ".join(kinds) or "no predictions"
