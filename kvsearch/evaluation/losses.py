"""Layer attention output loss of any plan, with LAVa's bound: where in a model a plan hurts, and how much.

Measured under teacher forcing in the residual stream of the full cache: one dense pass over each context, one pass over
each question and its answer, and from their queries what every layer would put out under every plan. Each layer is
measured as if it were the only one that evicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvsearch.core.errors import IncompatibleError, NonFiniteError, UsageError
from kvsearch.core.items import Progress, with_progress
from kvsearch.evaluation.samples import LayerLoss
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.policies.base import Needs
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode.decoding import Decoding
from kvsearch.runtime.eviction import PhaseRule, collect_needs
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.replay.forced_answers import Asked, ForcedAnswer, forced_answers
from kvsearch.runtime.replay.replay import FollowedLayer
from kvsearch.runtime.stock import CACHE
from kvsearch.runtime.store.storage import RaggedStore
from kvsearch.signals.attention_rows import bound_output_loss, compute_output_loss
from kvsearch.tasks.base import Answers, Task
from kvsearch.tasks.encode import Reading, TaskPrompts, encode_tasks, make_readings

# what a program does in a layer in prefill and while decoding, with budgets for the context at hand
LayerRules = tuple[PhaseRule | None, PhaseRule | None]
ForcedTokens = tuple[Tensor, str]  # ids [K] that are teacher-forced after what is compressed, and of which question


QueryLosses = dict[str, Tensor]  # what a layer loses for each of K queries, [K] each, by the field of `LayerLoss`
LayerLosses = dict[tuple[int, str], list[QueryLosses]]  # by layer and method


def measure_losses(
    loaded: LoadedModel,
    programs: Mapping[str, Program],
    tasks: Sequence[Task],
    samples: int,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    protocol: Protocol = QUESTION_AGNOSTIC,
    max_length: int | None = None,
    answers: Answers = "own",
) -> list[LayerLoss]:
    """Measure losses of the layers each program governs, by task, layer and method, on the samples `run` would take.

    The queries are of the tokens that follow the compressed prompt: question, reply's prefix and answer
    (question-agnostic), or the answer (question-aware); `forced_answers` says which answer. Layers with a sliding
    window are left out: no plan governs them.

    Takes memory for the full cache of one context, and in one layer at a time for the attention of the K tokens that
    follow its T, a few times Hq * K * (T + K) fp32. A dynamic allocation takes one more pass over every context.

    Raises:
        UsageError: a question without an answer; see also `encode_tasks`.
        IncompatibleError: the model computes NaN or infinity; see also `encode_tasks` and `PlanCache`.
    """
    encoded = encode_tasks(loaded, tasks, samples, seed, max_length)
    forced = forced_answers(loaded, encoded, protocol, answers)
    work = [
        (task.task.name, reading, _list_following(task, reading, forced))
        for task in encoded
        for reading in make_readings(task.prompts, protocol)
    ]
    by_name: dict[str, LayerLosses] = {}
    losses_of = loaded.map(partial(_measure, programs=programs), work)
    for (name, *_), layer_losses in zip(work, with_progress(losses_of, len(work), progress), strict=True):
        measured = by_name.setdefault(name, {})
        for layer, method, losses in layer_losses:
            measured.setdefault((layer, method), []).append(losses)
    rows = []
    # Layers ascending, and in each the methods as they were given.
    order = {method: number for number, method in enumerate(programs)}
    for task, measured in by_name.items():
        for layer, method in sorted(measured, key=lambda place: (place[0], order[place[1]])):
            parts = measured[layer, method]
            means = {name: float(torch.cat([part[name] for part in parts]).double().mean()) for name in parts[0]}
            rows.append(LayerLoss(task, method, layer, queries=sum(len(part["loss"]) for part in parts), **means))
    return rows


def _list_following(task: TaskPrompts, reading: Reading, forced: Mapping[Asked, ForcedAnswer]) -> list[ForcedTokens]:
    """Return the tokens after a context for each of its questions; with the question where it is not compressed."""
    following = []
    for question in reading.questions:
        place = f"task {task.task.name}, example {reading.prompt.key}, question {question.number}"
        answer = forced[task.task.name, reading.prompt.key, question.number].ids
        if not len(answer):
            raise UsageError(f"{place}: output losses are measured on a right answer, and there is none")
        following.append((torch.cat([reading.following(question), answer]), place))
    return following


@torch.no_grad()
def _measure(
    loaded: LoadedModel, item: tuple[str, Reading, Sequence[ForcedTokens]], programs: Mapping[str, Program]
) -> Iterator[tuple[int, str, QueryLosses]]:
    """Yield the losses of every layer under every program; the `item` is a context of a task with its continuations."""
    _, reading, following = item
    context = reading.ids[None].to(loaded.device)
    needs: dict[int, list[Needs]] = {}
    with run_attention(loaded.model):
        rules = {method: make_layer_rules(loaded.model, program, context) for method, program in programs.items()}
        for by_layer in rules.values():
            for index, here in by_layer.items():
                # One pass gathers what any of the methods needs.
                needs.setdefault(index, []).extend(collect_needs(*here))
        passed = DensePass(loaded.model, needs, lambda prompt: prompt, context)
        for ids, place in following:
            with passed.following(ids[None].to(loaded.device), logits_to_keep=1):
                for layer in passed.continuations():
                    for method in programs:
                        if layer.index not in rules[method]:
                            continue
                        try:
                            losses = measure_query_losses(layer, rules[method][layer.index])
                        except NonFiniteError as error:
                            raise IncompatibleError(f"{place}, method {method}: {error}") from error
                        if not bool(losses["loss"].isfinite().all()):
                            raise IncompatibleError(
                                f"{place}, method {method}: the output of layer {layer.index} is NaN or "
                                "infinite: check the model's dtype and weights"
                            )
                        yield layer.index, method, losses


def make_layer_rules(model: Any, program: Program, context: Tensor) -> dict[int, LayerRules]:
    """Return the rules of a program by layer; budgets made of the context [1, T] are read off a cache that saw it."""
    cache = PlanCache(model, program)
    planned = {index: (layer.prefill, layer.decode) for index, layer in cache.planned.items()}
    if program.allocation is None:
        return planned
    # Budgets that follow the prompt are known only after a run over it.
    model(input_ids=context, logits_to_keep=1, **{CACHE: cache})
    return {index: _with_budgets(rules, cache.planned[index].holder) for index, rules in planned.items()}


def _with_budgets(rules: LayerRules, holder: RaggedStore | Decoding | None) -> LayerRules:
    """Return the rules with the budgets that `holder` was given."""
    assert holder is not None
    prefill, decode = rules
    if prefill is not None:
        entries = holder.entries()
        prefill = prefill._replace(budgets=lambda _: entries)
    if decode is not None and isinstance(holder, Decoding):
        budgets = torch.from_numpy(holder.rule.budgets)[None]
        decode = decode._replace(budgets=lambda _: budgets)
    return prefill, decode


def measure_query_losses(layer: FollowedLayer, rules: LayerRules) -> QueryLosses:
    """Measure the output loss of one layer for the tokens that followed a context, on the CPU.

    There are no bounds where entries are merged, or carry what leaves.
    """
    prefill, decode = rules
    # Each layer as if it alone evicted: its input is that of the full cache.
    plan = layer.replay(prefill, decode)
    weight = layer.output_weight
    change, evicted = layer.change(plan.shown)
    bounds = {}
    merges_prompt = prefill is not None and (prefill.policy.merges_prompt or prefill.carries)
    if merges_prompt or (decode is not None and decode.policy.merges):
        # both outputs as decoding computes them, in the model's dtype
        change = layer.full_outputs.float() - plan.outputs.float()
    else:
        # The theorem is about entries that are dropped, not about merged ones.
        bounds = dict(zip(("bound", "bound_by_head"), bound_output_loss(evicted, layer.values, weight), strict=True))
    losses = {"loss": compute_output_loss(change, weight), "evicted_mass": evicted.mean(1), **bounds}
    return {name: values[0].cpu() for name, values in losses.items()}
