"""What is drawn of a figure: where values are, what tells series apart, and which row of the CSV a place is."""

from __future__ import annotations

import re

import pytest

from kvsearch.report.figures.data import Axis, CategoryMap, Estimated, HeatMap, Intervals, Lines, Panel, Series
from kvsearch.report.page.categories import category_map
from kvsearch.report.page.heat import heat_map
from kvsearch.report.page.intervals import intervals
from kvsearch.report.page.lines import lines
from tests.report.page.test_markup import Reader


def paths(svg: str, class_: str) -> list[dict[str, str | None]]:
    """The attributes of the paths of a class."""
    return [found for name, found in Reader(svg).found if name == "path" and found.get("class") == class_]


def points(path: str | None) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"M(\S+) (\S+?)h0", path or "")]


SCORES = Lines(
    Axis("entries per kv head", log=True),
    Axis("score, percent"),
    (
        Series("full", (), (80.0,), style="level"),
        Series("uniform", (32.0, 64.0, 128.0), (20.0, 40.0, 60.0), (10.0, 30.0, 50.0), (30.0, 50.0, 70.0)),
        Series("joint", (32.0, 64.0, 128.0), (40.0, 60.0, 70.0), (30.0, 50.0, 60.0), (50.0, 70.0, 78.0)),
    ),
)


def test_a_line_goes_through_its_points_and_a_level_is_one() -> None:
    svg, keys = lines(SCORES)
    level, uniform, joint = (points(found["d"]) for found in paths(svg, "hit"))
    assert len({y for _, y in level}) == 1
    assert [len(uniform), len(joint)] == [3, 3]
    assert uniform[0][0] < uniform[1][0] < uniform[2][0]
    assert uniform[1][0] - uniform[0][0] == pytest.approx(uniform[2][0] - uniform[1][0], abs=0.2)  # a doubling each
    assert level[0][1] < joint[2][1] < uniform[2][1] < uniform[0][1]  # higher is further up
    assert joint[0][1] == pytest.approx(uniform[1][1])  # both 40
    assert [key.name for key in keys] == ["full", "uniform", "joint"]


def test_methods_at_one_place_are_side_by_side_and_look_different() -> None:
    svg, keys = lines(SCORES)
    _, uniform, joint = (points(found["d"]) for found in paths(svg, "hit"))
    assert {round(two - one, 1) for (one, _), (two, _) in zip(uniform, joint, strict=True)} == {3.2}
    assert len(paths(svg, "bar")) == 2
    assert len({(key.classes, key.marker) for key in keys}) == 3


def test_places_know_their_row_of_the_csv() -> None:
    svg, _ = lines(SCORES)
    assert [found["data-r"] for found in paths(svg, "hit")] == ["0", "1", "4"]


def test_a_value_that_is_not_known_breaks_a_line() -> None:
    series = Series("loss", (1.0, 2.0, 3.0, 4.0), (1.0, float("nan"), 2.0, 3.0))
    (found,) = paths(lines(Lines(Axis("step"), Axis("loss"), (series,)))[0], "line")
    assert found["d"] is not None
    assert [found["d"].count(letter) for letter in "ML"] == [2, 1]


def test_steps_go_across_first() -> None:
    series = Series("best", (1.0, 5.0, 9.0), (3.0, 2.0, 1.0), style="steps")
    (found,) = paths(lines(Lines(Axis("evaluations"), Axis("loss"), (series,)))[0], "line")
    assert re.fullmatch(r"M[^HV]+(H[^HV]+V[^HV]+){2}", found["d"] or "")


def test_one_size_is_a_row_per_method() -> None:
    long = "a-method-of-a-very-long-name-indeed"
    one = Lines(SCORES.x, SCORES.y, (
        SCORES.series[0], Series(long, (64.0,), (40.0,), (30.0,), (55.0,)), Series("b", (64.0,), (60.0,)),
    ))  # fmt: skip
    svg, keys = lines(one)
    (first, second) = (points(found["d"])[0] for found in paths(svg, "hit"))
    assert not keys
    assert first[0] < second[0]
    assert first[1] < second[1]
    assert long not in svg
    assert "full" in Reader(svg).text


