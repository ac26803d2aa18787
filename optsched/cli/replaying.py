"""``gpu replay``: an instance's requests on a real engine."""

from functools import partial
from typing import Annotated, Any

from optsched.cli.options import ABOVE_0, engine_settings, runs
from optsched.cli.output import LiveLine, stop_at_ctrl_c
from optsched.costs.cost import UnitCost
from optsched.costs.load import load_cost_model
from optsched.files.measured import Measured, write_measured
from optsched.files.read_write import read_instance, write_instance
from optsched.problem.errors import NoIncumbentError, UsageError
from optsched.problem.instance import Instance


@runs("optsched.engines.replay.replay")
def replay(
    instance_files: list[str],
    server: str,
    outs: list[str],
    priority: str | None = None,
    cost_model: str | None = None,
    rate_scale: Annotated[float, ABOVE_0] = 1.0,
    instance_out: str | None = None,
    time_limit: Annotated[float, ABOVE_0] = 600.0,
    vllm: list[str] | None = None,
    **options: Any,
) -> None:
    """Send an instance's requests to a real engine, and measure when their tokens come.

    Several instances are sent one after another, with one start of the engine.

    Parameters:
      instance_files INSTANCE...: Instances: JSON files, or names of shipped instances.
      server --server ADDRESS: http://HOST:PORT, or vllm:MODEL_FOLDER.
      outs -o --out FILE: Write the measured times, for `compare --measured`; one each.
      model NAME: The server's model. The default is its first.
      priority ORDER: Send priorities: arrival, prompt, output, total, work, ...
      cost_model MODEL: The cost model of --priority work.
      rate_scale X: Send requests X times as fast.
      instance_out FILE: Write the instance as sent, with its own arrivals.
      time_limit S: Give a request up after S seconds.
      vocabulary N: Token ids of the random prompts are less than N.
      Rare: priority, cost_model, vocabulary, vllm
    """
    from dataclasses import replace

    from optsched.engines.replay import connect, replay as run

    instances = [read_instance(file) for file in instance_files]
    if len(outs) != len(instances):
        raise UsageError(f"--out: found {len(outs)} files; expected {len(instances)}, one each")

    if rate_scale != 1:
        if len(instances) > 1:
            raise UsageError(f"--rate-scale: found {len(instances)} instances; expected one")
        if instance_out is None:
            raise UsageError(
                "--rate-scale: found no --instance-out; expected it, since `compare` needs the "
                "instance as it was sent"
            )

        (instance,) = instances
        # What is known of the instance was at its own arrivals.
        arrival = instance.release_times / rate_scale
        instances = [replace(instance, arrival=arrival, known=None)]
    elif instance_out is not None and len(instances) > 1:
        raise UsageError(f"--instance-out: found {len(instances)} instances; expected one")

    orders = [_priorities(instance, priority, cost_model) for instance in instances]
    if instance_out is not None:
        write_instance(instances[0], instance_out)

    # Before the first request is sent, Ctrl-C ends it at once.
    connection = connect(server, model=options.pop("model"), options=engine_settings(vllm))
    served = 0
    for instance, order, out in zip(instances, orders, outs, strict=True):
        with LiveLine() as line, stop_at_ctrl_c() as stop:
            options |= {"priority": order, "timeout_s": time_limit, "stop": stop}
            progress = partial(_show_progress, line, instance.n)
            found = run(instance, connection, progress=progress, **options)

        write_measured(found, out)
        served += _tell(instance, found, out)
        if stop.is_set():
            break  # the other instances would be sent after what the user has stopped

    if served == 0:
        raise NoIncumbentError("replay: found no request that was served; expected at least one")


def _show_progress(line: LiveLine, of: int, ended: int, failed: int) -> None:
    line.show(f"{ended} of {of} requests, {failed} failed")


def _priorities(instance: Instance, order: str | None, cost_model: str | None) -> Any:
    """Return the place of each request in an order, by predicted lengths, or None without one."""
    if order is None:
        if cost_model is not None:
            raise UsageError(f"--cost-model: found {cost_model!r}; expected --priority work too")

        return None

    from optsched.policies.runner import waiting_rank
    from optsched.policies.vllm_v1 import VllmV1
    from optsched.workloads.predict import estimates

    VllmV1(policy="priority", priority=order)  # type: ignore[arg-type]  # refuses other orders
    if order == "work" and cost_model is None:
        raise UsageError("--priority: found work without --cost-model; expected both")
    if order != "work" and cost_model is not None:
        raise UsageError(f"--priority: found {order} with --cost-model; expected work")

    cost = UnitCost() if cost_model is None else load_cost_model(cost_model)
    return waiting_rank(order, instance, estimates(instance)[0], cost)  # type: ignore[arg-type]


def _tell(instance: Instance, found: Measured, out: str) -> int:
    """Print what became of an instance's requests, and return how many were served."""
    served = instance.n - len(found.errors)
    print(f"{out}: {served} of {instance.n} requests served as the instance says")
    for request in sorted(found.errors)[:10]:
        print(f"  request {request}: {found.errors[request]}")
    if len(found.errors) > 10:
        print(f"  and {len(found.errors) - 10} more, in the file")

    return served
