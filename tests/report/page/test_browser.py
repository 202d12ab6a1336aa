"""The page as a browser shows it: at the widths of a phone, a tablet and a desk, in the light and in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.page.builders import hostile_page, page
from tests.report.page.chromium import Browser, browser, find

PNG = b"\x89PNG"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find() is None, reason="there is no Chromium here")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "page.html").write_bytes(page(evaluations=100))
    (folder / "hostile.html").write_bytes(hostile_page())
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser(find() or "") as found:
        yield found


@pytest.mark.parametrize(("width", "scheme"), [(375, "light"), (768, "dark"), (1280, "light")])
@pytest.mark.parametrize("name", ["page", "hostile"])
def test_nothing_overflows_fails_or_is_asked_for(
    chromium: Browser, pages: Path, tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    chromium.open(pages / f"{name}.html", width, scheme=scheme)
    assert chromium.run("document.documentElement.scrollWidth") == width
    shot = tmp_path / "shot.png"
    chromium.screenshot(shot)
    assert shot.read_bytes().startswith(PNG)
    dark = chromium.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    assert chromium.complaints() == []
    assert chromium.requests() == []


def test_letters_of_figures_are_large_enough_on_a_phone(chromium: Browser, pages: Path) -> None:
    chromium.open(pages / "page.html", 375)
    sizes = """Math.min(...[...document.querySelectorAll("figure > svg text:not(.tiny)")]
        .map(one => one.getBoundingClientRect()).map(box => Math.min(box.height, box.width > 3 ? 99 : 0) || 99))"""
    assert chromium.run(sizes) >= 9


def test_a_click_sorts_by_number_and_a_second_one_the_other_way(chromium: Browser, pages: Path) -> None:
    chromium.open(pages / "page.html", 1280)
    click = "document.querySelectorAll('thead th')[1].click()"
    read = "[...document.querySelectorAll('tbody td:nth-child(2)')].map(one => parseFloat(one.textContent))"
    before = chromium.run(read)
    chromium.run(click)
    assert chromium.run(read) == sorted(before, reverse=True) != before
    chromium.run(click)
    assert chromium.run(read) == sorted(before)
    assert chromium.run("document.querySelector('tbody tr').className") == "head"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("#r1-f1 .s1 .mark", "series: uniform"),  # a point of a line
        ("#r1-f2 [class^=q]", "layer: "),  # a cell of a map
        ("#r1-f5 [class^=f]", "phase: "),
    ],
)
def test_what_is_pointed_at_tells_its_numbers(chromium: Browser, pages: Path, target: str, told: str) -> None:
    chromium.open(pages / "page.html", 1280, height=2000)
    point = f"""(() => {{ const one = document.querySelector("{target}"), svg = one.closest("svg");
        svg.scrollIntoView({{ block: "center", behavior: "instant" }});
        const start = one.getPointAtLength(0), at = new DOMPoint(start.x, start.y).matrixTransform(svg.getScreenCTM());
        return [at.x + 1, at.y]; }})()"""
    x, y = chromium.run(point)
    chromium.do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    text = chromium.run("document.getElementById('tip').innerText")
    assert told in text
    assert "\n" in text


def test_in_print_everything_is_there_and_buttons_are_not(chromium: Browser, pages: Path, tmp_path: Path) -> None:
    chromium.open(pages / "page.html", 1000, scheme="dark", media="print")
    assert chromium.run("getComputedStyle(document.getElementById('theme')).display") == "none"
    assert chromium.run("getComputedStyle(document.documentElement).getPropertyValue('--page').trim()") == "#fff"
    chromium.print(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
