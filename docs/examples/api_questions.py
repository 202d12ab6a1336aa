"""Make questions about real documents, offline: from the documentation of Python packages that are installed.

    python docs/examples/api_questions.py OUT_DIR                    # contexts of about 1,024 tokens
    python docs/examples/api_questions.py OUT_DIR --characters 7400  # of about 2,048

OUT_DIR/questions.jsonl holds contexts, each the documentation of several functions and classes of numpy, scipy,
scikit-learn and pandas, and questions about default values, for `--tasks jsonl:OUT_DIR/questions.jsonl`. An answer is what
`inspect.signature` says, where the documentation says the same. OUT_DIR/documentation.txt is text about other functions,
for `--tasks ppl:OUT_DIR/documentation.txt`. The same versions of the packages and options give the same files.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import pkgutil
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOLDERS = (
    "numpy", "numpy.fft", "numpy.linalg", "numpy.ma", "numpy.polynomial", "numpy.polynomial.polynomial",
    "numpy.polynomial.chebyshev", "numpy.lib.stride_tricks", "numpy.lib.format", "numpy.testing",
    "scipy.cluster.hierarchy", "scipy.cluster.vq", "scipy.differentiate", "scipy.fft", "scipy.integrate",
    "scipy.interpolate", "scipy.io", "scipy.linalg", "scipy.ndimage", "scipy.optimize", "scipy.signal",
    "scipy.signal.windows", "scipy.sparse", "scipy.sparse.csgraph", "scipy.sparse.linalg", "scipy.spatial",
    "scipy.spatial.distance", "scipy.spatial.transform", "scipy.special", "scipy.stats", "scipy.stats.contingency",
    "scipy.stats.mstats", "scipy.stats.qmc", "scipy.stats.sampling",
    "sklearn.calibration", "sklearn.cluster", "sklearn.compose", "sklearn.covariance", "sklearn.cross_decomposition",
    "sklearn.datasets", "sklearn.decomposition", "sklearn.discriminant_analysis", "sklearn.dummy", "sklearn.ensemble",
    "sklearn.feature_extraction", "sklearn.feature_extraction.image", "sklearn.feature_extraction.text",
    "sklearn.feature_selection", "sklearn.gaussian_process", "sklearn.gaussian_process.kernels", "sklearn.impute",
    "sklearn.inspection", "sklearn.isotonic", "sklearn.kernel_approximation", "sklearn.kernel_ridge",
    "sklearn.linear_model", "sklearn.manifold", "sklearn.metrics", "sklearn.metrics.pairwise", "sklearn.mixture",
    "sklearn.model_selection", "sklearn.multiclass", "sklearn.multioutput", "sklearn.naive_bayes",
    "sklearn.neighbors", "sklearn.neural_network", "sklearn.pipeline", "sklearn.preprocessing",
    "sklearn.random_projection", "sklearn.semi_supervised", "sklearn.svm", "sklearn.tree", "sklearn.utils",
    "sklearn.utils.extmath",
    "pandas", "pandas.DataFrame", "pandas.Series", "pandas.Index", "pandas.Series.str", "pandas.Series.dt",
    "pandas.api.typing.DataFrameGroupBy", "pandas.api.typing.Rolling", "pandas.plotting",
)  # fmt: skip
HARDLY_VARY = {"axis", "casting", "dtype", "order"}  # parameters whose defaults are known without the documentation
CHARACTERS = 3600  # about 1,024 tokens of SmolLM2
TEXT_CHARACTERS = 500_000
SEED = 0
QUESTION = "What is the default value of the parameter `{parameter}` of `{function}`? Answer with the value alone."

SECTION = re.compile(r"^([A-Z][A-Za-z ]+)\n-{3,} *$", re.MULTILINE)  # a title of numpydoc, and the line below it
ENTRY = re.compile(
    r"^(?=\S)", re.MULTILINE
)  # where the entry of a parameter begins: all but its first line is indented
NAMES = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*) *(?::|$)", re.MULTILINE)
LITERAL = r"""'[^'\n]*'|"[^"\n]*"|\([-+\d., e]*\)|[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?!\w)"""
STATED = re.compile(rf"\b[Dd]efault(?:s|ed)?(?: value)?(?: is| to|:|=)*[ `]*({LITERAL})")


