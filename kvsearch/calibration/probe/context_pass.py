"""Passes over the contexts that a ranking is calibrated on: features of entries, and all questions.

How rankings are chosen and reported, whatever they are made of: on contexts that none of them was fitted on. Importance
says which entries a head looks at, not that it needs them: the output of a head that looks everywhere is a mean, and an
even sample keeps a mean that the entries with most attention do not. Such heads get an even spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.calibration.importance import ImportancePass, RankedContext
from kvsearch.calibration.options import Compare, RankingOptions
from kvsearch.calibration.prompts import CalibrationPrompt, Continuation
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import IncompatibleError, UsageError, assert_present
from kvsearch.core.sign_flips import compute_chances
from kvsearch.models.architecture import RotaryTables, find_rotary_limit
from kvsearch.models.loading import LoadedModel
from kvsearch.plan.profile_arrays import Arrays
from kvsearch.policies import Observation, Policy
from kvsearch.policies.base import Needs
from kvsearch.policies.fitted import GOLDEN_RATIO, spread_places
from kvsearch.policies.probe import SINKS
from kvsearch.policies.registry import list_rivals
from kvsearch.runtime.collector import unrotate_queries
from kvsearch.runtime.observe import is_finite
from kvsearch.runtime.replay.replay import LayerContinuation
from kvsearch.signals.predictions import compute_total_variation
from kvsearch.tasks.prompts import PromptFormat
from kvsearch.tasks.splits import group_by_text

REPORTED_RIVALS = 3  # policies whose losses are reported
JUDGED_SHARES = (0.05, 0.1, 0.2)  # at which rankings are judged
MIDDLE_SHARE = slice(1, 2)  # of them, at which all policies are
MOST_CHUNKS = 4  # of what is asked of a context, by which heads are judged, and rankings where there are no questions
MOST_ROWS = 48  # tokens of each by which heads are judged
JUDGED_CHUNKS = 2  # of a context that rankings are chosen or reported by one chunk in so many is asked for
REPEAT_TEXT = "Repeat the text above, word for word."
CHUNK, LEAST_CHUNK = 256, 16  # tokens of the context that are asked for at a time
MIN_ERROR = 1e-30  # of a head whose output does not move
SIGN_FLIP_ALPHA = 0.05  # of the sign-flip test


class QuestionBuilder:
    """Builds the questions on contexts for `targets`; reconstruction repeats `chunk` tokens after `repeat` [1, R].

    Contexts without questions have reconstruction alone.

    Raises:
        UsageError: a context leaves no room to ask for it again, or has nothing to ask for.
    """

    def __init__(
        self, loaded: LoadedModel, prompts: Sequence[CalibrationPrompt], form: str, targets: tuple[str, ...]
    ) -> None:
        silent = sum(not prompt.continuations for prompt in prompts)
        if silent and "reconstruction" not in targets:
            raise UsageError(
                f"{silent} of {len(prompts)} contexts have no questions, and only --targets reconstruction asks for "
                "those: leave --targets out"
            )
        self.targets = ("reconstruction",) if silent == len(prompts) else targets
        self.repeat = PromptFormat(loaded.tokenizer, form).question(REPEAT_TEXT)
        limits = {prompt.length: find_rotary_limit(loaded.model, prompt.length) for prompt in prompts}
        longest = max(limits, key=lambda length: length - limits[length])  # the one with the least room
        limit = limits[longest]
        room = limit - longest - self.repeat.shape[1] if limit else CHUNK
        if room < LEAST_CHUNK and "reconstruction" in self.targets:
            other = "" if silent else ", or --targets answers"
            raise UsageError(
                f"a context of {longest} tokens leaves no room to ask for it again ({loaded.name} takes {limit}): give "
                f"--max-length {limit - CHUNK - self.repeat.shape[1]}{other}"
            )
        self.chunk = min(CHUNK, room)

    def build(
        self, prompt: CalibrationPrompt, device: torch.device | str, every: int = 1
    ) -> dict[str, list[Continuation]]:
        """Build the questions on a context by target, without empty targets; one in `every` chunk is repeated."""
        questions: dict[str, list[Continuation]] = {}
        if "answers" in self.targets and prompt.continuations:
            questions["answers"] = [
                replace(continuation, tokens=continuation.tokens.to(device)) for continuation in prompt.continuations
            ]
        if "reconstruction" in self.targets:
            spans = self.pick_chunks(prompt, every)
            texts = [torch.cat([self.repeat, prompt.ids[:, span]], 1).to(device) for span in spans]
            questions["reconstruction"] = [Continuation(tokens, self.repeat.shape[1]) for tokens in texts]
        return questions

    def pick_chunks(self, prompt: CalibrationPrompt, every: int) -> list[slice]:
        """Pick one in `every` chunk of a context, others in the next context."""
        count = -(-prompt.length // self.chunk)
        size = -(-prompt.length // count)  # equal, so that none is too short to be judged by
        chunks = [slice(first, first + size) for first in range(0, prompt.length, size)]
        return chunks[prompt.context % min(every, len(chunks)) :: every]


def pick_evenly(questions: Sequence[Continuation]) -> list[Continuation]:
    """Pick at most `MOST_CHUNKS` questions, evenly."""
    return [
        questions[number]
        for number in sorted({number * len(questions) // MOST_CHUNKS for number in range(MOST_CHUNKS)})
    ]


class JudgedRows(NamedTuple):
    """Question tokens at `places`, in every layer, by which heads are judged."""

    places: Tensor
    layers: list[LayerContinuation[RankedContext]]

    @classmethod
    def of(cls, tokens: int, number: int, importance_pass: ImportancePass) -> JudgedRows:
        """Pick `MOST_ROWS` of the question tokens evenly, all if they are fewer.

        They start at another place for every question `number`, as all questions begin with the same words.
        """
        count = min(tokens, MOST_ROWS)
        places = ((torch.arange(count) + number * GOLDEN_RATIO % 1) * tokens / count).long()
        return cls(places, [layer.at_places(places) for layer in importance_pass.continuations()])


class EntryLook(NamedTuple):
    """A function that notes the entries of a layer between sinks and recent ones, and what it needs."""

    needs: Sequence[Needs]
    note: Callable[[Observation, int, slice], Tensor]


Questions = Mapping[str, Sequence[Continuation]]  # by target
# from questions and the number of their context: ascending numbers [n] of tokens, through all questions
QueryDraw = Callable[[Questions, int], Tensor]


class Noting(NamedTuple):
    """What to note of contexts during their pass: entries by the name of a look, queries and importance.

    Args:
        looks: what to note of entries.
        policies: whose ranks of the entries are wanted.
        draw_queries: draws the tokens whose queries are wanted, from the questions about a context; None: none are.
        importance: whether the importance of the entries is wanted.
        every: one in so many chunks of a context is asked for again; entries of others are not judged.
    """

    looks: Mapping[str, EntryLook] = {}
    policies: Sequence[Policy] = ()
    draw_queries: QueryDraw | None = None
    importance: bool = True
    every: int = 1

    def note(self, observation: Observation, context: int, free: slice) -> dict[str, Tensor]:
        """Apply all looks to the entries of a layer, by name."""
        return {name: look.note(observation, context, free) for name, look in self.looks.items()}


class QuestionReading(NamedTuple):
    """Results of all questions on a context; tensors are on the CPU."""

    largest: Tensor | None  # importance, [L, Hkv, T]
    judging: dict[str, list[JudgedRows]]  # by target the tokens by which heads are judged
    queries: Tensor | None  # un-rotated, of the tokens that are wanted, [L, Hkv, G, n, D]


class ContextPass:
    """A pass over a context under the full cache; T counts the entries between its sinks and the recent ones.

    The `prompt` has the right answers; `ask` puts own replies in their place, which may go on from this pass.
    `questions` are by target; `judged` are the given answers, which end where own replies may go on, or chunks of the
    context where there are none.

    Raises:
        IncompatibleError: the model computes NaN on it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: CalibrationPrompt,
        options: RankingOptions,
        builder: QuestionBuilder,
        noting: Noting | None = None,
    ) -> None:
        self.prompt = prompt
        self.builder = builder
        self.refusal = prompt.refusal(loaded.name)
        self.free = slice(SINKS, prompt.length - options.protect)
        self.noting = noting = noting or Noting()
        needs = [need for look in noting.looks.values() for need in look.needs]
        ids = prompt.ids.to(loaded.device)
        look = needs, lambda observation: noting.note(observation, prompt.context, self.free)
        self.importance_pass = ImportancePass(loaded.model, noting.policies, ids, options.group, self.refusal, look)
        if not all(is_finite(noted) for layer in self.importance_pass.noted for noted in layer.noted.values()):
            raise IncompatibleError(f"{self.refusal}: what a ranking looks at is not finite")
        self.questions = builder.build(prompt, loaded.device, noting.every)
        self.judged = self.questions.get("answers") or pick_evenly(self.questions["reconstruction"])

    def ask(self, replied: CalibrationPrompt) -> None:
        """Ask the questions of the prompt with own replies; before anything is measured."""
        self.questions = self.builder.build(replied, self.importance_pass.model.device, self.noting.every)

    @cached_property
    def judged_entries(self) -> Tensor:
        """Numbers of the entries that rankings are judged by [n], among those between sinks and recent ones.

        What repeats a chunk looks at the entries of that chunk: other entries would seem to be worth nothing.
        """
        numbers = torch.arange(self.prompt.length)
        if self.noting.every > 1 and "reconstruction" in self.questions:
            spans = self.builder.pick_chunks(self.prompt, self.noting.every)
            numbers = torch.cat([numbers[span] for span in spans])
        is_free = (numbers >= self.free.start) & (numbers < self.free.stop)
        return numbers[is_free] - self.free.start

    @property
    def spread(self) -> Tensor:
        """Scores whose best entries lie evenly, [L, Hkv, T]."""
        places = spread_places(torch.arange(self.prompt.length, device=self.importance_pass.model.device)[self.free])
        return places.expand(len(self.importance_pass.noted), self.importance_pass.observed[0].keys.shape[1], -1)

    @property
    def largest(self) -> Tensor:
        """Largest importance over all questions, [L, Hkv, T] on the CPU."""
        return assert_present(self._reading.largest, "the importance of entries was not asked for")

    @property
    def queries(self) -> Tensor:
        """Un-rotated queries of the drawn tokens, [L, Hkv, G, n, D] on the CPU."""
        return assert_present(self._reading.queries, "queries were not asked for")

    @cached_property
    def _reading(self) -> QuestionReading:
        """Results of all questions, which are read once.

        Raises:
            IncompatibleError: the importance or a query is not finite.
        """
        importances = []
        queries = []
        judging: dict[str, list[JudgedRows]] = {}
        draw = self.noting.draw_queries
        wanted = None if draw is None else draw(self.questions, self.prompt.context)
        first = 0
        for target, questions in self.questions.items():
            judged_questions = pick_evenly(questions)
            for question in questions:
                count = question.tokens.shape[1]
                read = self.importance_pass.weigh if self.noting.importance else self.importance_pass.following
                with read(question.tokens, logits_to_keep=1):
                    if self.noting.importance:
                        importances.append(self.importance_pass.stack_weighed()[..., self.free])
                    if wanted is not None:
                        queries.append(self._queries_at(wanted[(wanted >= first) & (wanted < first + count)] - first))
                    if any(question is judged for judged in judged_questions):
                        rows = judging.setdefault(target, [])
                        rows.append(JudgedRows.of(count, len(rows), self.importance_pass))
                first += count
        reading = QuestionReading(
            reduce(torch.maximum, importances) if importances else None, judging,
            torch.cat(queries, 3) if queries else None,
        )  # fmt: skip
        if not all(part is None or is_finite(part) for part in (reading.largest, reading.queries)):
            raise IncompatibleError(self.refusal)
        return reading

    def _queries_at(self, places: Tensor) -> Tensor:
        """Return un-rotated queries of the current question tokens at `places` [n], [L, Hkv, G, n, D]."""
        layers = []
        for layer in self.importance_pass.continuations():
            at = places.to(layer.query.device)
            rotary = RotaryTables(self.importance_pass.model, layer.index)
            plain = unrotate_queries(layer.query[:, :, at], self.prompt.length + at[None], rotary)[0]
            heads = layer.prompt[0].shape[1]
            layers.append(plain.view(heads, len(plain) // heads, *plain.shape[1:]).cpu())
        return torch.stack(layers)

    def stack_noted(self, name: str) -> Tensor:
        """Stack the notes of a look over layers, [L, n, Hkv, T], on the device of the model."""
        return torch.stack(
            [layer.noted[name].to(self.importance_pass.model.device) for layer in self.importance_pass.noted]
        )

    def mark_kept(self, scores: Tensor) -> list[Tensor]:
        """Mark the entries kept at each of `JUDGED_SHARES`, [L, Hkv, length] bool, by scores [L, Hkv, T] of `free`."""
        all_scores = scores.new_full((*scores.shape[:2], self.prompt.length), float("inf"))
        all_scores[..., self.free] = scores
        ranks = all_scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return [ranks < max(1, round(budget * self.prompt.length)) for budget in JUDGED_SHARES]

    def measure_head_errors(self, target: str, keeps: Sequence[Tensor]) -> Tensor:
        """Measure the output error of each head that keeps only `keeps` [L, Hkv, length], [questions, keeps, L, Hkv].

        The mean over rows of |(yhat - y) W_O|^2: what a loss is to second order. A head that attends everywhere loses
        less with an even sample of its entries, which keeps their mean, than with those it attends to most. As it is a
        mean, it is that of `MOST_ROWS` tokens of `MOST_CHUNKS` things that are asked.
        """
        judging = self._reading.judging[target]
        errors = []
        for row, keep in enumerate(torch.stack(list(keeps), 1)):
            by_head = judging[0].layers[row].output_weight
            weight = by_head.reshape(keep.shape[1], -1, by_head.shape[-1])
            factors = weight @ weight.transpose(1, 2)
            errors_of_rows = [rows.layers[row].eviction_errors(keep, rows.places, factors).cpu() for rows in judging]
            errors.append(torch.stack(errors_of_rows))
        return torch.stack(errors, 2)

    def measure_losses(self, keeps: Sequence[Tensor]) -> Tensor:
        """Measure how far replies move if all layers keep only `keeps` [L, Hkv, length], [questions, keeps].

        By the total variation of next-token distributions, mean over tokens, in [0, 1].
        """
        lost = torch.zeros(len(self.judged), len(keeps))
        masks = torch.stack([torch.ones_like(keeps[0]), *keeps])
        for question, after in enumerate(self.judged):
            count = after.tokens.shape[1] - after.predicting.start  # the last row predicts what comes after the answer
            full, *changed = self.importance_pass.logits_under(after.tokens, masks, count)
            for number, logits in enumerate(changed):
                lost[question, number] = compute_total_variation(full[:-1], logits[:-1])
        return lost


Ranking = Callable[[ContextPass], Tensor]  # scores of the entries of a context that are ranked, [L, Hkv, T]
Measure = Callable[[ContextPass], Mapping[str, Tensor]]
Measured = Callable[[Measure], Iterable[Arrays]]  # what is measured of some contexts


def rank_by_policy(number: int) -> Ranking:
    """Make the ranking by the policy of that number in `Noting.policies`."""

    def scores(context_pass: ContextPass) -> Tensor:
        ranks = context_pass.importance_pass.ranks(number)[..., context_pass.free]
        return -ranks.to(context_pass.importance_pass.model.device).float()

    return scores


def rank_by_candidate(name: str, chosen: Tensor) -> Ranking:
    """Make the ranking of every head by the candidate `chosen` [L, Hkv], among the noted scores of a look."""

    def scores(context_pass: ContextPass) -> Tensor:
        noted = context_pass.stack_noted(name)
        return noted.gather(1, chosen.to(noted.device)[:, None, :, None].expand(-1, 1, -1, noted.shape[-1]))[:, 0]

    return scores


def rank_with_spread(heads: Tensor, ranking: Ranking) -> Ranking:
    """Make a ranking that uses an even spread in `heads` [L, Hkv] bool."""

    def scores(context_pass: ContextPass) -> Tensor:
        spread = context_pass.spread
        return torch.where(heads[..., None].to(spread.device), spread, ranking(context_pass))

    return scores


def find_spread_heads(rankings: Sequence[Ranking], read: Measured) -> list[Tensor]:
    """Find the heads whose output an even spread moves less than each ranking, [L, Hkv] bool per ranking.

    It must move a head less for each target: by answers alone what no question needs, by reconstruction alone what is
    needed once, would not count. Every question counts the same, however large its errors are. No head is marked if
    replies move more with the spread, beyond chance: heads are judged one by one, and lose together.
    """
    if not rankings:
        return []

    def ratios(context_pass: ContextPass) -> dict[str, Tensor]:
        """Compute log error ratios to the spread by target, [questions, rankings, L, Hkv]."""
        scores = [*(ranking(context_pass) for ranking in rankings), context_pass.spread]
        keeps = [keep for ranked in scores for keep in context_pass.mark_kept(ranked)]
        log_ratios = {}
        for target in context_pass.questions:
            errors = context_pass.measure_head_errors(target, keeps).clamp(min=MIN_ERROR).log()
            errors = errors.view(len(errors), len(scores), len(JUDGED_SHARES), *errors.shape[2:]).mean(2)
            log_ratios[target] = errors[:, :-1] - errors[:, -1:]
        return log_ratios

    ratios_by_target: dict[str, list[Tensor]] = {}
    for measured in read(ratios):
        for target, rows in measured.items():
            ratios_by_target.setdefault(target, []).append(torch.from_numpy(rows))
    better = torch.stack([torch.cat(rows).mean(0) > 0 for rows in ratios_by_target.values()]).all(0)
    mixtures = [rank_with_spread(heads, ranking) for heads, ranking in zip(better, rankings, strict=True)]

    def compared(context_pass: ContextPass) -> dict[str, Tensor]:
        """Measure how much further replies move under the mixtures, [questions, rankings]."""
        scores = [ranking(context_pass) for ranking in (*rankings, *mixtures)]
        alone, mixed = measure_ranking_losses(scores, context_pass).mean(-1).chunk(2, 1)
        return {"loss": mixed - alone}

    # of contexts, as questions of one context lose alike
    worse = np.stack([arrays["loss"].mean(0, dtype=np.float64) for arrays in read(compared)], 1)
    chances = [float(compute_chances(of_ranking[None])[0]) for of_ranking in worse]  # each as if it were alone
    return [
        torch.zeros_like(heads) if chance <= SIGN_FLIP_ALPHA else heads
        for heads, chance in zip(better, chances, strict=True)
    ]


def measure_ranking_losses(scores: Sequence[Tensor], context_pass: ContextPass, sizes: slice = slice(None)) -> Tensor:
    """Measure how far replies move under several rankings' scores [L, Hkv, T] at `sizes`, [questions, R, B]."""
    keeps = [keep for ranked in scores for keep in context_pass.mark_kept(ranked)[sizes]]
    return context_pass.measure_losses(keeps).view(-1, len(scores), len(keeps) // len(scores))


def measure_recalls(scores: Sequence[Tensor], context_pass: ContextPass) -> Tensor:
    """Measure the recall of several rankings by their scores [L, Hkv, T], [R, B, L, Hkv]."""
    device = context_pass.importance_pass.model.device
    entries = context_pass.judged_entries.to(device)
    orders = (ranked.to(device)[..., entries].argsort(dim=-1, descending=True, stable=True) for ranked in scores)
    return compute_recall(context_pass.largest.to(device)[..., entries], orders).float().cpu()


def report(
    fits: Mapping[str, Ranking], read: Measured, compare: Compare
) -> dict[str, tuple[dict[str, Floats], tuple[str, ...]]]:
    """Compare fits with policies; return for each fit its arrays, and the names of its "text_loss" columns.

    "recall" [P, B, L, Hkv] is that of the fit and of all policies. "text_loss" [N, P', B] has a row of every text, of
    the fit, which is named as it is in `fits`, and of `REPORTED_RIVALS` of the policies: those that recall most, or to
    `compare` all, those that lose least at the middle size, which may be others. "middle_loss" is that of the fit and
    of all policies [P], or of these alone [P'] where not all of them are better than the fit. The policies are those
    that contexts are read with; all protect the same entries.
    """
    names = list_rivals()
    rankings = [*fits.values(), *map(rank_by_policy, range(len(names)))]
    first = len(fits)

    def at_middle(context_pass: ContextPass) -> dict[str, Tensor]:
        scores = [ranking(context_pass) for ranking in rankings]
        return {"middle_loss": measure_ranking_losses(scores, context_pass, MIDDLE_SHARE).mean((0, 2))}

    def compared(context_pass: ContextPass) -> dict[str, Tensor]:
        arrays = {"recall": measure_recalls([ranking(context_pass) for ranking in rankings], context_pass)}
        return arrays | (at_middle(context_pass) if compare == "all" else {})

    means = _average(read(compared))
    worst_last = -means["recall"][first:].mean((1, 2, 3)) if compare == "best" else means["middle_loss"][first:]
    rivals = first + np.sort(worst_last.argsort(kind="stable")[:REPORTED_RIVALS])
    judged = [*range(first), *rivals.tolist()]

    def lost(context_pass: ContextPass) -> dict[str, Tensor]:
        scores = [rankings[number](context_pass) for number in judged]
        return {
            "text": torch.tensor([context_pass.prompt.text]),
            "loss": measure_ranking_losses(scores, context_pass).mean(0),
        }

    contexts = list(read(lost))
    texts = group_by_text(arrays["text"].item() for arrays in contexts)
    text_loss = np.stack([np.mean([contexts[number]["loss"] for number in text], axis=0) for text in texts])
    middle = _average(contexts)["loss"][:, MIDDLE_SHARE].mean(1)
    if compare == "best" and any(
        (middle[first:] < fit_loss).all() for fit_loss in middle[:first]
    ):  # others may be worse
        middle = _average(read(at_middle))["middle_loss"]
    middle = means.get("middle_loss", middle)
    reports = {}
    for number, name in enumerate(fits):
        reports[name] = (
            {
                "recall": np.concatenate([means["recall"][[number]], means["recall"][first:]]),
                "text_loss": text_loss[:, [number, *range(first, len(judged))]].astype(np.float32),
                "middle_loss": np.append(middle[number], middle[first:]),
            },
            (name, *(names[rival - first] for rival in rivals)),
        )
    return reports


def _average(contexts: Iterable[Arrays]) -> dict[str, Floats]:
    """Average arrays over contexts, fp32."""
    listed = list(contexts)
    return {name: np.mean([arrays[name] for arrays in listed], axis=0).astype(np.float32) for name in listed[0]}


def compute_recall(importance: Tensor, orders: Iterable[Tensor]) -> Tensor:
    """Compute the recall of orders at each of `JUDGED_SHARES`: kept importance relative to the oracle, [R, B, ...].

    Both are [..., T]. A head without importance has nothing to lose: 1.
    """

    def kept(ranked: Tensor) -> Tensor:
        counts = (max(1, round(budget * ranked.shape[-1])) for budget in JUDGED_SHARES)
        return torch.stack([ranked[..., :count].sum(-1, dtype=torch.float64) for count in counts])

    best = kept(importance.sort(descending=True).values)
    kept_by_order = torch.stack([kept(importance.gather(-1, order)) for order in orders])
    return torch.where(best > 0, kept_by_order / best, 1.0)
