"""What is printed is data: nothing of it becomes markup, and nothing of it is unseen."""

from __future__ import annotations

from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.printed import visible
from kvsearch.report.page.markup import data_link, number, tag
from tests.examples import at_most


class Reader(HTMLParser):
    """What a browser finds in markup: elements with their attributes, and the text between them."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text", "plain text"),
        ("größer, 東京", "größer, 東京"),
        ("two\nlines", "two\nlines"),
        ("right\u202eleft", "right\\u202eleft"),
        ("bell\x07 zero\x00 width\u200b", "bell\\x07 zero\\x00 width\\u200b"),
        ("half \ud800 tag \U000e0041", "half \\ud800 tag \\U000e0041"),
    ],
)
def test_what_cannot_be_seen_is_an_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


@at_most(40)
@given(st.text(), st.text())
def test_texts_and_attributes_stay_what_they_are(text: str, value: str) -> None:
    read = Reader(tag("text", text, data_name=value))
    assert read.found == [("text", {"data-name": visible(value)})]
    assert read.text == visible(text)
    read.text.encode()


def test_elements_in_an_element() -> None:
    inner = tag("path", d="M0 0")
    assert tag("g", inner, "<b>", class_="x", id=None) == '<g class="x"><path d="M0 0"></path>&lt;b&gt;</g>'


@at_most(40)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_link_holds_a_file_whole_and_is_no_markup(text: str) -> None:
    link = data_link(text)
    assert unquote(link.partition(",")[2]) == text
    assert link.isascii() and not set(link) & set('"&<> \n#')
    assert Reader(tag("a", href=link)).found == [("a", {"href": link})]


@pytest.mark.parametrize(
    ("value", "written"), [(0.0, "0"), (-0.04, "0"), (12.0, "12"), (12.34, "12.3"), (-0.5, "-.5"), (359.96, "360")]
)
def test_coordinates_are_short(value: float, written: str) -> None:
    assert number(value) == written
