"""Print the shape of the code, with the standard library only:  python scripts/shape.py [ROOT] [--json | --check]

Definitions; every *.py below ROOT outside hidden folders counts:
  code           lines that hold more than a docstring or a comment; a blank line within a string is not code
  functions      every `def`, methods and nested ones too, from `def` (decorators left out) to the last line
  median, p90    the smallest length that half (nine tenths) of them do not exceed
  helpers        functions and methods whose name starts with one underscore. Called from one place: one call, one read
                 property, or handed on once. `_f` is the function of that name in its file, else anywhere; `x._f` the
                 method of the class around it, else of its file, else (calls only) of any file. No use, no entry
  imports        name one file, not the packages around it: `from package import name` is package/name.py where that
                 exists, else package/__init__.py. Imports under `if TYPE_CHECKING` and modules named in strings do not
                 count but as lines, and files outside ROOT are not seen
  circles        files that import each other, directly or through others
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The most that --check, which `make lint` calls, lets the package have: about 5% above the figures of the day on which
# a limit was set, so that honest growth does not fail the build. Lower it when a figure has fallen for good.
GATES = {
    "code lines": 43_500,
    "files": 345,
    "records": 385,
    "public class names used twice": 0,
    "module names used more than twice": 3,
    "private helpers of at most 6 lines with one caller": 42,
    "imports inside functions of commands and cli": 135,
    "assignments of a tuple to a tuple": 55,
    "lists repeated by a condition": 0,
    "docstrings that only say See": 0,
    "places that raise UsageError": 425,
    "import circles": 0,
    "banned phrases in docstrings": 0,
    "banned local names": 10,
    "public constants and aliases in several files": 0,
    "test lines": 42_500,
}

# Words that say nothing to a stranger; CONTRIBUTING.md has the terms to use in their place. The limits on their counts
# only go down: they have no air. What is left of locals are fields of files and records.
BANNED_PHRASES = re.compile(
    r"\b(what (is|was|were) (asked|told|there)|(is|are|was|were) (asked|told) (of|by)|what there is|"
    r"that of all|those of|of which|none of (ours|it|its))\b"
)
BANNED_LOCALS = frozenset({"asked", "found", "most", "one", "told", "those"})

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

Around = tuple[ast.AST, ...]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Import = ast.Import | ast.ImportFrom
Report = dict[str, Mapping[str, Sequence[int | str]]]


@dataclass(frozen=True)
class Source:
    """Hold one file: path below ROOT, name as a module, lines, and every node with those around it, innermost first."""

    path: str
    module: str
    rows: list[str]
    nodes: dict[ast.AST, Around]


@dataclass(frozen=True)
class Helper:
    """Hold a private function or method; `owner` is the class of a method, else empty."""

    path: str
    owner: str
    node: Function


def main() -> None:
    """Read the arguments and print the figures."""
    parser = argparse.ArgumentParser(description="Print the shape of the code.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent / "kvsearch")
    parser.add_argument("--json", action="store_true", help="print JSON, with each helper and each file that counts")
    parser.add_argument("--check", action="store_true", help="compare with the limits that are set here; exit code 1")
    options = parser.parse_args()
    sources = read(options.root.resolve())
    if not sources:
        parser.error(f"no Python files below {options.root}")
    if options.check:
        sys.exit(check(gated(sources, count_lines(options.root.resolve().parent / "tests"))))
    print(json.dumps(measure(sources), indent=2) if options.json else table(measure(sources)))


def read(root: Path) -> list[Source]:
    """Parse every file below `root`; modules are named from the outermost package around it."""
    top = next(folder for folder in (root, *root.parents) if not (folder / "__init__.py").is_file())
    sources = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "/." not in f"/{name}":
            with tokenize.open(path) as file:
                rows = file.readlines()
            module = ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")
            sources.append(Source(name, module, rows, dict(walk(ast.parse("".join(rows), filename=str(path)), ()))))
    return sources


def walk(node: ast.AST, around: Around) -> Iterator[tuple[ast.AST, Around]]:
    """Yield a node and all below it, each with the nodes around it."""
    yield node, around
    for child in ast.iter_child_nodes(node):
        yield from walk(child, (node, *around))


def measure(sources: list[Source]) -> Report:
    """Work out every figure, under the titles that are printed."""
    nodes = [node for source in sources for node in source.nodes]
    lines = {source.path: len(source.rows) for source in sources}
    helpers, graph = called_once(sources), import_graph(sources, deferred=True)
    importers = {path: [other for other in graph if path in graph[other]] for path in graph}
    single = {path: found for path, found in importers.items() if len(found) == 1}
    return {
        "folder: files, lines, code": by_folder(sources),
        "length: number, lines, median, p90": {
            "files": spread(lines.values()),
            "functions": spread(length(node) for node in nodes if isinstance(node, Function)),
            "imports": spread(length(node) for node in nodes if isinstance(node, Import)),
            "private helpers called from one place": spread(size for [size] in helpers.values()),
            "  of these with 6 lines or fewer": spread(size for [size] in helpers.values() if size <= 6),
            "files imported by one other file": spread(lines[path] for path in single),
        },
        "public classes defined more than once": repeated_classes(sources),
        "public constants and aliases in several files": repeated_constants(sources),
        "import circles, all imports": circles(graph),
        "import circles, module-level imports": circles(import_graph(sources, deferred=False)),
        "each private helper called from one place: lines": helpers,
        "each file imported by one other file: by which": single,
    }


def check(figures: Mapping[str, int]) -> int:
    """Print every figure beside its limit; return 1 if one is above it."""
    for name, figure in figures.items():
        verdict = "ok" if figure <= GATES[name] else "ABOVE ITS LIMIT"
        print(f"{name:<52}{figure:>8,} of {GATES[name]:>8,}  {verdict}")
    return int(any(figure > GATES[name] for name, figure in figures.items()))


def count_lines(root: Path) -> int:
    """Count the lines of every file below `root`."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in root.rglob("*.py"))


