"""What is done to a document: to its bytes, to its words, to its tree. All chance is that of the `Random` given."""

from __future__ import annotations

import copy
import pickle
import re
from random import Random
from typing import Any

from tests.robustness.trees import Object, Raw, at, children, places, put

# text, as Python has it: each may be a value, a key or a part of one
TEXTS = (
    "", " ", "\u00a0", "\n", "\r", "\t", "\x00", "\x1b[2J\x1b]0;title\x07", "\u202e", "\u2028", "\x85", "\ud800",
    "\udfff", "\U0001f600", "e\u0301" * 40, "\ufeff", "nan", "inf", "-1", "1e999", "null", "true", "a" * 5_000,
    "../../etc/passwd", "/", "/dev/null", "{question}", "{0}", "%s", "[red]", "[/]", "{{", "__class__", "snapkv",
    "probe", "probe=/dev/null", "random", "full", "9" * 5_000, "=1+1", "0" * 64, "f" * 64, "0-7", "a.b", "task", "\\",
    '"', "'", "<script>", "F64", "static", "2024-13-45",
)  # fmt: skip
NUMBERS = (
    "0", "-0", "-0.0", "1", "2", "3", "-1", "7", "0.5", "1.0", "1.5", "-1.5", "99", "100", "255", "65536",
    "2147483647", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "18446744073709551616",
    "-9223372036854775809", "1e20", "1e308", "-1e308", "1e309", "1e999", "-1e999", "5e-324", "1e-320", "0.1e1",
    "1" + "0" * 400, "-1" + "0" * 400, "9" * 5_000, "NaN", "Infinity", "-Infinity", "01", "+1", "0x10", "1_000", ".5",
    "1.", "30000000", "100000000000",
)  # fmt: skip
SHAPES = (
    "null", "true", "false", "[]", "{}", "[[]]", '[""]', "[null]", "[[[0]]]", '{"": 0}', '{"a": 1, "a": 2}',
    "[" * 60 + "]" * 60, "[" * 1_500, "[" * 1_500 + "]" * 1_500, "[" * 20_000, '{"a":' * 990 + "1" + "}" * 990,
    "[0" + ", 0" * 3_000 + "]", "", "nul", "[1,]", "{1: 2}", '"\\ud800"', '"\\u0000"', '"\\x41"', '"tab\there"',
    '["__proto__"]', "[1e400]", "/* */ 1", "[0.0, -0.0]",
)  # fmt: skip
# for YAML, which has more ways to say things
YAML_WORDS = (
    "!!int ''", "!!float ''", "!!int 0x", "!!timestamp ''", "2024-13-45", "!!python/object/apply:os.system [true]",
    "!!binary 'a'", "!!set {a}", "!!omap [a: 1]", "!!null x", "!!bool maybe", "&a [*a]", "*a", "&a x", "<<: {a: 1}",
    "? a", "- a", "|\n x", ">-", "%YAML 9.9", "---", "...", "0o17", "0b", "0b2", "1:60:61", "190:20:30.15", "1__0",
    "_", ".inf", "-.INF", ".nan", "~", "yes", "=", "!", "!<a>", "@", "`", "{a: b", "[", "]", "}", "[" * 1_500,
    "{a: " * 400, "2001-12-14t21:59:43.10-05:00", "0001-01-01", "9999-99-99", "!!int 1_", "!!int '-'", "!!float '-'",
    "!!float '1:'", "!!merge x", "!!str [a]", "!!seq a", "!!map a", "!!pairs [a]", "!!int [1]", "{<<: 1}", "{<<: [1]}",
    "{[a]: 1}", "{{a: 1}: 1}", "? [a]\n: 1", "\t", "\u0085", "\x07",
    "&a [x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]", "0-99999999999", "0-2147483648", "9-3",
)  # fmt: skip
CHUNKS = (
    b"\x00", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[31m", b"\r\n", b"\n\n", b"[" * 2_000, b"{",
    b"}", b"]", b'"', b"\\", b",", b":", b"1e999", b"NaN", b"null", b"-", b"\\ud800", b"\\u0000", b"9" * 400, b"\x7f",
    b"\xe2\x80\xa8", b"&a ", b"*a ", b"!!int ",
)  # fmt: skip
_WORD = re.compile(rb"[A-Za-z0-9_.+-]+")


def mutated_bytes(data: bytes, rng: Random) -> bytes:
    """Flip, cut, insert, double or move bytes somewhere."""
    size = len(data)
    place, length = rng.randrange(size + 1), rng.choice((1, 1, 2, 4, 8, 64, 512))
    kind = rng.randrange(9)
    if kind == 0:  # one bit
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :] if place < size else data
    if kind == 1:
        return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
    if kind == 2:  # a hole
        return data[:place] + data[place + length :]
    if kind == 3:
        return data[:place] + rng.choice(CHUNKS) + data[place:]
    if kind == 4:  # twice
        return data[: place + length] + data[place:]
    if kind == 5:  # cut short
        return data[:place]
    if kind == 6:  # from elsewhere
        source = rng.randrange(size + 1)
        return data[:place] + data[source : source + length] + data[place + length :]
    if kind == 7:  # zeros, as a hole of a file system
        return data[:place] + bytes(length) + data[place + length :]
    return data + rng.choice((data, b"\n", b"x", data[place:], bytes(8)))


def mutated_words(data: bytes, rng: Random, words: tuple[str, ...] = ()) -> bytes:
    """Put another word in the place of one, whatever the format; `words` are more of them to choose from."""
    found = list(_WORD.finditer(data))
    if not found:
        return mutated_bytes(data, rng)
    old = rng.choice(found)
    pools = [NUMBERS, SHAPES, TEXTS, *([words] * 3 if words else [])]
    new = rng.choice(rng.choice(pools)).encode("utf-8", "surrogatepass") if rng.random() < 0.8 else rng.choice(found)[0]
    return data[: old.start()] + new + data[old.end() :]


def mutated_lines(data: bytes, rng: Random) -> bytes:
    """Drop, double, swap or cut lines."""
    lines = data.split(b"\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind == 0:
        del lines[one]
    elif kind == 1:
        lines.insert(other, lines[one])
    elif kind == 2:
        lines[one], lines[other] = lines[other], lines[one]
    elif kind == 3:
        lines[one] = lines[one][: rng.randrange(len(lines[one]) + 1)]
    elif kind == 4:
        lines[one] = rng.choice((b" ", b"\t", b"  ", b"- ", b"# ")) + lines[one]
    else:
        lines.insert(one, rng.choice((b"", b"{}", b"[]", b"null", b"0", b'""', b"#", b"---", b"\x00")))
    return b"\n".join(lines)


def mutated_tree(tree: Any, rng: Random) -> Any:
    """Change one thing in a tree, in place, and return the tree."""
    spots = list(places(tree))
    place = rng.choice(spots)
    kind = rng.randrange(12)
    if kind <= 3:
        return put(tree, place, hostile(at(tree, place), rng))
    if kind == 4:  # gone
        return _without(tree, place)
    if kind == 5:  # what is elsewhere
        return put(tree, place, copy.deepcopy(at(tree, rng.choice(spots))))
    if kind == 6:  # deeper, or less deep
        inner = at(tree, place)
        below = children(inner)
        wrapped = [[inner], Object([["", inner]]), Object([["a", inner]]), [inner, copy.deepcopy(inner)], *below[:1]]
        return put(tree, place, rng.choice(wrapped))
    if kind == 7:
        return put(tree, place, _reordered(at(tree, place), rng))
    if kind == 8:
        return _keyed(tree, spots, rng)
    if kind == 9:  # two things change places
        other = rng.choice(spots)
        one, two = copy.deepcopy(at(tree, place)), copy.deepcopy(at(tree, other))
        if place[: len(other)] == other or other[: len(place)] == place:
            return put(tree, place, two)
        return put(put(tree, place, two), other, one)
    return put(tree, place, _nudged(at(tree, place), rng))


def hostile(value: Any, rng: Random) -> Any:
    """Return what should not stand in the place of a value, of its own type as often as of another."""
    numbers = isinstance(value, int | float) and type(value) is not bool
    pools = [NUMBERS, TEXTS, SHAPES, NUMBERS if numbers else TEXTS]
    pool = rng.choice(pools)
    found = rng.choice(pool)
    if pool is TEXTS:
        return found if rng.random() < 0.5 or not isinstance(value, str) else _spliced(value, found, rng)
    return Raw(found)


def _spliced(value: str, found: str, rng: Random) -> str:
    place = rng.randrange(len(value) + 1)
    return value[:place] + found + value[place:]


def _nudged(value: Any, rng: Random) -> Any:
    """Return something near a value."""
    if type(value) is bool:
        return not value
    if isinstance(value, int | float) and abs(value) < 10**300:
        return rng.choice(
            (
                value + 1,
                value - 1,
                -value,
                value * 2,
                value // 2,
                float(value),
                str(value),
                value * 10**6,
                value + 0.5,
                [value],
            )
        )
    if isinstance(value, str):
        return rng.choice((value.upper(), value[:-1], f"{value}x", value * 2, f"{value} ", value[::-1]))
    if isinstance(value, list) and value:
        return type(value)(copy.deepcopy(one) for one in rng.choice((value[:1], value[:-1], value * 2, value[1:])))
    return rng.choice((0, "", [], None, False, True))


def _reordered(value: Any, rng: Random) -> Any:
    """Return a list or object with its items in another order or number; of anything else, something near it."""
    if not isinstance(value, list) or not value:
        return _nudged(value, rng)
    items = list(value)
    kind = rng.randrange(4)
    if kind == 0:
        rng.shuffle(items)
    elif kind == 1:
        items.insert(rng.randrange(len(items) + 1), copy.deepcopy(rng.choice(items)))
    elif kind == 2:
        times = rng.choice((2, 50, 400)) if len(pickle.dumps(items)) < 2_000 else 2
        items = [copy.deepcopy(one) for one in items * times]  # else a change of one would be of all
    else:
        items = []
    return type(value)(items)


def _keyed(tree: Any, spots: list[tuple[int, ...]], rng: Random) -> Any:
    """Rename, double or add a key of an object."""
    objects = [found for found in (at(tree, place) for place in spots) if isinstance(found, Object)]
    if not objects:
        return [tree]
    found = rng.choice(objects)
    names = [key for one in objects for key, _ in one] + list(rng.sample(TEXTS, 8))
    name = rng.choice(names)
    if found and rng.random() < 0.6:
        pair = rng.choice(found)
        if rng.random() < 0.3:
            found.append([pair[0], hostile(pair[1], rng)])
        else:
            pair[0] = name
    else:
        found.append([name, hostile(0, rng)])
    return tree


def _without(tree: Any, place: tuple[int, ...]) -> Any:
    if not place:
        return type(tree)() if isinstance(tree, list) else None
    parent = at(tree, place[:-1])
    del parent[place[-1]]
    return tree
