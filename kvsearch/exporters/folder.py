"""A folder to deploy or to share: the plan, the weights it needs, a card, and a script that answers under it."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from kvsearch.exporters.base import CARD, Exported, Inputs, PlanExporter
from kvsearch.exporters.card import fill_template, folder_card, model_card
from kvsearch.models.loading import MODEL_CONFIG_FILE
from kvsearch.plan import Plan, canonical_json
from kvsearch.plan.saved import (
    BESIDE,
    FOLDER_PLAN,
    MODEL_KEY,
    WEIGHTS,
    check_listing,
    find_size,
    list_weights,
    read_known_weights,
)


class Folder(PlanExporter):
    """Everything of a plan in one folder, which `load_plan` reads; nothing is lost."""

    def export(self, plan: Plan, inputs: Inputs) -> Exported:
        """Make the folder; UsageError if the weights of a fitted ranking are not here."""
        places = list_weights(plan.policies, FOLDER_PLAN)
        weights = {place.name: read_known_weights(str(spec.params[WEIGHTS]))[1] for spec, place in places}
        files = {
            FOLDER_PLAN: canonical_json(plan),
            **weights,
            CARD: folder_card(plan, inputs.scores),
            "generate.py": fill_template("generate.py", model=repr(plan.model.name)),
        }
        usage = ("python {path}/generate.py --help", "kvsearch.attach(model, kvsearch.load_plan({path!r}))")
        return Exported(files, usage, total=plan.total)


class ModelFolder(Folder):
    """A plan, its weights and a card in the folder of its model, whose `config.json` names it by its size."""

    def export(self, plan: Plan, inputs: Inputs) -> Exported:
        """Make what lies beside the model.

        Raises:
            UsageError: the weights of a fitted ranking are not here, or the folder's card cannot be read.
        """
        listed = dict(check_listing(inputs.config.get(MODEL_KEY), "the model"))
        size = find_size(plan)
        path = f"{BESIDE}/plan-{size}.json" if listed else f"{BESIDE}/{FOLDER_PLAN}"
        path = f"{BESIDE}/{Path(listed[size]['file']).name}" if size in listed else path
        places = list_weights(plan.policies, path)
        weights = {f"{BESIDE}/{place.name}": read_known_weights(str(spec.params[WEIGHTS]))[1] for spec, place in places}
        content = canonical_json(plan)
        listed[size] = {"file": path, "sha256": sha256(content).hexdigest()}
        config = json.dumps({**inputs.config, MODEL_KEY: listed}, indent=2, sort_keys=True) + "\n"
        files = {path: content, **weights, CARD: model_card(plan, path, inputs), MODEL_CONFIG_FILE: config.encode()}
        usage = ("kvsearch generate {path} --prompt ...", "kvsearch.attach(model)")
        return Exported(
            files, usage, total=plan.total, updated=(*weights, CARD, MODEL_CONFIG_FILE), model=inputs.unsaved
        )
