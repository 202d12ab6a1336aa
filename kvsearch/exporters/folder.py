"""A folder to deploy or to share: the plan, the weights it needs, a card, and a script that answers under it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import ClassVar

from kvsearch.core.arrays import Ints
from kvsearch.core.parsing import parse_json
from kvsearch.core.printed import command_line, markdown_text
from kvsearch.exporters.base import NOTHING, Budgets, Exported, Inputs, PlanExporter
from kvsearch.plan import ModelFingerprint, Plan, canonical_json
from kvsearch.plan.origin import USES
from kvsearch.plan.saved import FOLDER_PLAN, WEIGHTS, known_weights, with_weights

SCRIPT = '''\
"""Answer a prompt under the plan of this folder: python generate.py --prompt "..." [--context @FILE] [--model NAME]."""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsearch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--prompt", required=True)
parser.add_argument("--context", default="", help="text, or @FILE; it is read before the prompt and compressed")
parser.add_argument("--model", default={model!r}, help="name or directory of the model of the plan")
parser.add_argument("--max-new-tokens", type=int, default=128)
options = parser.parse_args()

context = Path(options.context[1:]).read_text() if options.context.startswith("@") else options.context
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
inputs = tokenizer(f"{{context}}\\n{{options.prompt}}" if context else options.prompt, return_tensors="pt")
with kvsearch.attach(model, kvsearch.load_plan(Path(__file__).parent)) as planned:
    output = planned.generate(**inputs.to(model.device), max_new_tokens=options.max_new_tokens, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
'''


class Folder(PlanExporter):
    """Everything of a plan in one folder, which `load_plan` reads; nothing is lost."""

    name: ClassVar[str] = "folder"
    tool: ClassVar[str] = "kvsearch itself, here or from the hub"
    keeps: ClassVar[str] = "everything"

    def export(self, plan: Plan, inputs: Inputs = NOTHING) -> Exported:
        """Make the folder; UsageError if the weights of a fitted ranking are not here."""
        places = with_weights(plan.policies, FOLDER_PLAN)
        weights = {place.name: known_weights(str(spec.params[WEIGHTS]))[1] for spec, place in places}
        files = {
            FOLDER_PLAN: canonical_json(plan),
            **weights,
            "README.md": "\n".join(card(plan, inputs.scores)).encode() + b"\n",
            "generate.py": SCRIPT.format(model=plan.model.name).encode(),
        }
        usage = ("python {path}/generate.py --prompt ...", "kvsearch.attach(model, kvsearch.load_plan({path!r}))")
        return Exported(files, usage, total=plan.total)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:  # noqa: ARG002
        """Read the budgets off the plan."""
        return Budgets.of(Plan.model_validate(parse_json(files[FOLDER_PLAN], FOLDER_PLAN)), length).entries


def card(plan: Plan, scores: str | None = None) -> Iterator[str]:
    """Yield the lines of a card in Markdown, with the front matter of the hub; `scores` are in Markdown, too."""
    origin = plan.provenance
    model = plan.model
    yield from ("---", "library_name: kvsearch", f"base_model: {json.dumps(model.name)}")
    yield from ("tags:", "- kv-cache", "---", "")
    yield from (f"# KV-cache plan for {markdown_text(model.name)}", "")
    first = next(iter(plan.phases.values()))
    heads = len(first.planned_layers) * model.kv_heads
    size = f"{plan.total / heads:.4g} entries per kv head on average, {plan.total:,} in {heads} heads"
    where = f"for prompts of {plan.length:,} tokens" if plan.length else "for prompts of any length"
    follows = "; budgets follow the prompt" if plan.scaling == "proportional" else ""
    phases = " and ".join(plan.phases)
    policies = markdown_text(", ".join(spec.name for spec in plan.policies))
    yield from (f"Keeps {size}, {where}{follows}. Phases: {phases}. Policies: {policies}.", "")
    yield from (f"Model: {markdown_text(model.short())}.", "")
    versions = f"kvsearch {origin.kvsearch}, torch {origin.torch}, transformers {origin.transformers}"
    yield from ("## How it was made", "", f"Method {markdown_text(origin.method)}, seed {origin.seed}, {versions}.", "")
    if origin.contexts is not None:
        yield from ("| contexts | number |", "| --- | --- |")
        for use in USES:
            found = getattr(origin.contexts, use)
            yield f"| {use} on | {found.contexts:,}, with {found.questions:,} questions |"
        yield ""
    if origin.settings:
        yield from ("| setting | value |", "| --- | --- |")
        for name, value in sorted(origin.settings.items()):
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            yield f"| {markdown_text(name)} | {markdown_text(shown)} |"
        yield ""
    if scores is not None:
        yield from ("## What it scores", "", scores.strip(), "")
    yield from ("## How to use it", "", "```", 'python generate.py --prompt "..."', "```", "", "```python")
    yield from ("import kvsearch", "", 'with kvsearch.attach(model, kvsearch.load_plan("FOLDER")) as planned:')
    yield from ("    output = planned.generate(**inputs)", "```", "")
    yield from ("What it costs on your tasks, beside the full cache and other methods:", "", "```")
    yield from (command_line(["kvsearch", "evaluate", model.name, "--plan", "FOLDER", "--tasks", "YOUR.jsonl"]), "```")
