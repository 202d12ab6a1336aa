"""Make questions about real documents, offline: from the documentation of Python packages that are installed.

    python docs/examples/api_questions.py OUT_DIR                    # contexts of about 1,024 tokens
    python docs/examples/api_questions.py OUT_DIR --characters 8200  # of about 2,048

OUT_DIR/questions.jsonl holds contexts, each the documentation of several functions and classes of numpy, scipy,
scikit-learn and pandas, and questions about default values, for `--tasks jsonl:OUT_DIR/questions.jsonl`. Answers are
those of `inspect.signature`, where the documentation says the same. OUT_DIR/documentation.txt is the documentation of
other functions, for `--tasks ppl:OUT_DIR/documentation.txt`; document.txt and question.txt are the first context with
its first question, for `kvsearch generate`. The same versions of the packages give the same files.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
CHARACTERS = 4100  # about 1,024 tokens of SmolLM2
TEXT_CHARACTERS = 500_000
LEAST = 150  # characters of a function's documentation
FULL = 0.9  # share of a context's characters that has to be filled
MOST_COMMON = 1 / 25  # share of the questions that may have one answer, so that none is a good guess
SEED = 0
QUESTION = "What is the default value of the parameter `{parameter}` of `{function}`?"
PREFIX = "The default value of `{parameter}` is"  # without it, a small model repeats the question first
QUOTES = ("", "`", "'", '"', "`'", '`"')  # a reply may have the value in these
ENDS = ("", ".", ",")
LONGEST = 24  # characters of an answer

SECTION = re.compile(r"^([A-Z][A-Za-z ]+)\n-{3,} *$", re.MULTILINE)  # a title of numpydoc, and the line below it
TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)
ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)  # all lines of a parameter's entry but the first are indented
NAMES = re.compile(r"(\w+) *(?::|$)", re.MULTILINE)
LITERAL = r"""'[^'\n]*'|"[^"\n]*"|\([-+\d., e]*\)|[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![\w*])"""
STATED = re.compile(rf"\b[Dd]efault(?:s|ed)?(?: value)?(?:\s+is|\s+to|:|=)*[\s`]*(?:\w+=)?({LITERAL})")


