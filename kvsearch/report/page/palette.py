"""The colours of a page, in the light and in the dark, as rules of its style sheet."""

from __future__ import annotations

from collections.abc import Iterator

from kvsearch.report.figures.style import COLOURS, MUTED, is_light
from kvsearch.report.page.heat import SHADES, shade_colour

# the same hues where the page is dark, as far apart in lightness
DARK_COLOURS = ("#58aef0", "#ff8f52", "#2fcb9d", "#e6a3cc", "#f2b632", "#a2d8f7", "#d9dde3", "#d981ad")
DARK = {
    "page": "#14161a", "ink": "#e8eaee", "soft": "#a2a9b5", "faint": "#272b32", "line": "#454b55", "wash": "#1c1f25",
    "link": "#79bdf5", "warn": "#ffc078", "warn-wash": "#2a2118", "tip": "#e8eaee", "tip-ink": "#14161a",
    "hole": "#2c3038",
}  # fmt: skip


def style_sheet(template: str) -> str:
    """Return a style sheet with the colours of both themes and the classes of series and shades."""
    light = "".join(f"--c{at}:{colour};--t{at}:{_ink(colour)};" for at, colour in enumerate(COLOURS))
    dark = "color-scheme: dark; " + "".join(f"--{name}:{colour};" for name, colour in DARK.items())
    dark += "".join(f"--c{at}:{colour};--t{at}:{_ink(colour)};" for at, colour in enumerate(DARK_COLOURS))
    filled = template.replace("LIGHT_COLOURS", f"--muted:{MUTED};{light}").replace("CLASSES", "\n".join(_classes()))
    return filled.replace("{ DARK }", f"{{ {dark} }}")


def _classes() -> Iterator[str]:
    for at in range(len(COLOURS)):
        yield f".c{at}{{--c:var(--c{at})}}.f{at}{{stroke:var(--c{at})}}.t{at}{{fill:var(--t{at})}}"
    for at in range(SHADES):
        yield f".q{at}{{stroke:rgb{shade_colour(at)}}}".replace(" ", "")


def _ink(colour: str) -> str:
    """Return the ink that can be read on a colour, written as #rrggbb."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#111" if is_light((red, green, blue)) else "#fff"
