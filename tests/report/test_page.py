"""The page: one file that needs nothing else, in which all that is printed is data, and figures are always the same."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from kvsearch.report.artifacts import open_path
from kvsearch.report.figures import Figure, HeatMap, LineChart, Series
from kvsearch.report.page import group_by_model, make_data_link, render
from kvsearch.report.table import Cell, Table
from tests.examples import at_most
from tests.report.reader import Reader

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e{{ 7 * 7 }}\x07\"'&"


@pytest.fixture(scope="module")
def hostile() -> str:
    """A page in which whatever may come from outside is hostile."""
    bad = Series(HOSTILE, (1.0, 2.0), (1.0, 2.0), (0.5, 1.0), (1.5, 3.0))
    cells = HeatMap(("0", HOSTILE), (HOSTILE,), HOSTILE, HOSTILE, HOSTILE, {HOSTILE: ((1.0,), (2.0,))})
    figures = [
        Figure(HOSTILE, HOSTILE, HOSTILE, LineChart(HOSTILE, HOSTILE, (bad,))),
        Figure("cells", HOSTILE, "", cells),
    ]
    row = [Cell(HOSTILE), Cell(HOSTILE)]
    rows = Table(HOSTILE, [HOSTILE, HOSTILE], [(HOSTILE, [row])], (HOSTILE,), (HOSTILE,))
    sheet = {
        **dict.fromkeys(("path", "kind", "answer", "note"), HOSTILE), "figures": figures, "tables": [rows],
        **{key: [HOSTILE] for key in ("lines", "commands", "names")}, "choices": (),
        "sources": {HOSTILE: [(HOSTILE, HOSTILE)]},
    }  # fmt: skip
    return render([(HOSTILE, HOSTILE, [sheet, sheet])]).decode()


def test_nothing_hostile_becomes_markup(hostile: str) -> None:
    read = Reader(hostile)
    assert [name for name, _ in read.found].count("script") == 1
    assert "img" not in {name for name, _ in read.found}
    assert not {key for _, found in read.found for key in found if key.startswith("on")}
    assert "{{ 7 * 7 }}" in read.text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x09\x0b-\x1f]", hostile)
    assert hostile.count("\\u202e") > 30
    assert HOSTILE.split("\u202e")[0] in read.text


def test_a_policy_allows_our_script_and_style_and_nothing_from_anywhere(hostile: str) -> None:
    found = Reader(hostile).found
    (policy,) = (one["content"] or "" for _, one in found if one.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    links = [one.get(name) or "" for _, one in found for name in ("href", "src") if name in one]
    assert {link[:1] if link.startswith("#") else link.split(",")[0].split(";")[0] for link in links} == {
        "#", "data:", "data:text/csv",
    }  # fmt: skip
    ids = [one["id"] for _, one in found if "id" in one]
    assert len(ids) == len(set(ids)) > 6
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_a_run_begins_with_what_to_deploy_then_score_against_entries_names_and_the_rest() -> None:
    page = render(group_by_model([open_path(Path(__file__).parents[1] / "seeds/run.json")])).decode()
    text = Reader(page).text
    order = [
        "Deploy lukv:snapkv at 22% of the cache",
        "entries kept",
        "552 of 2,544",
        "baseline",
        "Score against entries",
    ]
    order += ["What the names mean", "Everything else", "choice: ", "report split: "]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "budgets halfway between those of lukv and even ones" in text
    assert text.count("written plan") == 2  # for a desk and for a phone
    assert page.count('class="wide"') == page.count('class="narrow"') == 1
    assert "ratio 0.8" not in text


@at_most(40)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_link_holds_a_file_whole_and_is_no_markup(text: str) -> None:
    link = make_data_link(text)
    assert unquote(link.partition(",")[2]) == text
    assert link.isascii() and not set(link) & set('"&<> \n#')
    assert Reader(Markup('<a href="{}"></a>').format(link)).found == [("a", {"href": link})]