@dataclass(frozen=True)
class Default:
    """A default value that documentation states as the signature has it, in all the ways to write it."""

    parameter: str
    spellings: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """The documentation of a function or class, the names of its parameters, and defaults to ask for."""

    name: str
    text: str
    parameters: frozenset[str]
    stated: tuple[Default, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT_DIR", help="where both files are written")
    for name, default, meaning in (
        ("--characters", CHARACTERS, "characters of a context, about 3.5 times its tokens"),
        ("--contexts", 120, "contexts, at most"),
        ("--questions", 4, "questions about a context"),
        ("--text", TEXT_CHARACTERS, "characters of documentation.txt, at most"),
    ):
        parser.add_argument(name, type=read_count, default=default, metavar="N", help=f"{meaning} [default: {default}]")
    parser.add_argument(
        "--swap-contexts", action="store_true",
        help="ask every question about a context that does not have its answer: what is right then is guessed",
    )  # fmt: skip
    options = parser.parse_args()
    members = find_members(HOLDERS)
    entries = [read_entry(name, member, options.characters // 3) for name, member in members.items()]
    documented = [entry for entry in entries if entry is not None]
    random.Random(SEED).shuffle(documented)
    rows, used = make_questions(documented, options.characters, options.questions, options.contexts)
    text = "\n\n".join(entry.text for entry in documented if entry.name not in used)[: options.text]
    if options.swap_contexts:
        rows = swap_contexts(rows)
    if not rows:
        sys.exit(f"no context of {options.characters} characters can be made of numpy, scipy, scikit-learn and pandas")
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (options.folder / "questions.jsonl").write_text(lines, encoding="utf-8")
    (options.folder / "documentation.txt").write_text(text, encoding="utf-8")
    first = rows[0]
    (options.folder / "document.txt").write_text(first["context"], encoding="utf-8")
    (options.folder / "question.txt").write_text(f"{first['question']}\n{first['prefix']}", encoding="utf-8")
    contexts = len({row["context"] for row in rows})
    print(f"questions.jsonl: {len(rows)} questions about {contexts} contexts of {len(used)} functions and classes")
    print(f"documentation.txt: {len(text):,} characters about others")
    print("document.txt, question.txt: the first context, and its first question")


def read_count(text: str) -> int:
    """Return the value of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def find_members(holders: tuple[str, ...]) -> dict[str, Any]:
    """Return public functions and classes by their dotted names; of those of one last name, the first."""
    found: dict[str, Any] = {}
    taken: set[str] = set()
    for holder_name in holders:
        try:
            holder = pkgutil.resolve_name(holder_name)
        except (ImportError, AttributeError):
            print(f"left out, as it is not in what is installed: {holder_name}")
            continue
        names = getattr(holder, "__all__", None) if inspect.ismodule(holder) else None
        for name in sorted(set(names or dir(holder)) - taken):
            try:
                with warnings.catch_warnings(action="ignore"):  # of names that are deprecated
                    member = getattr(holder, name)
            except (ImportError, AttributeError):  # of names that are experimental
                continue
            if not name.startswith("_") and (inspect.isroutine(member) or inspect.isclass(member)):
                found[f"{holder_name}.{name}"] = member
                taken.add(name)
    return found


def read_entry(name: str, member: Any, characters: int) -> Entry | None:
    """Return summary, parameters and returned values of a function; parameters beyond so many characters are cut.

    None where its documentation has no parameters.
    """
    documentation = TRAILING.sub("", inspect.getdoc(member) or "")
    summary, *sections = SECTION.split(documentation)
    by_title = dict(zip(sections[::2], sections[1::2], strict=True))
    signature: Mapping[str, inspect.Parameter]
    try:
        signature = inspect.signature(member).parameters
    except (TypeError, ValueError):  # code that is not Python's
        signature = {}
    first_paragraph = summary.strip().split("\n\n")[0]
    head = f"{name}\n\n{first_paragraph}\n\nParameters\n----------\n"
    tail = f"\n\nReturns\n-------\n{by_title['Returns'].strip()}" if "Returns" in by_title else ""
    room = characters - len(head) - len(tail)
    parameters = []
    for text in ENTRY.split(by_title.get("Parameters", "").strip()):
        shown = text.split("\n\n")[0].rstrip() + "\n"  # its first paragraph
        room -= len(shown)
        if room < 0:
            break
        parameters.append(shown)
    text = f"{head}{''.join(parameters).strip()}{tail}"
    if not parameters or len(text) < LEAST:
        return None
    defaults = (read_default(text, signature) for text in parameters)
    return Entry(name, text, frozenset(signature), tuple(default for default in defaults if default))


def read_default(text: str, signature: Mapping[str, inspect.Parameter]) -> Default | None:
    """Return the default that the entry of a parameter states; None unless it is the signature's and worth asking."""
    name = NAMES.match(text)
    stated = STATED.search(text)
    if name is None or stated is None or name[1] not in signature or name[1] in HARDLY_VARY:
        return None
    value = signature[name[1]].default
    try:
        if type(value) not in (str, int, float, tuple) or ast.literal_eval(stated[1]) != value:
            return None
    except (ValueError, SyntaxError):
        return None
    spellings = spell(value, stated[1])
    return Default(name[1], spellings) if 1 < len(spellings[0]) <= LONGEST else None


def spell(value: Any, stated: str) -> tuple[str, ...]:
    """Return the ways to write a value, the documentation's own first."""
    if isinstance(value, str):
        return (value,)
    spellings = [stated.rstrip("."), repr(value)]
    if isinstance(value, int | float):
        spellings += [f"{value:g}", f"{value:.12f}".rstrip("0").rstrip(".")]
    return tuple(spelling for spelling in dict.fromkeys(spellings) if ast.literal_eval(spelling) == value)


def make_questions(
    entries: Sequence[Entry], characters: int, questions: int, contexts: int
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return rows of questions about contexts of about so many characters, and the names of what is in a context."""
    left = sorted(entries, key=lambda entry: not entry.stated)  # what can be asked about goes first
    rows: list[dict[str, Any]] = []
    used: set[str] = set()
    asked = Counter[str]()
    most = max(round(MOST_COMMON * questions * contexts), 3)
    order = random.Random(SEED)
    made = 0
    while made < contexts and left:
        group = fill_context(left, characters, questions)
        order.shuffle(group)
        context = "\n\n".join(entry.text for entry in group)
        if len(context) < FULL * characters:
            break
        rest = [(entry, default) for entry, default in askable(group) if asked[default.spellings[0]] < most]
        if not rest:
            left = left[1:]
            continue
        made += 1
        left = [entry for entry in left if entry not in group]
        used.update(entry.name for entry in group)
        for entry, default in sorted(rest, key=lambda pair: asked[pair[1].spellings[0]])[:questions]:
            asked[default.spellings[0]] += 1
            names = {"parameter": default.parameter, "function": entry.name}
            row = {"context": context, "question": QUESTION.format(**names), "prefix": PREFIX.format(**names)}
            rows.append({**row, "answers": list(quote(default.spellings)), "metric": "exact", "max_new_tokens": 16})
    return rows, used


def quote(spellings: Sequence[str]) -> Iterator[str]:
    """Yield every way to begin a reply with a value; the metric `exact` compares whole words."""
    for quotes in QUOTES:
        for spelling in spellings:
            for end in ENDS:
                yield f"{quotes}{spelling}{quotes[::-1]}{end}"


def swap_contexts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the questions about every context as questions about the next one."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    following = dict(zip(contexts, [*contexts[1:], *contexts[:1]], strict=True))
    return [{**row, "context": following[row["context"]]} for row in rows]


def fill_context(entries: Iterable[Entry], characters: int, questions: int) -> list[Entry]:
    """Return the first entries that fit into so many characters: some to ask about, and others that share nothing."""
    group: list[Entry] = []
    for entry in entries:
        room = characters - len(entry.text) - 2
        if room < 0:
            continue
        before, after = (len(list(askable(entries))) for entries in (group, [*group, entry]))
        if (before < questions and before < after) if entry.stated else before == after:
            group.append(entry)
            characters = room
    return group


def askable(group: Sequence[Entry]) -> Iterator[tuple[Entry, Default]]:
    """Yield defaults of parameters that one function of a group has alone: first one of each function, and so on."""
    for turn in range(max((len(entry.stated) for entry in group), default=0)):
        for entry in group:
            if turn < len(entry.stated):
                default = entry.stated[turn]
                if sum(default.parameter in other.parameters for other in group) == 1:
                    yield entry, default


if __name__ == "__main__":
    main()
