"""A folder to deploy or to share: the plan, the weights it needs, a card, and a script that answers under it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from kvsearch.core.errors import EnvironmentFault
from kvsearch.core.files import TEMPORARY
from kvsearch.core.parsing import describe_fault
from kvsearch.exporters.base import CARD_FILE, ExportedFiles, ExportInputs, PlanExporter
from kvsearch.exporters.card import fill_template, render_folder_card, render_model_card
from kvsearch.models.loading import MODEL_CONFIG_FILE, LoadedModel
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

REQUIREMENTS = b"torch>=2.8\ntransformers>=5.18\n"  # of what `custom_generate` needs, as transformers reads it


class Folder(PlanExporter):
    """Everything of a plan in one folder, which `load_plan` reads; nothing is lost."""

    def export(self, plan: Plan, inputs: ExportInputs) -> ExportedFiles:
        """Make the folder; UsageError if the weights of a fitted ranking are not here."""
        written = {
            **self.plan_files(plan),
            CARD_FILE: render_folder_card(plan, inputs.scores),
            "generate.py": fill_template("generate.py", model=repr(plan.model.name)),
        }
        usage = ("python {path}/generate.py --help", "kvsearch.attach(model, kvsearch.load_plan({path!r}))")
        return ExportedFiles(written, usage, total=plan.total)

    def plan_files(self, plan: Plan, path: str = FOLDER_PLAN) -> dict[str, bytes]:
        """Return the plan, at a path in the folder, and its weights beside it; UsageError if these are not here."""
        places = list_weights(plan.policies, path)
        weights = {place.as_posix(): read_known_weights(str(spec.params[WEIGHTS]))[1] for spec, place in places}
        return {path: canonical_json(plan), **weights}


class CustomGenerate(Folder):
    """Everything of a plan in one folder, with code that transformers runs in place of its own `generate`.

    Plans without fitted rankings need transformers alone, others the package kvsearch; nothing is lost.
    """

    def export(self, plan: Plan, inputs: ExportInputs) -> ExportedFiles:
        """Make the folder; UsageError if the weights of a fitted ranking are not here."""
        from kvsearch.exporters.planned_generate import needs_kvsearch

        reason = needs_kvsearch(plan.model_dump(mode="json"))
        needs = "torch and transformers alone" if reason is None else f"the package kvsearch: {reason}"
        written = {
            **self.plan_files(plan),
            CARD_FILE: render_folder_card(plan, inputs.scores, needs),
            "custom_generate/generate.py": files("kvsearch.exporters").joinpath("planned_generate.py").read_bytes(),
            "custom_generate/requirements.txt": REQUIREMENTS,
        }
        call = "model.generate(**inputs, custom_generate={path!r}, trust_remote_code=True)"
        return ExportedFiles(written, (call, f"needs {needs}"), total=plan.total)


class ModelFolder(Folder):
    """A plan, its weights and a card in the folder of its model, whose `config.json` names it by its size."""

    def export(self, plan: Plan, inputs: ExportInputs) -> ExportedFiles:
        """Make what lies beside the model.

        Raises:
            UsageError: the weights of a fitted ranking are not here, or the folder's card cannot be read.
        """
        listed = dict(check_listing(inputs.config.get(MODEL_KEY), "the model"))
        size = find_size(plan)
        path = f"{BESIDE}/plan-{size}.json" if listed else f"{BESIDE}/{FOLDER_PLAN}"
        path = f"{BESIDE}/{Path(listed[size]['file']).name}" if size in listed else path
        plan_files = self.plan_files(plan, path)
        listed[size] = {"file": path, "sha256": sha256(plan_files[path]).hexdigest()}
        config = json.dumps({**inputs.config, MODEL_KEY: listed}, indent=2, sort_keys=True) + "\n"
        written = {
            **plan_files,
            CARD_FILE: render_model_card(plan, path, inputs),
            MODEL_CONFIG_FILE: config.encode(),
        }
        updated = tuple(name for name in written if name != path)
        usage = ("kvsearch generate {path} --prompt ...", "kvsearch.attach(model)")
        return ExportedFiles(written, usage, total=plan.total, updated=updated, model=inputs.unsaved)


# --- the model itself, where its folder is new ----------------------------------------------------------------------


def make_saved_config(model: Any) -> dict[str, Any]:
    """Return what `save_pretrained` writes into the `config.json` of a model of transformers."""
    config = deepcopy(model.config)
    config.dtype = model.dtype
    config.architectures = [type(model).__name__]
    content: dict[str, Any] = json.loads(config.to_json_string())
    return content


@contextmanager
def save_files(loaded: LoadedModel, folder: Path) -> Iterator[list[Path]]:
    """Yield the files of a model, in the dtype that it was loaded in; what is not moved on into `folder` goes again.

    Raises:
        EnvironmentFault: they cannot be written.
    """
    with TemporaryDirectory(dir=folder, prefix=TEMPORARY) as made:
        try:
            loaded.model.save_pretrained(made)
            loaded.tokenizer.bare.save_pretrained(made)
        except (OSError, SafetensorError) as error:
            raise EnvironmentFault(
                f"the model cannot be saved in {folder}: {describe_fault(error)}: free some space or choose another "
                "folder, then give the same command again"
            ) from error
        yield sorted(Path(made).iterdir())