@pytest.mark.parametrize("count", [3, 30])
def test_the_longer_side_of_a_map_lies_across(count: int) -> None:
    rows = tuple(map(str, range(count)))
    values = tuple((float(row), float(row) + 0.5) for row in range(count))
    body = HeatMap(rows, ("h0", "h1"), "layer", "kv head", "entries", (Panel("", values),), "{:.1f}")
    svg = heat_map(body)
    (place,) = (found["data-map"] for _, found in Reader(svg).found if "data-map" in found)
    *_, across, upright, first, turned = (place or "").split()
    assert (across, upright, first, turned) == (str(count), "2", "0", "1")
    assert ("0.5" in Reader(svg).text) == (count == 3)  # values are written where there is room


def test_shades_are_of_one_scale_and_unknown_cells_have_none() -> None:
    panels = (Panel("uniform", ((0.0, 5.0),)), Panel("plan", ((10.0, None),)))
    svg = heat_map(HeatMap(("0",), ("0", "1"), "layer", "kv head", "loss", panels))
    cells = [found["class"] for name, found in Reader(svg).found if name == "path" and "stroke-width" not in found]
    assert cells == ["q0", "q8", "none", "q15"]
    assert [found["data-map"].split()[-2] for _, found in Reader(svg).found if "data-map" in found] == ["0", "2"]  # type: ignore[union-attr]


def test_a_map_of_equal_values_has_one_shade() -> None:
    svg = heat_map(HeatMap(("0", "1"), ("0",), "layer", "head", "entries", (Panel("", ((4.0,), (4.0,))),)))
    cells = [found["class"] for name, found in Reader(svg).found if name == "path" and "stroke-width" not in found]
    assert cells == ["q8"]


def test_policies_have_a_colour_and_a_letter_each() -> None:
    body = CategoryMap(("0", "1", "2"), ("prefill", "decode"), "layer", "phase",
                       (("snapkv", ""), ("streaming", "snapkv"), ("tova", "")))  # fmt: skip
    svg, keys = category_map(body)
    assert [(key.name, key.marker) for key in keys] == [("snapkv", "S"), ("streaming", "T"), ("tova", "O")]
    assert Reader(svg).text.startswith("STSO")
    assert {found["class"] for _, found in Reader(svg).found if "d" in found} == {"f0", "f1", "f2", "none"}


def test_controls_are_grey_and_behind_all_others() -> None:
    series = (Series("joint", (1.0, 2.0), (2.0, 3.0)), Series("random", (1.0, 2.0), (1.0, 1.0), muted=True))
    svg, keys = lines(Lines(Axis("x"), Axis("y"), series))
    assert [key.classes for key in keys] == ["c0 d0", "muted d0"]
    assert svg.index('class="s1 muted d0"') < svg.index('class="s0 c0 d0"')


def test_intervals_lie_about_their_means_in_groups() -> None:
    groups = (
        ("useful", (Estimated("cosine", 3.0, 1.0, 5.0), Estimated("entropy", 6.0, 5.0, 7.0))),
        ("", (Estimated("nll", -1.0, -2.0, 0.0),)),
    )
    svg = intervals(Intervals(Axis("points"), groups))
    places = [points(found["d"])[0] for found in paths(svg, "hit")]
    assert places[2][0] < places[0][0] < places[1][0]
    assert places[0][1] < places[1][1] < places[2][1]
    assert [found["data-r"] for found in paths(svg, "hit")] == ["0", "1", "2"]
    (zero,) = (float(found["d"].split()[0][1:]) for found in paths(svg, "line") if found["d"])
    bars = [found["d"] or "" for found in paths(svg, "bar strong")]
    ends = [[float(one) for one in re.findall(r"(?:M|H)([\d.]+)", bar)] for bar in bars]
    assert ends[2][0] < places[2][0] < ends[2][1] == zero < ends[0][0]
    assert "useful" in Reader(svg).text
