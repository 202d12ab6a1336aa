"""A folder to deploy or to share: the plan, the weights it needs, a card, and a script that answers under it.

The card is README.md with front matter of the hub, which huggingface_hub writes and reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from safetensors import SafetensorError

from kvsearch.core.errors import EnvironmentFault, UsageError
from kvsearch.core.files import TEMPORARY
from kvsearch.core.parsing import describe_fault
from kvsearch.core.printed import escape_markdown, format_command_line
from kvsearch.exporters.base import CARD_FILE, ExportedFiles, ExportInputs, PlanExporter, PlanScores
from kvsearch.models.gguf import GGUF_SUFFIX
from kvsearch.models.loading import BUNDLED, HUB_ID, MODEL_CONFIG_FILE, LoadedModel
from kvsearch.models.real import REAL_MODELS
from kvsearch.plan import ModelFingerprint, Plan, canonical_json
from kvsearch.plan.origin import USES
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

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, ModelCardData

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


# --- the card --------------------------------------------------------------------------------------------------------

CARD_TAGS = ("kvsearch", "kv-cache", "kv-cache-compression")
CARD_TASK = "text-generation"
METRIC_DECIMALS = 4  # decimals of a metric
PLAN_ARGUMENT = "plan"  # the size of the plan that a metric of the front matter is of, among its arguments


def render_folder_card(plan: Plan, scores: PlanScores | None, needs: str | None = None) -> bytes:
    """Render the card of a folder that holds a plan and no model.

    `needs` says what code of transformers' `custom_generate` that lies there needs; None: there is none.
    """
    command = _command("evaluate", plan.model.name, "--plan", "FOLDER", "--tasks", "jsonl:YOUR.jsonl")
    body = fill_template(
        "README.md", **_collect_facts(plan, scores), name=_short_name(plan.model), command=command, needs=needs
    )
    card, data = _parse_card(body.decode())
    data.library_name = "kvsearch" if needs is None else "transformers"
    data.base_model = find_hub_id(plan.model)
    data.tags = [*CARD_TAGS, *([] if needs is None else ["custom_generate"])]  # by which the hub lists such code
    _add_scores(data, plan, scores)
    return str(card).encode()


def render_model_card(plan: Plan, path: str, inputs: ExportInputs) -> bytes:
    """Render the card of a model's folder with a section about the plan at `path`; an existing card is extended.

    Raises:
        UsageError: the front matter of the card that is there cannot be read.
    """
    if inputs.card is None:
        source = plan.model if inputs.unsaved is None else inputs.unsaved.fingerprint
        real = REAL_MODELS.get(source.name)
        file = _short_name(source) if real is None else real.file
        about = fill_template(
            "model.md", name=_short_name(source), dtype=None if inputs.unsaved is None else source.dtype, weights=file,
            is_gguf=file.lower().endswith(GGUF_SUFFIX), licence=None if real is None else real.licence,
        )  # fmt: skip
        card, data = _parse_card(about.decode())
        data.library_name = "transformers"
        data.pipeline_tag = CARD_TASK
        data.base_model = find_hub_id(source) or find_hub_id(plan.model)
    else:
        card, data = _parse_card(inputs.card)
    data.tags = _merge_lists(data.tags, CARD_TAGS)
    _add_scores(data, plan, inputs.scores)
    size = find_size(plan)
    command = _command("generate", "FOLDER", "--plan", f"FOLDER/{path}", "--context", "@FILE", "--prompt", "...")
    section = fill_template("plan.md", **_collect_facts(plan, inputs.scores), size=size, command=command).decode()
    begin, *_, end = section.splitlines()
    there = re.compile(rf"{re.escape(begin)}\n.*?{re.escape(end)}\n?", re.DOTALL)
    card.text, replaced = there.subn(lambda _: section, card.text)
    if not replaced:
        card.text = f"{card.text.rstrip()}\n\n{section}"
    return str(card).encode()


def find_hub_id(model: ModelFingerprint) -> str | None:
    """Find the id of a model on the hub; None for local folders or files and bundled models."""
    if (real := REAL_MODELS.get(model.name)) is not None:
        return real.hub
    is_ours = model.name in BUNDLED or model.name.lower().endswith(GGUF_SUFFIX)
    is_id = HUB_ID.fullmatch(model.name) and (model.revision is not None or not Path(model.name).exists())
    return model.name if is_id and not is_ours else None


def fill_template(file: str, **values: Any) -> bytes:
    """Fill the values into a template of this package."""
    environment = Environment(
        loader=PackageLoader("kvsearch.exporters"),
        undefined=StrictUndefined,
        trim_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = lambda text: escape_markdown(str(text))
    return environment.get_template(f"{file}.jinja").render(values).encode()


def _collect_facts(plan: Plan, scores: PlanScores | None) -> dict[str, Any]:
    """Collect the facts about a plan for its card."""
    size = f"{plan.total / plan.heads:.4g} entries per kv head on average, {plan.total:,} in {plan.heads} heads"
    text = None if scores is None else scores.text
    return {"plan": plan, "model": plan.model, "origin": plan.provenance, "uses": USES, "keeps": size, "scores": text}


def _short_name(model: ModelFingerprint) -> str:
    """Return the name of a model without its directory."""
    return find_hub_id(model) or Path(model.name).name


def _command(*words: str) -> str:
    return format_command_line(["kvsearch", *words])


def _add_scores(data: ModelCardData, plan: Plan, scores: PlanScores | None) -> None:
    """Add the scores of a plan to front matter, in place of the scores of an earlier plan of this size."""
    from huggingface_hub import EvalResult

    if scores is None:
        return
    size = find_size(plan)
    results = [
        entry
        for entry in data.eval_results or ()
        if entry.metric_args is None or entry.metric_args.get(PLAN_ARGUMENT) != size
    ]
    for name, estimate in scores.metrics.items():
        arguments: dict[str, Any] = {PLAN_ARGUMENT: size, "questions": scores.questions, "contexts": estimate.contexts}
        if not math.isnan(estimate.low):
            arguments["interval_95"] = [round(end, METRIC_DECIMALS) for end in (estimate.low, estimate.high)]
        results.append(
            EvalResult(
                task_type=CARD_TASK, dataset_type=[*scores.datasets, *scores.tasks][0], dataset_split="report",
                dataset_name=", ".join(scores.tasks), metric_type=scores.metric, metric_name=name,
                metric_value=round(estimate.mean, METRIC_DECIMALS), metric_args=arguments,
            )
        )  # fmt: skip
    data.model_name = data.get("model_name") or _short_name(plan.model)
    data.eval_results = results
    data.datasets = _merge_lists(data.datasets, scores.datasets) or None


def _merge_lists(existing: str | list[str] | None, more: Sequence[str]) -> list[str]:
    """Merge a list of front matter, or a single text, with more values, each once."""
    return list(dict.fromkeys([*([existing] if isinstance(existing, str) else existing or ()), *more]))


def _parse_card(text: str) -> tuple[ModelCard, ModelCardData]:
    """Parse a card and its front matter; UsageError if it cannot be read."""
    from huggingface_hub import ModelCard, ModelCardData
    from yaml import YAMLError

    try:
        card = ModelCard(text if text.lstrip().startswith("---") else f"---\n{{}}\n---\n\n{text}")
        data = card.data
        assert isinstance(data, ModelCardData)
        if not all(isinstance(result.metric_args, dict | None) for result in data.eval_results or ()):
            raise ValueError("arguments of a metric must be an object")
        data.tags, data.datasets = (_merge_lists(there, ()) or None for there in (data.tags, data.datasets))
    except (ValueError, TypeError, AttributeError, LookupError, YAMLError) as error:
        raise UsageError(
            f"the front matter of the {CARD_FILE} beside the model cannot be read ({describe_fault(error)}): mend it, "
            "or move the file away"
        ) from error
    return card, data