@dataclass(frozen=True)
class Default:
    """A default value that documentation states as the signature has it, and the ways to write it."""

    parameter: str
    value: Any
    spellings: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """The documentation of a function or class: its text, all its parameters' defaults, and those to ask for."""

    name: str
    text: str
    parameters: dict[str, Any]
    stated: tuple[Default, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT_DIR", help="where both files are written")
    parser.add_argument(
        "--characters", type=int, default=CHARACTERS, metavar="N",
        help="characters of a context, about 3.5 times its tokens [default: %(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--questions", type=int, default=4, metavar="N", help="questions about a context [default: %(default)s]"
    )
    parser.add_argument(
        "--contexts", type=int, default=120, metavar="N", help="contexts, at most [default: %(default)s]"
    )
    options = parser.parse_args()
    entries = read_documentation(HOLDERS)
    rows, used = make_questions(entries, options.characters, options.questions, options.contexts)
    text = "\n\n".join(entry.text for entry in entries if entry.name not in used)[:TEXT_CHARACTERS]
    if not rows or not text:
        sys.exit(
            f"no context of {options.characters} characters can be made: install numpy, scipy, scikit-learn, pandas"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    with (options.folder / "questions.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (options.folder / "documentation.txt").write_text(text, encoding="utf-8")
    contexts = len({row["context"] for row in rows})
    print(f"questions.jsonl: {len(rows)} questions about {contexts} contexts of {len(used)} functions and classes")
    print(f"documentation.txt: {len(text):,} characters about others")


def read_documentation(holders: tuple[str, ...]) -> list[Entry]:
    """Return what the packages document, in an order that is drawn; of functions of one name, the first is taken."""
    entries: dict[str, Entry] = {}
    for holder_name in holders:
        try:
            holder = pkgutil.resolve_name(holder_name)
        except (ImportError, AttributeError):  # not installed, or not in this version
            print(f"{holder_name} is not there")
            continue
        for name, member in public_members(holder):
            if name not in entries and (entry := read_entry(f"{holder_name}.{name}", member)):
                entries[name] = entry
    drawn = list(entries.values())
    random.Random(SEED).shuffle(drawn)
    return drawn


def public_members(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes of a module, or the methods of a class, by name."""
    names = getattr(holder, "__all__", None) if inspect.ismodule(holder) else None
    for name in sorted(names or dir(holder)):
        try:
            with warnings.catch_warnings(action="ignore"):  # names that are deprecated
                member = getattr(holder, name)
        except (ImportError, AttributeError):  # names that are experimental
            continue
        if not name.startswith("_") and (inspect.isroutine(member) or inspect.isclass(member)):
            yield name, member


def read_entry(name: str, member: Any) -> Entry | None:
    """Return the summary, parameters and returned values of a function; None where its documentation has no parameters."""
    summary, *sections = SECTION.split(inspect.getdoc(member) or "")
    by_title = dict(zip(sections[::2], sections[1::2], strict=True))
    if "Parameters" not in by_title:
        return None
    try:
        signature = inspect.signature(member).parameters
    except (TypeError, ValueError):  # code that is not Python's
        signature = {}
    parts = [name, summary.strip().split("\n\n")[0]]
    for title in ("Parameters", "Returns"):
        if title in by_title:
            parts.append(f"{title}\n{'-' * len(title)}\n{by_title[title].strip()}")
    defaults = {parameter: value.default for parameter, value in signature.items()}
    return Entry(name, "\n\n".join(parts), defaults, tuple(stated_defaults(by_title["Parameters"], defaults)))


def stated_defaults(section: str, defaults: dict[str, Any]) -> Iterator[Default]:
    """Yield the defaults that a section of parameters states as the signature has them."""
    for text in ENTRY.split(section):
        names = NAMES.match(text)
        if names is None or "," in names[1] or names[1] in HARDLY_VARY or names[1] not in defaults:
            continue
        value = defaults[names[1]]
        found = STATED.search(text)
        if found is None or not isinstance(value, str | int | float | tuple) or isinstance(value, bool):
            continue
        literal = ast.literal_eval(re.sub(r"\b0+(?=\d)", "", found[1]))
        if literal == value:
            yield Default(names[1], value, spellings_of(value, found[1]))


def spellings_of(value: Any, written: str) -> tuple[str, ...]:
    """Return the ways to write a value, the documentation's own first."""
    if isinstance(value, str):
        return (value,)
    spellings = [written.rstrip("."), repr(value)]
    if isinstance(value, int | float):
        spellings += [f"{value:g}", f"{value:.10f}".rstrip("0").rstrip(".") if abs(value) >= 1e-9 else repr(value)]
    return tuple(dict.fromkeys(spellings))


def make_questions(
    entries: list[Entry], characters: int, questions: int, contexts: int
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return rows of questions about contexts of about so many characters, and the names of what is in a context."""
    left = [entry for entry in entries if entry.stated and len(entry.text) <= characters / 2]
    rows: list[dict[str, Any]] = []
    used: set[str] = set()
    asked = Counter[str]()
    most = max(questions * contexts // 30, 1)  # questions with one answer, so that no answer is a good guess
    for _ in range(contexts):
        group: list[Entry] = []
        room = characters
        for entry in left:
            if len(entry.text) + 2 <= room:
                group.append(entry)
                room -= len(entry.text) + 2
        left = [entry for entry in left if entry not in group]
        context = "\n\n".join(entry.text for entry in group)
        if room > characters / 10:
            break
        new = 0
        for entry, default in questions_of(group):
            answer = default.spellings[0]
            if new < questions and asked[answer] < most:
                asked[answer] += 1
                new += 1
                rows.append(
                    {
                        "context": context,
                        "question": QUESTION.format(parameter=default.parameter, function=entry.name),
                        "answers": list(default.spellings),
                        "max_new_tokens": 16,
                    }
                )
        if new:
            used.update(entry.name for entry in group)
    return rows, used


def questions_of(group: list[Entry]) -> Iterator[tuple[Entry, Default]]:
    """Yield what to ask about a context, one default of each function, then a second of each, and so on."""
    for turn in range(max(len(entry.stated) for entry in group)):
        for entry in group:
            if turn < len(entry.stated):
                default = entry.stated[turn]
                others = (other.parameters for other in group if other is not entry)
                if all(default.parameter not in other for other in others):
                    yield entry, default


if __name__ == "__main__":
    main()
