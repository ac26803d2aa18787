"""``demo``: the main commands on a shipped instance, and their report and picture."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from optsched.cli import beside
from optsched.cli.options import check_suffix
from optsched.files.outputs import check_outputs, make_folder
from optsched.problem.budget import work_time
from optsched.workloads.problem import Problem

_MODEL = "llama2-7b-a100-infermax"
_GPU = f"--cost-model {_MODEL}"
_POLICIES = "--policy vllm-v1 --policy sarathi --policy least-work --policy spf"
_SLOS = "--slo-ttft 1s --slo-tpot 50ms"
# Questions, and the commands that answer them: {0} is the folder, {1} the PNG, {2} the page.
_STEPS = (
    (
        "How far are schedulers from the best that was possible?",
        f"compare demo {_GPU} {_POLICIES} {_SLOS} --time-limit 10 --schedules-out {{0}} "
        "--json {0}/comparison.json",
    ),
    (
        "How much load do 95 % of the requests take within their SLOs?",
        f"capacity demo {_GPU} {_POLICIES} --policy paced --policy edf-decode {_SLOS} "
        "--attainment 0.95 --search 15 --schedules-out {0} --json {0}/capacity.json",
    ),
    ("As a picture, and as a page to hand on:", "plot {0}/capacity.json -o {1}"),
    ("", f"report {{0}}/comparison.json {{0}}/capacity.json {_GPU} -o {{2}}"),
)


def demo(context: typer.Context, out: Annotated[str, {"show_default": True}] = "demo.html") -> None:
    """Show what optsched does, in a minute: four commands on 300 requests of a chat in bursts.

    Parameters:
      out -o --out FILE.html: Write the report to this .html file, with a .png beside it and what it
        is made of in a folder.
    """
    check_suffix(out, "--out", ".html", ".htm")
    page = Path(out)
    folder, picture = str(page.with_name(f"{page.stem}-files")), str(page.with_suffix(".png"))
    check_outputs(picture, out)
    make_folder(folder)
    group: Any = context.find_root().command
    beside.note("demo", {"problem": Problem("demo", _MODEL)})
    begin = work_time()
    for question, template in _STEPS:
        words = template.format(*map(shlex.quote, (folder, picture, out)))
        print(f"\n{question}\n\n" if question else "", f"$ optsched {words}\n", sep="", flush=True)
        with group.make_context("optsched", shlex.split(words)) as command_context:
            group.invoke(command_context)

    print(f"\nThat took {work_time() - begin:.0f} s without compiling. Open {out}.")
    print("Next, with a benchmark's result or a trace of your server in place of demo:\n")
    print(f"  optsched diagnose demo --gpu a100-80gb --model llama2-7b {_SLOS}")
