"""Contexts that a ranking is calibrated on: what their entries look like, and all that is asked of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvsearch.calibration.importance import ImportancePass
from kvsearch.calibration.options import ProbeOptions, RankingOptions
from kvsearch.calibration.prompts import CalibrationPrompt
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.policies import Observation, Policy
from kvsearch.policies.generic import SINKS, even_places
from kvsearch.policies.probe import columns_of, features_of, needs_of
from kvsearch.signals.attention_rows import attention_change
from kvsearch.signals.predictions import total_variation
from kvsearch.tasks.prompts import PromptFormat

Item = TypeVar("Item")
BUDGETS = (0.05, 0.1, 0.2)  # at which rankings are judged
LEAST_CONTEXTS = 3
MOST_JUDGED = 32  # contexts to choose on, and to report on
MOST_CHUNKS = 4  # of a context without questions, by which rankings are judged
LEAST_KINDS = 2
REPEAT = "Repeat the text above, word for word."
CHUNK, LEAST_CHUNK = 256, 16  # tokens of the context that are asked for at a time


class ContextSplit(NamedTuple):
    """The contexts to fit on, to choose on and to report on."""

    fit: list[CalibrationPrompt]
    choose: list[CalibrationPrompt]
    report: list[CalibrationPrompt]


def split(prompts: Sequence[CalibrationPrompt], seed: int) -> ContextSplit:
    """Share out contexts: a fifth to choose on, a fifth to report on, at most `MOST_JUDGED` each, others to fit on.

    Raises:
        UsageError: there are fewer than three.
    """
    if len(prompts) < LEAST_CONTEXTS:
        raise UsageError(
            f"a ranking is fitted, chosen and reported on different contexts, and there are {len(prompts)}: give at "
            f"least {LEAST_CONTEXTS}, better dozens"
        )
    mixed_up = random.Random(seed).sample(list(prompts), len(prompts))
    part = min(max(1, len(prompts) // 5), MOST_JUDGED)
    return ContextSplit(mixed_up[2 * part :], mixed_up[:part], mixed_up[part : 2 * part])


def some_prompts(prompts: list[CalibrationPrompt], options: RankingOptions) -> list[CalibrationPrompt]:
    """Return those of the prompts that are read, in their order: each is to give enough to be worth a pass."""
    most = options.most_contexts + 2 * MOST_JUDGED
    drawn = random.Random(options.seed).sample(range(len(prompts)), min(most, len(prompts)))
    return [prompts[number] for number in sorted(drawn)]


def without_questions(prompts: Sequence[CalibrationPrompt]) -> int:
    """Return how many contexts have no questions."""
    return sum(not prompt.continuations for prompt in prompts)


def kind_to_leave_out(parts: ContextSplit) -> str | None:
    """Return a kind of question that is reported on, and can be left out of a second fit; None: there is none.

    There must be other contexts to fit and to choose on. A kind that the first fit saw is preferred, and of such kinds
    the one with most questions to report on; the seed, which shared out the contexts, decides between equals.
    """
    asked = [after.kind for prompt in parts.report for after in prompt.continuations if after.kind is not None]
    seen = known_kinds(parts.fit)
    apart = [
        kind
        for kind in dict.fromkeys(asked)
        if all(any(prompt.kinds != {kind} for prompt in part) for part in (parts.fit, parts.choose))
    ]
    if len(known_kinds([prompt for part in parts for prompt in part])) < LEAST_KINDS:
        return None
    return max(apart, key=lambda kind: (kind in seen, asked.count(kind)), default=None)


def known_kinds(prompts: Sequence[CalibrationPrompt]) -> set[str]:
    """Return the kinds of questions that these prompts ask, as far as they are known."""
    return {kind for prompt in prompts for kind in prompt.kinds if kind is not None}


class ForcedContinuation(NamedTuple):
    """What is asked of a context: token ids [1, K], the rows of them that predict the reply, and a question's kind."""

    target: str  # "answers" or "reconstruction"
    tokens: Tensor
    predicting: slice
    kind: str | None = None


