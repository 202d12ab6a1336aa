"""What mkdocs.yml adds to docs/ when the site is built: pages that lie elsewhere in the repository."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
NAMED_FENCE = re.compile(r"^(```\w+) [\w.]+$", re.MULTILINE)  # a name for tests: ```json plan
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "data/bundled/README.md", "data/bundled-redundant/README.md")


def on_files(files: Files, config: Any) -> Files:
    """Return the files of docs/ with the pages that lie elsewhere, whose links to docs/ follow them."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page of docs/ as the site needs it: links to pages that lie elsewhere, fences without names."""
    for page in PAGES:
        markdown = markdown.replace(f"](../{page}", f"]({page}")
    return NAMED_FENCE.sub(r"\1", markdown)


class Verbs(griffe.Extension):  # type: ignore[misc]  # griffe is not followed
    """Gives verbs the parameters that they take, which come from the options of their command."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if not any(str(decorator.value).startswith("job(") for decorator in func.decorators):
            return
        verb = getattr(import_module(func.parent.path), func.name)
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    parameter.name,
                    kind=griffe.ParameterKind(parameter.kind.description),
                    default=None if parameter.default is parameter.empty else repr(parameter.default),
                )
                for parameter in inspect.signature(verb).parameters.values()
            )
        )
