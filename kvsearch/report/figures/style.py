"""The colours of all figures, told apart by colour-blind readers and in grey, with marks and dashes for print."""

from __future__ import annotations

# Okabe and Ito, in an order in which neighbours differ in lightness, too; yellow is too light for lines
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
MUTED = "#8C8C8C"  # controls and backgrounds
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # as matplotlib calls them
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 1.5), (5, 2, 1, 2))  # on, off, ..., in widths of the line
# dark blue (little) to yellow (much), lightness rising evenly, so that it reads in grey
RAMP = (
    (13, 8, 135),
    (84, 2, 163),
    (139, 10, 165),
    (185, 50, 137),
    (219, 92, 104),
    (244, 136, 73),
    (254, 188, 43),
    (240, 249, 33),
)


def marks(number: int) -> tuple[str, tuple[float, ...]]:
    """Return marker and dashes of a series; where the colours begin again, both are others than in the round before."""
    again = number // len(COLOURS)
    return MARKERS[(number + 3 * again) % len(MARKERS)], DASHES[(number + again) % len(DASHES)]


def shade(share: float) -> tuple[int, int, int]:
    """Return the colour of a value that lies at `share` of its range, 0 to 1: red, green and blue, 0 to 255."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    red, green, blue = (
        round(below + (above - below) * (place - low)) for below, above in zip(RAMP[low], RAMP[low + 1], strict=True)
    )
    return red, green, blue


def is_light(colour: tuple[int, int, int]) -> bool:
    """Tell whether black is read better on a colour than white (luma of ITU-R BT.601)."""
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue > 128