def gated(sources: list[Source], test_lines: int) -> dict[str, int]:
    """Work out the figures that have limits; `test_lines` are those of the package's tests."""
    nodes = [node for source in sources for node in source.nodes]
    modules = Counter(Path(source.path).stem for source in sources if not source.path.endswith("__init__.py"))
    helpers = called_once(sources)
    shell = [source for source in sources if source.path.startswith(("commands/", "cli/"))]
    return {
        "code lines": sum(code_lines(source) for source in sources),
        "files": len(sources),
        "records": count_records([node for node in nodes if isinstance(node, ast.ClassDef)]),
        "public class names used twice": len(repeated_classes(sources)),
        "module names used more than twice": sum(count > 2 for count in modules.values()),
        "private helpers of at most 6 lines with one caller": sum(lines <= 6 for [lines] in helpers.values()),
        "imports inside functions of commands and cli": sum(
            isinstance(node, Import) and any(isinstance(outer, Function) for outer in source.nodes[node])
            for source in shell
            for node in source.nodes
        ),
        "assignments of a tuple to a tuple": sum(is_tuple_to_tuple(node) for node in nodes),
        "lists repeated by a condition": sum(is_repeated_list(node) for node in nodes),
        "docstrings that only say See": sum(only_says_see(node) for node in nodes),
        "places that raise UsageError": sum(raises(node, "UsageError") for node in nodes),
        "import circles": len(circles(import_graph(sources, deferred=True))),
        "banned phrases in docstrings": sum(len(find_banned_phrases(node)) for node in nodes),
        "banned local names": sum(binds_banned_name(node) for node in nodes),
        "public constants and aliases in several files": len(repeated_constants(sources)),
        "test lines": test_lines,
    }


