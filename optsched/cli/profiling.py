"""``profile``: how long the batches of a real engine take on the device at hand."""

from __future__ import annotations

from dataclasses import replace

from optsched.cli.options import EngineSettings, Seed, argument, engine_settings, option, required
from optsched.cli.output import LiveLine, stop_at_ctrl_c
from optsched.problem.errors import UsageError


def profile(
    engine: str = argument("ENGINE", "The engine: vllm."),
    folder: str = argument("MODEL_FOLDER", "The model's folder, with config.json."),
    out: str = required("PROFILE_DIR", "The folder of the profile.", names="-o --out"),
    max_tokens: int = option("N", "Batches of up to N tokens.", 2048, min=1),
    max_requests: int = option("N", "Batches of up to N requests.", 64, min=1),
    max_kv: int = option("N", "Requests of up to N tokens.", 4096, min=1),
    repeats: int = option("N", "Measure each batch N times after a warm-up.", 5, min=1),
    setting: EngineSettings = None,
    seed: Seed = 0,
) -> None:
    """Measure how long batches take on this device, for `optsched fit`.

    The same command goes on with a profile that was begun.
    """
    from optsched.costs.devices import DEVICES
    from optsched.costs.fit import fit
    from optsched.engines.profiling import profile as run
    from optsched.problem.errors import InputError

    if engine != "vllm":
        raise UsageError(f"ENGINE: found {engine!r}; expected vllm")
    with LiveLine() as line, stop_at_ctrl_c() as stop:
        found = run(
            folder,
            out,
            max_tokens=max_tokens,
            max_requests=max_requests,
            max_kv=max_kv,
            repeats=repeats,
            options=engine_settings(setting),
            seed=seed,
            progress=lambda done, wanted, shape: line.show(f"{done} of {wanted} batches: {shape}"),
            stop=stop,
        )

    print(f"{out}: {found.measured} of {found.wanted} batches measured", end="; ")
    try:
        # Times of whole batches are not held against a device, so any will do.
        fit(out, hardware=replace(DEVICES["cpu"], name="this"))
    except InputError as error:
        print(f"too few for `optsched fit`: {error}")
    else:
        print(f"`optsched fit {out}` makes a cost model")
