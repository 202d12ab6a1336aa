"""Whatever is in a file, it is read, or refused in a message that names it: mutated, torn, and what once failed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from random import Random

import pytest

from kvsearch.core.errors import InternalError, KvsearchError
from tests.torture.readers import COPIED, HAND_WRITTEN, WRITTEN, Reader, show

MUTATIONS = 60  # of every kind that users write
CUTS = 12  # of every kind
REGRESSIONS = sorted(path for path in (Path(__file__).parent / "regressions").glob("*/*") if path.is_file())
WORD = re.compile(rb"[A-Za-z0-9_.+-]+")
# what is put in the place of a word: numbers at and beyond the edges, other types, YAML's own, odd texts
HOSTILE = tuple(word.encode("utf-8", "surrogatepass") for word in (
    "", "0", "-1", "0.5", "2147483648", "9223372036854775808", "1e999", "-1e308", "NaN", "Infinity", "9" * 5000, "null",
    "true", "[]", "{}", "[[0]]", '{"a": 1, "a": 2}', "[" * 1500, '"\\ud800"', '"\\u0000"', "\ud800", "\x1b[31m",
    "\u202e", "a" * 5000, "../../etc/passwd", "{question}", "{0}", "snapkv", "probe", "!!int ''", "!!timestamp ''",
    "&a [*a]", "<<: {a: 1}", "0-99999999999", "1:60:61", "~", "---", "? a",
))  # fmt: skip


def mutate(data: bytes, random: Random) -> bytes:
    """Put a hostile word in the place of one, or change a line or a byte."""
    place = random.randrange(len(data) + 1)
    change = random.randrange(6)
    words = list(WORD.finditer(data))
    if change <= 2 and words:
        old = random.choice(words)
        return data[: old.start()] + random.choice(HOSTILE) + data[old.end() :]
    if change == 3:
        lines = data.split(b"\n")
        first, second = random.randrange(len(lines)), random.randrange(len(lines))
        lines[first] = random.choice((lines[second], b"", b" " + lines[first], b"{}", b"null"))
        return b"\n".join(lines)
    if change == 4:
        return data[:place] + bytes([random.randrange(256)]) + data[place + 1 :]
    return data[:place] + data[place : place + random.choice((1, 8, 64))] * random.choice((0, 2)) + data[place + 64 :]


def read(reader: Reader, data: bytes, folder: Path) -> str:
    """Read a file; return the message of its refusal, empty if it is taken. Any other error is a failure."""
    path = folder / reader.file
    path.write_bytes(data)
    if reader.beside:
        (folder / reader.beside).write_text("a story .")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)  # numbers that overflow in what was taken for valid
        try:
            reader.read(path)
        except InternalError:
            raise
        except KvsearchError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", [*HAND_WRITTEN, *COPIED, *WRITTEN])
def test_valid_files_are_taken_and_torn_ones_are_taken_or_refused(name: str, tmp_path: Path) -> None:
    reader = {**HAND_WRITTEN, **COPIED, **WRITTEN}[name]
    random = Random(name)
    for data in reader.valid():
        assert read(reader, data, tmp_path) == ""
        for _ in range(CUTS):
            size = random.randrange(len(data))
            for torn in (data[:size], data[:size] + bytes(len(data) - size)):
                read(reader, torn, tmp_path)


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_mutated_files_are_taken_or_refused_by_name(name: str, tmp_path: Path) -> None:
    reader, random = HAND_WRITTEN[name], Random(name)
    outcomes = set()
    for _ in range(MUTATIONS):
        data = mutate(random.choice(reader.valid()), random)
        problem = read(reader, data, tmp_path)
        outcomes.add(problem != "")
        if problem:
            assert any(word in problem for word in (reader.file, str(tmp_path), "policy ", "task ")), (problem, data)
            assert all(line.startswith("  ") for line in problem.splitlines()[1:]), problem
    assert True in outcomes


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_failed_does_not_fail_again(path: Path, tmp_path: Path) -> None:
    kind = path.parent.name
    kinds = {**HAND_WRITTEN, **COPIED}
    names = {"profile": "profile.safetensors", "result": "report.json", "validation": "validation.json"}
    reader = kinds.get(kind) or Reader(names[kind.partition("-")[0]], list, show)
    read(reader, path.read_bytes(), tmp_path)