def count_records(classes: list[ast.ClassDef]) -> int:
    """Count the dataclasses, NamedTuples and models of data, and what inherits from one of them."""
    names = {"NamedTuple", "TypedDict", "BaseModel"}
    records: set[ast.ClassDef] = set()
    while more := [node for node in classes if node not in records and is_record(node, names)]:
        records.update(more)
        names.update(node.name for node in more)
    return len(records)


def is_record(node: ast.ClassDef, bases: set[str]) -> bool:
    """Return whether a class is a dataclass or has one of these bases."""
    decorators = [outer.func if isinstance(outer, ast.Call) else outer for outer in node.decorator_list]
    return "dataclass" in map(name_of, decorators) or any(name_of(base) in bases for base in node.bases)


def is_tuple_to_tuple(node: ast.AST) -> bool:
    """Return whether a statement assigns several values to several names."""
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def is_repeated_list(node: ast.AST) -> bool:
    """Return whether an expression takes a list or nothing of it, by multiplying it with a condition."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List)):
        return False
    called = isinstance(node.right, ast.Call) and name_of(node.right.func) == "bool"
    return called or isinstance(node.right, ast.Compare | ast.BoolOp | ast.UnaryOp)


def only_says_see(node: ast.AST) -> bool:
    """Return whether a docstring does nothing but name another place."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    text = ast.get_docstring(node) or ""
    return text.startswith("See `") and "\n" not in text


def find_banned_phrases(node: ast.AST) -> list[str]:
    """List the banned phrases in a docstring."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    text = " ".join((ast.get_docstring(node) or "").lower().split())
    return [match.group() for match in BANNED_PHRASES.finditer(text)]


def binds_banned_name(node: ast.AST) -> bool:
    """Return whether a node binds a variable or parameter to a name that does not say what it holds."""
    if isinstance(node, ast.arg):
        return node.arg in BANNED_LOCALS
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in BANNED_LOCALS


def raises(node: ast.AST, error: str) -> bool:
    """Return whether a statement raises an error of this name."""
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and name_of(node.exc.func) == error


def length(node: ast.stmt) -> int:
    """Count the lines of a statement."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def spread(lengths: Iterable[int]) -> list[int]:
    """Give the number of lengths, their sum, their median and their 90th percentile; 0 where there are none."""
    ordered = sorted(lengths)
    middle, high = (ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0 for share in (0.5, 0.9))
    return [len(ordered), sum(ordered), middle, high]


def by_folder(sources: list[Source]) -> dict[str, list[int]]:
    """Sum files, lines and code lines, of all and of each top-level folder; "." holds the files of ROOT itself."""
    figures: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for source in sources:
        row = (1, len(source.rows), code_lines(source))
        figures["all"].append(row)
        figures[source.path.split("/")[0] if "/" in source.path else "."].append(row)
    return {name: [sum(column) for column in zip(*rows, strict=True)] for name, rows in figures.items()}


def code_lines(source: Source) -> int:
    """Count the lines with anything on them but docstrings and comments."""
    documented: set[int] = set()
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            documented.update(range(node.body[0].lineno, node.body[0].lineno + length(node.body[0])))
    held: set[int] = set()
    for token in tokenize.generate_tokens(iter(source.rows).__next__):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type not in LAYOUT and not (token.type == tokenize.STRING and documented.issuperset(lines)):
            held.update(line for line in lines if source.rows[line - 1].strip())
    return len(held)


def repeated_classes(sources: list[Source]) -> dict[str, list[str]]:
    """Find the public classes of one name in several places."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{source.path}:{node.lineno}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def repeated_constants(sources: list[Source]) -> dict[str, list[str]]:
    """Find the public constants and type aliases of one name in several files: uppercase, or capitalised."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in source.nodes:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(source.nodes[node][0], ast.Module):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if name_of(target)[:1].isupper():
                    places[name_of(target)].append(f"{source.path}:{node.lineno}")
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def called_once(sources: list[Source]) -> dict[str, list[int]]:
    """Find the private helpers with one use, and the lines of each."""
    known: defaultdict[str, list[Helper]] = defaultdict(list)
    for helper in (helper for source in sources for helper in helpers_of(source)):
        known[helper.node.name].append(helper)
    uses = Counter(helper for source in sources for node in source.nodes for helper in used(node, source, known))
    return {f"{one.path}:{one.node.lineno} {one.node.name}": [length(one.node)] for one in uses if uses[one] == 1}


