"""A task with a floor: ``evaluate(path)`` scores a scheduler on instances with proved bounds.

OpenEvolve and what calls evaluators as it does take this file as it is. `task.json` beside it says
how the scheduler in the program is called, on which instances of optsched's library it is scored,
and within how many seconds each.
"""

import json
from pathlib import Path

import optsched

TASK = json.loads((Path(__file__).parent / "task.json").read_text(encoding="utf-8"))


def evaluate(program_path: str) -> dict[str, float | str]:
    """Score the scheduler of a program, which runs in a process of its own.

    `combined_score`: the floor over the score; no scheduler has more than 1, and one that fails
    has 0. `score`: the geometric mean of its values over those of first come first served, not
    there if it failed. `floor` and `best_known`: the same of the proved bounds, and of schedules
    that exist. `failed`: on how many instances it failed. `counterexample`: JSON of the instance to
    look at first, with why it failed and the fewest first requests that show it, or else of the one
    where it is farthest from the best known schedule.
    """
    spec = f"{program_path}:{TASK['scheduler']}"
    found = optsched.score(spec, TASK["library"], time_limit_s=TASK["time_limit_s"])
    scored = {} if found.value is None else {"score": found.value}
    return scored | {
        "combined_score": found.reached,
        "floor": found.bound,
        "best_known": found.best_known,
        "failed": float(sum(row.value is None for row in found.rows)),
        "counterexample": json.dumps(found.counterexample()),
    }
