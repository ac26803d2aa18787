"""Figures that experiments declare: what they draw, and that files lie beside the results."""

from __future__ import annotations

from pathlib import Path

import pytest
from optsched_studies.drawing import Figure, plot_bars, plot_histogram

from optsched.experiments import Claim, Experiment, experiments
from optsched.experiments.figures import numeric, write_figures
from optsched.experiments.runner import run_experiment
from optsched.show.plot.rows import plot_claims, plot_lines
from optsched.show.plot.style import figure


def experiment(*figures: Figure) -> Experiment:
    """Return an experiment without trials that declares these figures."""
    return Experiment(
        name="toy", summary="a toy", paper="nobody", parameters={}, trials=lambda *_: [],
        run=lambda row: row, summarize=lambda rows: [], columns={"x": "x, tokens", "y": "y, s"},
        figures=figures,
    )  # fmt: skip


# In both places: of "a" 2 and 4 at x = 1 and 8 at x = 2; of "b" 1 and 2.
ROWS = [
    {"x": x, "y": y, "kind": kind, "where": place}
    for place in ("here", "there")
    for x, y, kind in [(1, 2.0, "a"), (1, 4.0, "a"), (2, 8.0, "a"), (1, 1.0, "b"), (2, 2.0, "b")]
]


def test_a_line_goes_through_the_means_and_its_band_from_least_to_most() -> None:
    """Two series of ROWS, each with a line of its own colour; the band of "a" begins at its
    least value."""
    ax = plot_lines(ROWS, "x", "y", series="kind", ax=figure().subplots())
    first, second = ax.get_lines()
    assert first.get_label() == "a"
    assert first.get_xydata().tolist() == [[1, 3], [2, 8]]  # (2 + 4) / 2 = 3
    assert second.get_xydata().tolist() == [[1, 1], [2, 2]]
    (band, _) = ax.collections
    assert band.get_paths()[0].vertices[:, 1].min() == 2  # the least at x = 1
    assert first.get_color() != second.get_color()


def test_one_series_divides_the_others() -> None:
    ax = plot_lines(ROWS, "x", "y", series="kind", over="b", ax=figure().subplots())
    (line,) = ax.get_lines()
    assert line.get_xydata().tolist() == [[1, 3], [2, 4]]  # 3 / 1 and 8 / 2


def test_several_columns_are_several_series_with_their_words() -> None:
    rows = [{"x": 1, "y": 2, "z": 3}, {"x": 2, "y": None, "z": 4}]
    ax = plot_lines(rows, "x", ("y", "z"), labels={"z": "the other"}, ax=figure().subplots())
    lines = ax.get_lines()
    assert [line.get_label() for line in lines] == ["y", "the other"]
    assert lines[0].get_xydata().tolist() == [[1, 2]]  # the row without a value is left out


def test_bars_stand_beside_the_published_values() -> None:
    published = {1: 5.0}
    ax = plot_bars(ROWS, "x", "y", published=published, ax=figure().subplots())
    ours, paper = ax.containers
    # x = 1: (2 + 4 + 1) / 3 over both places; x = 2: (8 + 2) / 2
    assert [bar.get_width() for bar in ours] == pytest.approx([7 / 3, 5])
    assert [bar.get_width() for bar in paper] == [5]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["measured", "published"]


def test_a_histogram_counts_every_value_once() -> None:
    rows = [{"r": 1.0}, {"r": 1.0}, {"r": 2.0}, {"r": None}]
    ax = plot_histogram(rows, "r", reference={"paper": 1.5}, bins=2, ax=figure().subplots())
    assert sum(patch.get_height() for patch in ax.containers[0]) == 3
    assert [line.get_xdata()[0] for line in ax.get_lines()] == [1.5]


def test_two_columns_are_two_histograms_over_the_same_bins() -> None:
    rows = [{"low": 1.0}, {"low": 1.1}, {"high": 1.0}, {"high": 1.3}]
    names = {"low": "ratio to the best known", "high": "ratio to the bound"}
    ax = plot_histogram(rows, ["low", "high"], labels=names, reference={"mean": 1.05},
                        ax=figure().subplots())  # fmt: skip
    # Asserted are the words of the legend: one for each column and for the line at the mean.
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["ratio to the best known", "ratio to the bound", "mean: 1.05"]


def test_claims_are_drawn_as_measured_over_published() -> None:
    claims = [
        Claim("same", 2.0, 2.0), Claim("half", 4.0, 2.0), Claim("words", "always", 3.0),
        Claim("nothing", 1.0, None), Claim("zero", 1.0, 0.0),
    ]  # fmt: skip
    assert numeric(claims) == [("same", 2.0, 2.0), ("half", 4.0, 2.0)]
    ax = plot_claims(numeric(claims), ax=figure().subplots())
    marks = {line.get_label(): line.get_xdata() for line in ax.get_lines()}
    assert marks["met"] == [1.0]
    assert marks["not met"] == [0.5]


def test_a_panel_for_each_value_and_one_legend_for_all() -> None:
    """Titles, the words of the legend and of the axis."""
    wanted = Figure("picture", "x", "y", series="kind", panel="where", labels={"here": "Here"})
    canvas = wanted.draw(experiment(wanted), ROWS)
    assert canvas is not None
    assert [ax.get_title() for ax in canvas.axes] == ["Here", "where there"]
    (legend,) = canvas.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    assert canvas.axes[0].get_xlabel() == "x, tokens"


def test_a_series_has_one_colour_in_all_panels() -> None:
    # The first series of the second panel is "b", as "a" is not there.
    rows = [row for row in ROWS if (row["where"], row["kind"]) != ("there", "a")]
    wanted = Figure("picture", "x", "y", series="kind", panel="where")
    canvas = wanted.draw(experiment(wanted), rows)
    assert canvas is not None
    colours = [
        {line.get_label(): line.get_color() for line in ax.get_lines()} for ax in canvas.axes
    ]
    assert colours[0]["b"] == colours[1]["b"]


def test_figures_without_data_are_not_written(tmp_path: Path) -> None:
    there = Figure("there", "x", "y", where={"kind": "a"})
    absent = Figure("absent", "x", "y", where={"kind": "c"})
    written = write_figures(experiment(there, absent), ROWS, [Claim("c", 1.0, 1.0)], tmp_path)
    assert [file.name for file in written] == ["there.png", "claims.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written)


def test_an_experiment_writes_its_figures_beside_its_results(tmp_path: Path) -> None:
    small = {"prompt": [1, 64], "output": 4, "requests": 8, "kv_capacity": 200}
    run_experiment("infermax-eviction-free", small, out=tmp_path)
    first = {file.name: file.read_bytes() for file in tmp_path.glob("*.png")}
    assert {"tps.png", "ttft.png", "tpot.png", "claims.png"} == set(first)
    run_experiment("infermax-eviction-free", small, out=tmp_path)
    assert first == {file.name: file.read_bytes() for file in tmp_path.glob("*.png")}


def test_declared_figures_have_names_of_their_own() -> None:
    for name, one in experiments().items():
        names = [wanted.name for wanted in one.figures]
        assert len(set(names)) == len(names), name
        assert "claims" not in names
