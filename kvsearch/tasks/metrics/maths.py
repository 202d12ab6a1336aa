"""Scores of problems in mathematics: the final number of GSM8K, correctly or as published, and answers in boxes."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from decimal import Decimal

from kvsearch.core.errors import require

# a minus is a sign where it follows no operand; digits in a word (m2), an exponent or a version are no number
_NUMBER = (
    r"(?:(?<![A-Za-z0-9_)\]}.])(?P<minus>[-\u2212])[$€£¥]?|(?<![A-Za-z0-9_^])(?<![0-9]\.))"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_ANYWHERE = re.compile(_NUMBER)
_MARKED = re.compile(rf"####[ \t]*[$€£¥]?{_NUMBER}[.%]?\s*$", re.MULTILINE)
_OFFICIAL_GOLD = re.compile(r"#### (-?[0-9.,]+)")
_OFFICIAL_PLAIN = re.compile(r"-?[0-9.,]+")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_WORDS = r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{"
# what answers are written with, and what it is read as, one after the other
_SPELLINGS = (
    (r"(?<!\\)\\[!,;: ]|\\(?:left|right|displaystyle)(?![A-Za-z])|\\?[$%]|\^\{?\\circ\}?|~", ""),
    (rf"(?<=[0-9}}])\s*{_WORDS}(?!\s*(?:and|or)\b)[^{{}}]*\}}(?:\^\{{?[0-9]\}}?)?", ""),  # a unit
    (rf"{_WORDS}([^{{}}]*)\}}", r"\1"),
    (r"\s", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(sqrt|frac)([0-9A-Za-z])", r"\\\1{\2}"),
    (r"(\\frac\{[^{}]*\})([0-9A-Za-z])", r"\1{\2}"),
    (r"^[A-Za-z]{1,2}=(?=[^=]*$)|\.$", ""),
    (r"(?<![0-9])\.(?=[0-9])", "0."),
    (r"(?<=[0-9])\{,\}(?=[0-9])", ","),
    (r"^(-?[0-9]+)\.0+$", r"\1"),
    (r"^(-?)0\.5$", r"\1\\frac{1}{2}"),
    (r"^(-?[0-9]+)/([0-9]+)$", r"\\frac{\1}{\2}"),
    (r"^\\frac\{-", r"-\\frac{"),
)
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def gsm8k(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if the reply's final number equals that of an answer.

    The final number is the first that stands alone on a line after "####", as GSM8K's own solutions end, or else the
    last in the text. Thousands separators, decimals ("3.50" is 3.5), signs, currency symbols and a full stop after the
    number are understood; fractions and scientific notation are not. Answers are numbers or whole solutions.
    No paper's table uses it. UsageError if an answer has no number.
    """
    golds = [require(_final(answer), f"the answer {answer!r} has no number") for answer in answers]
    number = _final(reply)
    return float(number is not None and number in golds)


def gsm8k_official(reply: str, answers: Sequence[str]) -> float:
    r"""Return 1 if the last run of digits in the reply equals the answer's number after "#### " (or the answer itself).

    This is the scorer of Qwen's scripts, which EvolKV's table uses: the last match of \d+, read as a Python literal.
    Its defects are kept. The sign is lost (-3 reads as 3), decimals read as their fraction (18.50 as 50, 18.0 as 0),
    1,000 as 000, and digits with a leading zero (05, of 1,005 or 3.05) as no number; so negative answers are never
    right, and neither is a right answer above 999 that is written with a separator. UsageError if an answer has no
    number.
    """
    golds = [_official_gold(answer) for answer in answers]
    runs = re.findall(r"\d+", reply)
    number = _literal(runs[-1]) if runs else None
    return float(number is not None and number in golds)


def math_boxed(reply: str, answers: Sequence[str]) -> float:
    r"""Return 1 if what stands in the reply's last \boxed{...} is written as an answer is, once both are normalised.

    Source: the equivalence of MATH (Hendrycks et al., arXiv 2103.03874, math_equivalence.py): spaces, \left and \right,
    units, dollars, percents and degrees go, \dfrac is \frac, \frac12 and 1/2 are \frac{1}{2}, .5 is 0.5, "x = 5" is 5.
    Beyond it, \text{...} is its text, 3.0 is 3, 1,000 is 1000, and the sign of a fraction stands before it. Nothing is
    computed: 0.25 is not \frac{1}{4}.
    """
    said = extract_boxed(reply)
    return float(said is not None and _plain(said) in map(_plain, answers))


def integer_boxed(reply: str, answers: Sequence[str]) -> float:
    r"""Return 1 if what stands in the reply's last \boxed{...} is the integer of an answer; 073 is 73.

    Source: AIME's answers, which are integers from 0 to 999. UsageError if an answer is none.
    """
    golds = [require(_integer(answer), f"the answer {answer!r} is no integer") for answer in answers]
    return float(_integer(extract_boxed(reply) or "") in golds)


def extract_boxed(reply: str) -> str | None:
    r"""Return the content of the last \boxed{...} whose braces balance; None if no box is found."""
    boxes = {box.end() for box in _BOX.finditer(reply)}
    opened: list[int] = []
    closed: dict[int, int] = {}
    for place, letter in enumerate(reply):
        if letter == "{":
            opened.append(place + 1)
        elif letter == "}" and opened:
            closed[opened.pop()] = place
    start = max(boxes & closed.keys(), default=None)
    return None if start is None else reply[start : closed[start]]


def _plain(answer: str) -> str:
    for spelling, plain in _SPELLINGS:
        answer = re.sub(spelling, plain, answer)
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def _integer(text: str) -> int | None:
    plain = _plain(text)
    return int(plain) if re.fullmatch(r"-?[0-9]{1,9}", plain) else None


def _final(text: str) -> Decimal | None:
    marked = _MARKED.search(text)
    matches = [marked] if marked else list(_ANYWHERE.finditer(text))
    if not matches:
        return None
    sign = "-" if matches[-1]["minus"] else ""
    return Decimal(sign + matches[-1]["digits"].replace(",", ""))


def _official_gold(answer: str) -> float:
    match = _OFFICIAL_GOLD.search(answer)
    plain = _OFFICIAL_PLAIN.fullmatch(answer)
    text = match[1] if match else plain[0] if plain else ""
    value = _literal(text.replace(",", ""))
    return require(value, f"the answer {answer!r} is no number, nor a solution that ends in one after '#### '")


def _literal(text: str) -> float | None:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):  # leading zeros, digits of other scripts, thousands of digits
        return None
    return value if isinstance(value, int | float) else None
