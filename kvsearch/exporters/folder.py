"""A folder to deploy or to share: the plan, the weights it needs, a card, and a script that answers under it."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvsearch.core.printed import command_line, markdown_text
from kvsearch.exporters.base import Exported, Inputs, PlanExporter
from kvsearch.models.loading import CONFIG
from kvsearch.plan import Plan, canonical_json
from kvsearch.plan.origin import USES
from kvsearch.plan.saved import (
    BESIDE,
    FOLDER_PLAN,
    MODEL_KEY,
    WEIGHTS,
    check_listing,
    known_weights,
    size_of,
    with_weights,
)


class Folder(PlanExporter):
    """Everything of a plan in one folder, which `load_plan` reads; nothing is lost."""

    def export(self, plan: Plan, inputs: Inputs) -> Exported:
        """Make the folder; UsageError if the weights of a fitted ranking are not here."""
        places = with_weights(plan.policies, FOLDER_PLAN)
        weights = {place.name: known_weights(str(spec.params[WEIGHTS]))[1] for spec, place in places}
        files = {
            FOLDER_PLAN: canonical_json(plan),
            **weights,
            "README.md": card(plan, inputs.scores),
            "generate.py": _fill("generate.py", model=repr(plan.model.name)),
        }
        usage = ("python {path}/generate.py --help", "kvsearch.attach(model, kvsearch.load_plan({path!r}))")
        return Exported(files, usage, total=plan.total)


class ModelFolder(Folder):
    """A plan and its weights in the folder of its model, whose `config.json` names it by its size."""

    def export(self, plan: Plan, inputs: Inputs) -> Exported:
        """Make what lies beside the model; UsageError if the weights of a fitted ranking are not here."""
        listed = dict(check_listing(inputs.config.get(MODEL_KEY), "the model"))
        size = size_of(plan)
        path = f"{BESIDE}/plan-{size}.json" if listed else f"{BESIDE}/{FOLDER_PLAN}"
        path = listed[size]["file"] if size in listed else path
        places = with_weights(plan.policies, path)
        weights = {f"{BESIDE}/{place.name}": known_weights(str(spec.params[WEIGHTS]))[1] for spec, place in places}
        content = canonical_json(plan)
        listed[size] = {"file": path, "sha256": sha256(content).hexdigest()}
        config = json.dumps({**inputs.config, MODEL_KEY: listed}, indent=2, sort_keys=True) + "\n"
        files = {path: content, **weights, CONFIG: config.encode()}
        usage = ("kvsearch generate {path} --prompt ...", "kvsearch.attach(model)")
        return Exported(files, usage, total=plan.total, updated=(*weights, CONFIG))


def card(plan: Plan, scores: str | None = None) -> bytes:
    """Return a card in Markdown, with the front matter of the hub; `scores` are in Markdown, too."""
    model = plan.model
    size = f"{plan.total / plan.heads:.4g} entries per kv head on average, {plan.total:,} in {plan.heads} heads"
    evaluate = ["kvsearch", "evaluate", model.name, "--plan", "FOLDER", "--tasks", "jsonl:YOUR.jsonl"]
    return _fill(
        "README.md", plan=plan, model=model, origin=plan.provenance, uses=USES, size=size,
        base_model=json.dumps(model.name), scores=scores, command=command_line(evaluate),
    )  # fmt: skip


def _fill(name: str, **values: Any) -> bytes:
    environment = Environment(
        loader=PackageLoader("kvsearch.exporters"),
        undefined=StrictUndefined,
        trim_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = lambda text: markdown_text(str(text))
    return environment.get_template(f"{name}.jinja").render(values).encode()