def evenly(asked: Sequence[Item]) -> tuple[Item, ...]:
    """Return at most `MOST_CHUNKS` of what is asked of a context."""
    return tuple(asked[number] for number in sorted({i * len(asked) // MOST_CHUNKS for i in range(MOST_CHUNKS)}))


@dataclass(frozen=True)
class QuestionBuilder:
    """How contexts are asked: for `targets`, for themselves in words `repeat` [1, R] and `chunk` tokens at a time."""

    targets: tuple[str, ...]
    repeat: Tensor
    chunk: int

    @classmethod
    def of(
        cls, loaded: LoadedModel, prompts: Sequence[CalibrationPrompt], form: str, targets: tuple[str, ...]
    ) -> QuestionBuilder:
        """Say how these prompts can be asked: those without questions for themselves alone.

        Raises:
            UsageError: a context leaves no room to ask for it again, or has nothing that could be asked of it.
        """
        silent = without_questions(prompts)
        if silent and "reconstruction" not in targets:
            raise UsageError(
                f"{silent} of {len(prompts)} contexts have no questions, and only --targets reconstruction asks for "
                "those: leave --targets out"
            )
        if silent == len(prompts):
            targets = ("reconstruction",)
        repeat = PromptFormat(loaded.tokenizer, form).question(REPEAT)
        if "reconstruction" not in targets:
            return cls(targets, repeat, 0)
        limit, longest = describe(loaded.model).max_positions, max(prompt.length for prompt in prompts)
        room = limit - longest - repeat.shape[1] if limit else CHUNK
        if room < LEAST_CHUNK:
            raise UsageError(
                f"a context of {longest} tokens leaves no room to ask for it again ({loaded.name} takes {limit}): give "
                f"--max-length {limit - CHUNK - repeat.shape[1]}, or --targets answers"
            )
        return cls(targets, repeat, min(CHUNK, room))

    def build(self, prompt: CalibrationPrompt, device: torch.device | str) -> Iterator[ForcedContinuation]:
        """Yield what is asked of a context."""
        if "answers" in self.targets:
            for after in prompt.continuations:
                yield ForcedContinuation("answers", after.tokens.to(device), after.predicting, after.kind)
        if "reconstruction" in self.targets:
            for chunk in torch.split(prompt.ids, self.chunk, 1):
                tokens = torch.cat([self.repeat, chunk], 1).to(device)
                yield ForcedContinuation("reconstruction", tokens, slice(self.repeat.shape[1] - 1, -1))


class LayerFeatures(NamedTuple):
    """What a layer's entries look like: features [Hkv, T, F], and the name of each column's feature."""

    features: Tensor
    columns: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ContextPass:
    """A context that was read under the full cache; T counts the entries between its sinks and the recent ones."""

    context: int
    options: RankingOptions
    passed: ImportancePass
    asked: tuple[ForcedContinuation, ...]
    judged: tuple[ForcedContinuation, ...]  # the given answers, or chunks of the context where there are none
    length: int
    free: slice
    refusal: str

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        prompt: CalibrationPrompt,
        given: CalibrationPrompt,
        options: RankingOptions,
        builder: QuestionBuilder,
        policies: Sequence[Policy] = (),
    ) -> ContextPass:
        """Read a context; IncompatibleError if the model computes NaN on it.

        `given` has the right answers in place of own replies, which go on after the answer where nothing ends them.
        """
        refusal = prompt.refusal(loaded.name)
        free = slice(SINKS, prompt.length - options.protect)

        def look(observation: Observation) -> LayerFeatures:
            features = features_of(observation, options.looked_at)[0, :, free].cpu()
            return LayerFeatures(features, columns_of(observation, options.looked_at))

        wanted = needs_of(options.looked_at), look
        ids, plus = prompt.ids.to(loaded.device), isinstance(options, ProbeOptions) and options.plus
        passed = ImportancePass(loaded.model, policies, ids, options.group, refusal, wanted, plus)
        if not all(bool(context.noted.features.isfinite().all()) for context in passed.noted):
            raise IncompatibleError(f"{refusal}: what a ranking looks at is not finite")
        asked = tuple(builder.build(prompt, loaded.device))
        answers = tuple(one for one in builder.build(given, loaded.device) if one.target == "answers")
        return cls(prompt.context, options, passed, asked, answers or evenly(asked), prompt.length, free, refusal)

    @property
    def features(self) -> list[Tensor]:
        """What entries look like, by layer [Hkv, T, F]."""
        return [context.noted.features for context in self.passed.noted]

    @property
    def spread(self) -> Tensor:
        """Scores whose best entries lie evenly, [L, Hkv, T]."""
        places = even_places(torch.arange(self.length)[self.free])
        return places.expand(len(self.passed.noted), self.passed.noted[0].norms.shape[1], -1)

    @property
    def columns(self) -> tuple[str, ...]:
        """The feature of every column."""
        columns: tuple[str, ...] = self.passed.noted[0].noted.columns
        return columns

    @cached_property
    def importance_by_kind(self) -> Mapping[str | None, Tensor]:
        """The largest importance over all that is asked of each kind (None: no known one), [L, Hkv, T] on the CPU."""
        found: dict[str | None, Tensor] = {}
        for one in self.asked:
            values = self.passed.ask(one.tokens).importance[..., self.free]
            if not bool(values.isfinite().all()):
                raise IncompatibleError(self.refusal)
            found[one.kind] = torch.maximum(found[one.kind], values) if one.kind in found else values
        return found

    @property
    def largest(self) -> Tensor:
        """The largest importance over all that is asked, [L, Hkv, T]."""
        return _largest(self.importance_by_kind.values())

    def largest_without(self, kind: str) -> Tensor | None:
        """Return the largest importance over all that is asked but questions of a kind; None: nothing else is."""
        rest = [values for one, values in self.importance_by_kind.items() if one != kind]
        return _largest(rest) if rest else None

    def largest_of(self, kind: str) -> Tensor:
        """Return the largest importance over the questions of a kind, which are asked."""
        return self.importance_by_kind[kind]

    def kept(self, scores: Tensor, budget: float) -> Tensor:
        """Mark what stays of a context under scores [L, Hkv, T] of its free entries, [L, Hkv, length] bool."""
        whole = scores.new_full((*scores.shape[:2], self.length), float("inf"))
        whole[..., self.free] = scores
        ranks = whole.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return ranks < max(1, round(budget * self.length))

    def head_errors(self, keeps: Sequence[Tensor]) -> Tensor:
        """Return how far a head's output moves where only `keeps` [L, Hkv, length] stay, [questions, keeps, L, Hkv].

        The mean over rows of |(yhat - y) W_O|^2: what a loss is to second order. A head that attends everywhere loses
        less with an even sample of its entries, which keeps their mean, than with those it attends to most.
        """
        return torch.stack([self._errors(one, keeps) for one in self.asked])

    def _errors(self, asked: ForcedContinuation, keeps: Sequence[Tensor]) -> Tensor:
        found = []
        with self.passed.following(asked.tokens):
            for row, layer in enumerate(self.passed.continuations()):
                rows, heads = layer.query.shape[2], layer.keys.shape[1]
                own = torch.ones(1, heads, rows, rows, dtype=torch.bool, device=layer.keys.device)
                weight = layer.output_weight
                weight = weight.view(heads, -1, *weight.shape[1:])
                how, errors = layer.logits, []
                for keep in keeps:
                    shown = keep[row].to(own.device)[None, :, None].expand(1, heads, rows, -1)
                    change = attention_change(
                        layer.query, layer.keys, layer.values, torch.cat([shown, own], -1), how.scaling, how.softcap,
                        how.sinks,
                    ).outputs[0]  # fmt: skip
                    parts = change.view(heads, -1, *change.shape[1:])
                    moved = torch.einsum("hgkd,hgdm->hkm", parts, weight)
                    errors.append(moved.square().sum(-1).mean(-1).cpu())
                found.append(torch.stack(errors))
        return torch.stack(found, 1)

    def losses(self, keeps: Sequence[Tensor]) -> Tensor:
        """Return how far replies move where only `keeps` [L, Hkv, length] stay in all layers, [questions, keeps].

        By the total variation of next-token distributions, mean over tokens, in [0, 1].
        """
        lost = torch.zeros(len(self.judged), len(keeps))
        for question, (_, tokens, predicting, _) in enumerate(self.judged):
            full = self.passed.logits_seeing(tokens, {})[predicting]
            for number, keep in enumerate(keeps):
                seen = self.passed.logits_seeing(tokens, dict(enumerate(keep)))[predicting]
                lost[question, number] = total_variation(full, seen)
        return lost


def _largest(importance: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(importance)).amax(0)
