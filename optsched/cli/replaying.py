"""``replay``: an instance's requests on a real engine."""

from __future__ import annotations

from typing import Annotated

from optsched.cli.options import (
    EngineSettings,
    InstanceFile,
    Seed,
    above_0,
    check_outputs,
    engine_settings,
    option,
    required,
)
from optsched.cli.output import LiveLine, stop_at_ctrl_c
from optsched.problem.errors import NoIncumbentError


def replay(
    instance_file: InstanceFile,
    engine: Annotated[
        str,
        required("--engine", "ADDRESS", "http://HOST:PORT of a server, or vllm:MODEL_FOLDER."),
    ],
    out: Annotated[
        str, required("-o --out", "FILE", "Write the measured times, for `compare --measured`.")
    ],
    model: Annotated[
        str | None, option("--model", "NAME", "The server's model. The default is its first.")
    ] = None,
    rate_scale: Annotated[
        float,
        option("--rate-scale", "X", "Send requests X times as fast.", callback=above_0),
    ] = 1.0,
    instance_out: Annotated[
        str | None,
        option("--instance-out", "FILE", "Write the instance as sent, with its own arrivals."),
    ] = None,
    timeout: Annotated[
        float, option("--timeout", "S", "Give a request up after S seconds.", callback=above_0)
    ] = 600.0,
    vocabulary: Annotated[
        int, option("--vocabulary", "N", "Token ids of the random prompts are less than N.")
    ] = 10_000,
    setting: EngineSettings = None,
    seed: Seed = 0,
) -> None:
    """Send an instance's requests to a real engine, and measure when their tokens come."""
    from dataclasses import replace

    from optsched.files.measured import write_measured
    from optsched.files.read_write import read_instance, write_instance
    from optsched.files.replay import replay as run
    from optsched.problem.errors import UsageError

    instance = read_instance(instance_file)
    check_outputs(out, instance_out)
    if rate_scale != 1:
        if instance_out is None:
            raise UsageError("--rate-scale: found no --instance-out; expected it for `compare`")
        instance = replace(instance, arrival=instance.arrival / rate_scale, known=None)
    if instance_out is not None:
        write_instance(instance, instance_out)
    with LiveLine() as line, stop_at_ctrl_c() as stop:
        found = run(
            instance,
            engine,
            model=model,
            timeout_s=timeout,
            vocabulary=vocabulary,
            seed=seed,
            options=engine_settings(setting),
            progress=lambda ended, failed: line.show(
                f"{ended} of {instance.n} requests, {failed} failed"
            ),
            stop=stop,
        )
    write_measured(found, out)
    served = instance.n - len(found.errors)
    print(f"{out}: {served} of {instance.n} requests served as the instance says")
    for request in sorted(found.errors)[:10]:
        print(f"  request {request}: {found.errors[request]}")
    if len(found.errors) > 10:
        print(f"  and {len(found.errors) - 10} more, in the file")
    if served == 0:
        raise NoIncumbentError("no request was served")
