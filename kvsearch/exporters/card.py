"""The card of a plan: README.md with front matter of the hub, which huggingface_hub writes and reads."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvsearch.core.errors import UsageError
from kvsearch.core.parsing import describe_fault
from kvsearch.core.printed import escape_markdown, format_command_line
from kvsearch.exporters.base import CARD_FILE, ExportInputs, PlanScores
from kvsearch.models.gguf import GGUF_SUFFIX
from kvsearch.models.loading import BUNDLED, HUB_ID
from kvsearch.models.real import REAL_MODELS
from kvsearch.plan import ModelFingerprint, Plan
from kvsearch.plan.origin import USES
from kvsearch.plan.saved import find_size

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, ModelCardData

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
