"""Pictures: what is drawn (artists, not pixels), and the command line."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run
from matplotlib.colors import to_rgb
from matplotlib.image import imread

import optsched
from instances import MODEL, evicting, in_seconds, two_workers
from optsched.costs.cost import BatchCost
from optsched.costs.machine import Machine
from optsched.judge.timeline import PHASES, Timeline
from optsched.problem.budget import History, Progress
from optsched.problem.instance import Instance
from optsched.show import plot
from optsched.show.data import capacity_of
from optsched.show.plot import style, timelines


def new_axes() -> Any:
    return style.figure().subplots()


def labels_of(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def many() -> Timeline:
    """Return 2,000 random requests within 60 s, served by fcfs with KV for 20,000 tokens."""
    return in_seconds("fcfs", 2000, 20_000)


# --- Colours --------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
DEFICIENCIES = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}  # fmt: skip


def lab(rgb: Any) -> Any:
    """Return CIELAB of linear RGB (sRGB primaries, D65)."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def seen(colour: str, deficiency: str) -> Any:
    """Return CIELAB of a colour as somebody with the deficiency sees it."""
    srgb = np.array(to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return lab(np.array(DEFICIENCIES[deficiency]) @ linear)


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("colours", [timelines.PHASE_COLOURS.values(), style.COLOURS[:6]])
def test_colours_differ_for_the_colour_blind(colours: Any, deficiency: str) -> None:
    # 10 in CIELAB is seen at a glance; 2.3 is just noticeable.
    for one, other in itertools.combinations(colours, 2):
        distance = np.linalg.norm(seen(one, deficiency) - seen(other, deficiency))
        assert distance > 10, f"{one} and {other}: {distance:.1f}"


def test_no_two_series_have_the_same_style() -> None:
    styles = [tuple(style.series_style(k).values()) for k in range(32)]
    assert len(set(styles)) == 32


# --- Timelines ------------------------------------------------------------------------------------


def test_the_gantt_chart_holds_every_span() -> None:
    found = evicting()
    ax = plot.plot_gantt(found, ax=new_axes())
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", r"b\$b\$"]
    assert ax.get_xlabel() == "time [rounds]"
    assert labels_of(ax) == ["prefill", "decode", "evicted", "refill"]
    # From 0: a is prefilled for a round and decodes for three. b decodes for one, is evicted for
    # two, is refilled in the next and decodes for three. Extents are x, y, width, height.
    boxes = {c.get_label(): [p.get_extents().bounds for p in c.get_paths()]
             for c in ax.collections if c.get_label() in PHASES}  # fmt: skip
    assert [b[0::2] for b in boxes["evicted"]] == [(2, 2)]  # from 2, two rounds long
    assert [b[0::2] for b in boxes["decode"]] == [(1, 3), (1, 1), (5, 3)]
    assert sum(len(b) for b in boxes.values()) == len(found.span_start)


def test_more_requests_than_rows_are_drawn_by_their_states() -> None:
    """The 2,000 are more than the rows of a chart, which then is the one of states."""
    found = many()
    assert found.instance.n > timelines.ROWS_APART
    ax, states = plot.plot_gantt(found, ax=new_axes()), plot.plot_states(found, ax=new_axes())
    assert ax.get_ylabel() == "requests"
    assert labels_of(ax) == labels_of(states)


def test_however_short_a_phase_is_its_box_is_visible() -> None:
    # One round, and 1 and 1,199, of 200,000, and a picture has some 500 pixels for them all.
    instance = Instance([0, 198_800], [1, 1], [1, 1200], kv_capacity=3000)
    ax = new_axes()
    plot.plot_gantt(optsched.timeline(instance, optsched.run(instance, "fcfs").schedule), ax=ax)
    ax.legend_.remove()
    ax.figure.savefig(file := io.BytesIO(), dpi=100)
    file.seek(0)
    pixels = imread(file)[..., :3].reshape(-1, 3)
    for phase in ("prefill", "decode"):
        near = np.abs(pixels - to_rgb(timelines.PHASE_COLOURS[phase])).max(axis=1) < 0.2
        assert near.sum() > 20, phase


def test_calls_of_a_session_share_a_row() -> None:
    n = 60  # a session of 60 calls, two of two, and one request alone, which arrives first
    after = [None, *range(n - 1), None, n, None, n + 2, None]
    arrival = [None if one is not None else 5 + k for k, one in enumerate(after)]
    arrival[-1] = 0
    sizes = [1] * len(after)
    columns = {"after": after, "delay": [0 if one is None else 3 for one in after]}
    instance = Instance(arrival, sizes, sizes, kv_capacity=30, **columns)
    found = optsched.timeline(instance, optsched.run(instance, "fcfs").schedule)
    rows = timelines.rows_of(found)
    assert rows is not None
    # Rows by arrival: request n + 4 at 0 first, then the sessions of requests 0, n and n + 2.
    assert rows.tolist() == [1] * n + [2, 2, 3, 3, 0]
    ax = plot.plot_gantt(found, ax=new_axes())
    names = [t.get_text() for t in ax.get_yticklabels()]
    assert names == [found.name_of(i) for i in (n + 4, 0, n, n + 2)]
    assert ax.get_ylabel() == "sessions by arrival"
    boxes = [p.get_extents() for c in ax.collections if c.get_label() == "prefill"
             for p in c.get_paths()]  # fmt: skip
    assert sum(box.y0 < 1 < box.y1 for box in boxes) == n


def heights(ax: Any) -> dict[str, Any]:
    """Return, by label, the largest height of each layer's top."""
    return {c.get_label(): c.get_paths()[0].vertices[:, 1].max() for c in ax.collections}


def test_the_kv_picture_stacks_requests_up_to_what_the_judge_found() -> None:
    found = evicting()
    ax = plot.plot_kv(found, ax=new_axes())
    top = heights(ax)
    assert list(top) == ["a", r"b\$b\$"]
    # In the second batch both hold 3 + 2 tokens, which fill M = 10.
    assert top[r"b\$b\$"] == found.evaluation.batch_kv.max() == 10
    (capacity,) = [line for line in ax.lines if "M = " in line.get_label()]
    assert capacity.get_ydata()[0] == 10


@pytest.mark.parametrize("draw", [plot.plot_gantt, plot.plot_kv])
def test_the_ticks_of_an_axis_of_rounds_are_whole(draw: Any) -> None:
    instance = Instance([0], [1], [21], kv_capacity=30)  # 21 rounds: matplotlib takes steps of 2.5
    ax = draw(optsched.timeline(instance, optsched.run(instance, "fcfs").schedule), ax=new_axes())
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_the_kv_picture_groups_many_requests() -> None:
    found = many()
    ax = plot.plot_kv(found, groups=4, ax=new_axes())
    assert [label for label in labels_of(ax) if "to" in label and "M" not in label] == [
        "0 to 499", "500 to 999", "1000 to 1499", "1500 to 1999",
    ]  # fmt: skip
    assert ax.get_legend().get_title().get_text() == "requests by arrival"
    assert max(heights(ax).values()) == found.batch_kv.max()


def test_ten_requests_are_shown_one_by_one_under_their_names() -> None:
    # Requests are counted from 0, as in the Gantt chart, whether one by one or in groups.
    instance = Instance([0] * 10, [1] * 10, [1] * 10, kv_capacity=20)
    found = optsched.timeline(instance, optsched.run(instance, "fcfs").schedule)
    ax = plot.plot_kv(found, ax=new_axes())
    assert labels_of(ax)[:3] == ["request 0", "request 1", "request 2"]
    assert len(labels_of(ax)) == 10 + 1  # and M
    # In nine groups the first has two.
    assert found.kv_by_group(groups=9)[2] == ["0 to 1", *map(str, range(2, 10))]


def test_the_kv_picture_has_a_line_for_each_of_several_workers() -> None:
    ax = plot.plot_kv(two_workers(), ax=new_axes())
    assert labels_of(ax)[:2] == ["worker 0", "worker 1"]
    assert [line.get_ydata().max() for line in ax.lines[:2]] == [4, 4]


def test_states_stack_up_to_the_requests_present() -> None:
    found = evicting()
    top = heights(plot.plot_states(found, ax=new_axes()))
    assert max(top.values()) == 2


def test_batches_stack_up_to_their_tokens() -> None:
    found = evicting()
    ax = plot.plot_batches(found, ax=new_axes())
    # Two decodes at most; 3 + 3 of prefill in the first batch. Layers are stacked, so that the top
    # of refills, of which it has none, is as high there.
    assert heights(ax) == {"decode": 2, "prefill": 6, "refill": 6}
    assert ax.get_ylabel() == "tokens per batch"
    assert plot.plot_batches(many(), ax=new_axes()).get_ylabel() == "mean tokens per batch"


def test_batch_times_are_in_milliseconds() -> None:
    found = many()
    ax = plot.plot_batch_times(found, ax=new_axes())
    assert ax.get_ylabel() == "batch time [ms]"
    longest = 1000 * (found.batch_end - found.batch_start).max()
    assert max(heights(ax).values()) == pytest.approx(longest)


# --- Policies -------------------------------------------------------------------------------------


def test_a_distribution_rises_to_one_through_every_request() -> None:
    found = evicting()
    ax = plot.plot_distribution({"p": found.evaluation}, ax=new_axes())
    (line,) = ax.get_lines()
    assert line.get_xdata().tolist() == [4, 4, 8]  # latencies 4 and 8
    assert line.get_ydata().tolist() == [0, 0.5, 1]
    assert ax.get_xlabel() == "latency [rounds]"


def test_tpot_in_seconds_is_in_milliseconds_per_token() -> None:
    found = many()
    ax = plot.plot_distribution({"fcfs": found.evaluation}, "tpot", ax=new_axes())
    assert ax.get_xlabel() == "time per token [ms/token]"
    (line,) = ax.get_lines()
    assert line.get_xdata()[-1] == pytest.approx(1000 * np.nanmax(found.evaluation.tpot))
    # 2,000 points of a line at most, and 1 where it begins.
    assert len(line.get_xdata()) <= 2001
    with pytest.raises(ValueError, match="expected one of latency, ttft, tpot"):
        plot.plot_distribution({}, "speed", ax=new_axes())


def test_a_comparison_is_ranked_between_bound_and_best() -> None:
    ax = plot.plot_comparison(
        [("slow", 9.0), ("fast", 6.0)], best_known=6.0, bound=4.5, clairvoyant=["fast"],
        ax=new_axes(),
    )  # fmt: skip
    assert [t.get_text() for t in ax.get_yticklabels()] == ["fast", "slow"]
    assert [bar.get_width() for bar in ax.containers[0]] == [6, 9]
    assert [line.get_xdata()[0] for line in ax.get_lines()] == [6, 4.5]
    assert "1.500 × best" in [t.get_text().strip() for t in ax.texts]
    # Where the best is proved optimal the ratio is rounded, else rounded down.
    for bound, words in ((6.0, "1.334 × best"), (4.5, "1.333 × best")):  # 8.003 / 6 = 1.3338...
        ax = plot.plot_comparison([("a", 8.003)], best_known=6.0, bound=bound, ax=new_axes())
        assert [t.get_text().strip() for t in ax.texts] == [words]


def test_splits_say_what_colours_and_marks_are_and_have_plain_numbers() -> None:
    rows = [("1p1d", 2.0, 30.0, "best"), ("2m", 40.0, 50.0, "proved worse than the best found")]
    ax = plot.plot_splits(rows, ax=new_axes())
    # The axis is logarithmic where the largest value is more than three times the least: 50 > 3 *
    # 2, and not 5 > 3 * 2.
    assert ax.get_yscale() == "log"
    assert "10" in [t.get_text() for t in ax.get_yticklabels()]
    said = {t.get_text() for t in ax.get_legend().get_texts()}
    assert said == {"best", rows[1][3], "bound", "found", "best found: 30"}
    assert plot.plot_splits([("2m", 2.0, 5.0, "best")], ax=new_axes()).get_yscale() == "linear"


def test_a_policy_outside_the_bound_s_model_gets_no_ratio_in_a_picture_either() -> None:
    ax = plot.plot_comparison(
        [("slow", 9.0), ("fast", 6.0)], best_known=6.0, bound=6.0, outside=["slow"], ax=new_axes()
    )
    assert [t.get_text().strip() for t in ax.texts] == ["1.000 × best", "no ratio"]


def test_the_words_beside_the_bars_stay_within_the_frame() -> None:
    import matplotlib.pyplot as plt

    with plt.rc_context({"backend": "agg"}):  # axes of one's own are laid out tightest
        ax = plot.plot_comparison(
            [("mc-sf", 73.0), ("mc-benchmark", 84.0), ("sarathi", 85.0)],
            best_known=67.0, bound=67.0, clairvoyant=["mc-sf"],
        )  # fmt: skip
        ax.figure.canvas.draw()
        right = ax.get_window_extent().x1
        assert all(text.get_window_extent().x1 < right for text in ax.texts)
        plt.close(ax.figure)


def test_progress_draws_incumbent_and_bound() -> None:
    """An incumbent is drawn from when there is one, from states as from columns of a file."""
    states = [Progress(0.0, None, 5.0), Progress(1.0, 9.0, 5.0), Progress(2.0, 8.0, 8.0)]
    ax = plot.plot_progress(states, ax=new_axes())
    incumbent, bound = ax.get_lines()
    assert incumbent.get_xydata().tolist() == [[1, 9], [2, 8]]
    assert bound.get_xydata().tolist() == [[0, 5], [1, 5], [2, 8]]
    columns = {"elapsed_s": [0.0, 1.0, 2.0], "incumbent": [None, 9.0, 8.0], "bound": [5, 5, 8]}
    again = plot.plot_progress(columns, ax=new_axes())
    assert again.get_lines()[0].get_xydata().tolist() == [[1, 9], [2, 8]]


def test_a_solve_keeps_its_progress() -> None:
    """The last state is the answer, times rise, and columns of the file are equally long."""
    result = optsched.solve(optsched.read_instance("tiny"))
    last = result.progress[-1]
    assert (last.incumbent, last.bound) == (result.value, result.bound)
    assert [s.elapsed_s for s in result.progress] == sorted(s.elapsed_s for s in result.progress)
    columns = result.to_dict()["progress"]
    assert columns["incumbent"][-1] == result.value
    assert len({len(column) for column in columns.values()}) == 1


def test_a_history_keeps_changes_only_and_never_too_many() -> None:
    # The value falls every second time, from 100 to 51: fifty changes, of which at most ten stay.
    told: list[Progress] = []
    history = History(told.append, max_kept=10)
    for k in range(100):
        history(Progress(float(k), 100.0 - k // 2, None))
    assert len(told) == 100
    kept = history.until(100.0, 50.0, 50.0)
    # At most ten changes and the end are 11, so the limit of 12 has one to spare.
    assert len(kept) <= 12
    values = [s.incumbent for s in kept if s.incumbent is not None]
    assert values == sorted(values, reverse=True)
    assert kept[-1] == Progress(100.0, 50.0, 50.0)


def test_text_from_outside_is_no_mathematics() -> None:
    assert style.plain("a $x$\nb") == r"a \$x\$ b"
    assert len(style.plain("x" * 100)) == 48  # what is longer is cut to 48 characters
    found = evicting()
    ax = plot.plot_distribution({"_mine.py:Policy": found.evaluation}, ax=new_axes())
    assert labels_of(ax) == [" _mine.py:Policy"]  # legends leave out what begins with _


def test_files_are_the_same_bytes_for_the_same_figure(tmp_path: Path) -> None:
    for suffix in style.SUFFIXES:
        files = []
        for name in ("one", "two"):
            canvas = style.figure()
            plot.plot_kv(evicting(), ax=canvas.subplots())
            style.save(canvas, tmp_path / f"{name}{suffix}")
            files.append((tmp_path / f"{name}{suffix}").read_bytes())
        assert files[0] == files[1]


# --- Command line ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of answers with more: in seconds, a bound's prices, an experiment."""
    place = tmp_path_factory.mktemp("plots")
    shutil.copytree(answers, place, dirs_exist_ok=True)
    run(
        "simulate", "tiny-seconds", "--policy", "vllm", "--cost-model", MODEL,
        "--schedule-out", place / "seconds.json", "--json", place / "seconds-result.json",
    )  # fmt: skip
    run("bound", "tiny", "--time-limit", 1, "--certificate-out", place / "certificate.json",
        "--method", "dual", "--json", place / "bound.json")  # fmt: skip
    run("experiment", "infermax-csp", "--set", "prompt=1,64", "--out", place / "csp")
    return place


@pytest.mark.parametrize(
    ("source", "kind"),  # a file or an experiment's folder, and --kind, if any
    [
        ("best.json", None),
        *(("best.json", kind) for kind in ("gantt", "states", "kv", "batches", "ttft", "tpot")),
        ("result.json", None),
        ("result.json", "kv"),
        ("comparison.json", None),
        ("comparison.json", "latency"),
        ("seconds.json", None),
        ("seconds-result.json", None),
        ("bound.json", None),
        ("certificate.json", None),
        ("csp", None),
        ("csp", "claims"),
    ],
)
def test_every_format_has_its_pictures(folder: Path, source: str, kind: str | None) -> None:
    out = folder / "out.png"
    out.unlink(missing_ok=True)
    options = [] if kind is None else ["--kind", kind]
    run("plot", folder / source, *options, "-o", out)
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("best.json", ["--kind", "progress"], "for a schedule; expected one of gantt, states, kv"),
        ("result.json", ["--kind", "x"], "for this result; expected one of progress, gantt"),
        (
            "comparison.json",
            ["--kind", "kv"],
            "for a comparison; expected one of policies, latency",
        ),
        ("certificate.json", ["--kind", "kv"], "for a certificate; expected one of prices"),
        ("csp", ["--kind", "kv"], "experiment infermax-csp; expected one of makespan"),
        ("all", [], "results.sqlite"),
        ("nothing.json", [], "no such file"),
        ("best.json", ["--instance", "tiny-seconds"], "the instance that"),
    ],
)
def test_a_wrong_kind_or_file_is_one_line(
    folder: Path, source: str, options: list[str], message: str
) -> None:
    text = run("plot", folder / source, *options, "-o", folder / "x.png", status=2)
    assert message in text
    assert text.count("\n") == 1


def test_an_unknown_suffix_is_an_error_before_work(folder: Path) -> None:
    text = run("plot", folder / "best.json", "-o", folder / "x.gif", status=2)
    assert "expected a name ending in .png, .svg, .pdf" in text


def test_a_schedule_of_an_unknown_instance_asks_for_it(tmp_path: Path) -> None:
    run("generate", "jaillet-model-1", "--set", "n=5", "-o", tmp_path / "five.json")
    run("simulate", tmp_path / "five.json", "--policy", "mc-sf", "--schedule-out",
        tmp_path / "s.json")  # fmt: skip
    text = run("plot", tmp_path / "s.json", "-o", tmp_path / "x.png", status=2)
    assert "needs the instance" in text
    run("plot", tmp_path / "s.json", "--instance", tmp_path / "five.json", "-o", tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")


def test_a_comparison_without_schedules_has_no_distributions(folder: Path, tmp_path: Path) -> None:
    data = json.loads((folder / "comparison.json").read_text())
    for row in [*data["policies"], data["best"]]:
        row.pop("schedule", None)
    (tmp_path / "c.json").write_text(json.dumps(data))
    words = ("plot", tmp_path / "c.json", "--kind", "ttft", "-o", tmp_path / "x.png")
    assert "compare --schedules-out" in run(*words, status=2)


# --- Load -----------------------------------------------------------------------------------------


def test_no_schedule_is_in_the_region_below_the_bound_at_any_load() -> None:
    fcfs, bound, best = [(0.5, 2.0), (1.0, 9.0)], [(0.5, 1.0), (1.0, 4.0)], [(0.5, 1.5), (1.0, 5.0)]
    ax = plot.plot_load({"fcfs": fcfs, "absent": []}, bound, best, ax=new_axes())
    assert labels_of(ax) == ["fcfs", "best known schedule", "no schedule"]
    drawn = [list(zip(*line.get_data(), strict=True)) for line in ax.get_lines()]
    assert drawn == [fcfs, best]
    # The region reaches from the foot of the picture to the bound, which is 4 at most.
    (region,) = ax.collections
    corners = region.get_paths()[0].vertices
    assert corners[:, 1].max() == 4.0
    assert corners[:, 1].min() == ax.get_ylim()[0]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_kv_is_drawn_under_the_capacity_of_the_machines() -> None:
    """Machines hold 7 and 9 tokens; the instance's 50 are nowhere."""
    instance = Instance([0.0, 0.0], [3, 3], [2, 2], kv_capacity=50, time_unit="second")
    cost = BatchCost("flat", 1, {"base": "1000"})
    machines = (Machine(cost_model=cost, kv_capacity=7), Machine(cost_model=cost, kv_capacity=9))
    schedule = optsched.run(
        optsched.Problem(instance, machines), "fcfs:workers=2,router=round-robin"
    ).schedule
    made = optsched.timeline(optsched.Problem(instance, machines), schedule)

    def lines(worker: int | None) -> list[str]:
        labels = plot.plot_kv(made, new_axes(), worker=worker).get_legend_handles_labels()[1]
        return [label for label in labels if label.startswith("M = ")]

    assert lines(None) == ["M = 7 tokens", "M = 9 tokens"]
    assert lines(0) == ["M = 7 tokens"]
    assert lines(1) == ["M = 9 tokens"]
    alone = optsched.run(optsched.Problem(instance, machines[:1]), "fcfs").schedule
    one = optsched.timeline(optsched.Problem(instance, machines[:1]), alone)
    assert plot.plot_kv(one, new_axes()).get_ylim()[1] < 50  # the axis ends near M = 7


def test_the_axis_of_a_capacity_has_requests_per_second_where_they_are_known() -> None:
    # Four requests a second at scale 1, so that scales of 0.5 and 1.5 are 2 and 6 a second.
    policies = [{"policy": "fcfs", "points": [[0.5, 1.0], [1.0, 0.8]]}]
    data = {"searched": "rate_scale", "time_unit": "second", "requests_per_second": 4.0,
            "policies": policies, "attainment": 0.9, "impossible_rate_scale": 1.5}  # fmt: skip
    drawn = capacity_of(data)
    assert drawn["policies"] == {"fcfs": [(2.0, 1.0), (4.0, 0.8)]}
    assert drawn["impossible"] == 6.0
    assert plot.plot_capacity(**drawn).get_xlabel() == "requests per second"
    assert (
        "multiple" in plot.plot_capacity(**capacity_of({**data, "time_unit": "round"})).get_xlabel()
    )