def helpers_of(source: Source) -> Iterator[Helper]:
    """Yield the functions and methods of a file whose name starts with one underscore."""
    for node, around in source.nodes.items():
        if isinstance(node, Function) and node.name.startswith("_") and not node.name.startswith("__"):
            owner = around[0].name if isinstance(around[0], ast.ClassDef) else ""
            yield Helper(source.path, owner, node)


def used(node: ast.AST, source: Source, known: dict[str, list[Helper]]) -> list[Helper]:
    """List the helpers that a node uses: of those with its name, the nearest."""
    if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return []
    method, around = isinstance(node, ast.Attribute), source.nodes[node]
    pool = [helper for helper in known.get(name_of(node), []) if bool(helper.owner) == method]
    here = [helper for helper in pool if helper.path == source.path]
    owner = next((outer.name for outer in around if isinstance(outer, ast.ClassDef)), "")
    own = [helper for helper in here if helper.owner == owner]
    called = isinstance(around[0], ast.Call) and around[0].func is node
    return own or here or (pool if called or not method else [])


def name_of(node: ast.AST) -> str:
    """Take the last name of `name` or `x.name`; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def import_graph(sources: list[Source], deferred: bool) -> dict[str, set[str]]:
    """Map each file to the others that it imports; `deferred` counts imports within functions too."""
    paths = {source.module: source.path for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        imports = [node for node in source.nodes if isinstance(node, Import) and runs(node, source, deferred)]
        named = {name for node in imports for name in imported(node, source, paths)}
        graph[source.path] = {paths[name] for name in named if name in paths} - {source.path}
    return graph


def runs(node: Import, source: Source, deferred: bool) -> bool:
    """Tell whether an import ever runs or, without `deferred`, runs when its file is imported."""
    for inner, outer in zip((node, *source.nodes[node]), source.nodes[node], strict=False):
        hidden = isinstance(outer, ast.If) and name_of(outer.test) == "TYPE_CHECKING" and inner in outer.body
        if hidden or (isinstance(outer, Function) and not deferred):
            return False
    return True


def imported(node: Import, source: Source, paths: dict[str, str]) -> list[str]:
    """List the modules that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    parts = source.module.split(".") if node.level else []
    around = parts[: len(parts) - node.level + source.path.endswith("__init__.py")]
    base = ".".join([*around, node.module] if node.module else around)
    return [name if (name := f"{base}.{alias.name}") in paths else base for alias in node.names]


def circles(graph: dict[str, set[str]]) -> dict[str, list[str]]:
    """Find the groups of files that reach each other, each under its first file."""
    reach = {path: set(targets) for path, targets in graph.items()}
    for middle in graph:
        for path in graph:
            reach[path] |= reach[middle] if middle in reach[path] else set()
    groups = {path: sorted(other for other in reach[path] if path in reach[other]) for path in graph}
    return {path: group[1:] for path, group in groups.items() if group[:1] == [path]}


def table(report: Report) -> str:
    """Lay the figures out as text; what is listed for each one is left to `--json`."""
    rows = []
    for title, figures in report.items():
        head, _, columns = title.partition(": ")
        if columns and not head.startswith("each "):
            rows += ["", f"{head:<40}" + "".join(f"{column:>12}" for column in columns.split(", "))]
            rows += [f"{name:<40}" + "".join(f"{cell:>12,}" for cell in cells) for name, cells in figures.items()]
        elif not columns:
            rows += ["", f"{head}: {len(figures)}"]
            rows += [f"  {name:<16} {', '.join(map(str, cells))}" for name, cells in figures.items()]
    return "\n".join(rows[1:])


if __name__ == "__main__":
    main()
