"""``gpu profile``: how long the batches of a real engine take on the device at hand."""

from dataclasses import replace
from functools import partial
from typing import Any

from optsched.cli.options import engine_settings, runs
from optsched.cli.output import LiveLine, stop_at_ctrl_c
from optsched.costs.devices import DEVICES
from optsched.problem.errors import InputError, UsageError


@runs("optsched.engines.profiling.profile")
def profile(
    engine: str, folder: str, out: str, vllm: list[str] | None = None, **options: Any
) -> None:
    """Measure how long batches take on this device, for `optsched gpu fit`.

    The same command goes on with a profile that was begun.

    Parameters:
      engine ENGINE: The engine: vllm.
      folder MODEL_FOLDER: The model's folder, with config.json.
      out -o --out DIR: The folder of the profile.
      max_tokens N: Batches of up to N tokens.
      max_requests N: Batches of up to N requests.
      max_kv N: Requests of up to N tokens.
      repeats --runs N: Measure each batch N times after a warm-up.
    """
    from optsched.costs.fit import fit
    from optsched.engines.profiling import profile as run

    if engine != "vllm":
        raise UsageError(f"ENGINE: found {engine!r}; expected vllm")
    with LiveLine() as line, stop_at_ctrl_c() as stop:
        options |= {"options": engine_settings(vllm), "stop": stop}
        found = run(folder, out, progress=partial(line.show_count, what="batches"), **options)

    print(f"{out}: {found.measured} of {found.wanted} batches measured", end="; ")
    try:
        # Times of whole batches are not held against a device, so any will do.
        fit(out, hardware=replace(DEVICES["cpu"], name="this"))
    except InputError as error:
        print(f"too few for `optsched gpu fit`: {error}")
    else:
        print(f"`optsched gpu fit {out}` makes a cost model")
