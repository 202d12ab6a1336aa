"""Scores of GSM8K: a correct reading of the final number, and the one that published numbers were made with."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from decimal import Decimal

from kvsearch.core.errors import UsageError, given

# a minus is a sign where it follows no operand; digits in a word (m2), an exponent or a version are no number
_NUMBER = (
    r"(?:(?<![A-Za-z0-9_)\]}.])(?P<minus>[-\u2212])[$€£¥]?|(?<![A-Za-z0-9_^])(?<![0-9]\.))"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_ANYWHERE = re.compile(_NUMBER)
_MARKED = re.compile(rf"####[ \t]*[$€£¥]?{_NUMBER}[.%]?\s*$", re.MULTILINE)
_OFFICIAL_GOLD = re.compile(r"#### (-?[0-9.,]+)")
_OFFICIAL_PLAIN = re.compile(r"-?[0-9.,]+")


def gsm8k(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if the reply's final number equals that of an answer.

    The final number is the first that stands alone on a line after "####", as GSM8K's own solutions end, or else the
    last in the text. Thousands separators, decimals ("3.50" is 3.5), signs, currency symbols and a full stop after the
    number are understood; fractions and scientific notation are not. Answers are numbers or whole solutions.
    No paper's table uses it. UsageError if an answer has no number.
    """
    golds = [_final(answer) for answer in answers]
    if None in golds:
        raise UsageError(f"the answer {answers[golds.index(None)]!r} has no number")
    found = _final(reply)
    return float(found is not None and found in golds)


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
    found = _literal(runs[-1]) if runs else None
    return float(found is not None and found in golds)


def _final(text: str) -> Decimal | None:
    marked = _MARKED.search(text)
    matches = [marked] if marked else list(_ANYWHERE.finditer(text))
    if not matches:
        return None
    sign = "-" if matches[-1]["minus"] else ""
    return Decimal(sign + matches[-1]["digits"].replace(",", ""))


def _official_gold(answer: str) -> float:
    found = _OFFICIAL_GOLD.search(answer)
    plain = _OFFICIAL_PLAIN.fullmatch(answer)
    text = found[1] if found else plain[0] if plain else ""
    value = _literal(text.replace(",", ""))
    return given(value, f"the answer {answer!r} is no number, nor a solution that ends in one after '#### '")


def _literal(text: str) -> float | None:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):  # leading zeros, digits of other scripts, thousands of digits
        return None
    return value if isinstance(value, int | float) else None
