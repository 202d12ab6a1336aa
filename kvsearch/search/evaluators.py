"""Evaluators of candidates, in this process or in several workers: the candidate bank, or runs of their plans.

Candidates with budgets of the decode phase are run whole, as `evaluate` runs plans: what leaves while decoding depends
on every token that follows the prompt, so there is no order of entries that serves all candidates. Each has a cache of
its own here, which takes in what follows token by token. Only the prompts are shared: for the candidates of a job they
are read once, as far as memory permits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import IncompatibleError, NonFiniteError
from kvsearch.core.items import Progress
from kvsearch.evaluation.compare import Split
from kvsearch.models.architecture import is_beyond_switch
from kvsearch.runtime import Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode.replies import find_stop_tokens, has_windows
from kvsearch.runtime.shared_prefill import JointReplies, compress_prompts, make_batches
from kvsearch.search.bank.bank import CandidateBank
from kvsearch.search.bank.memory import SplittingRunner
from kvsearch.search.bank.passes import stack_answers
from kvsearch.search.bank.samples import BankSample, check_samples, require_answers
from kvsearch.search.evolve import PreparedSearch
from kvsearch.search.start_plans import SearchSetup
from kvsearch.search.trials import Evaluator, Executor
from kvsearch.signals.predictions import sum_answer_losses
from kvsearch.tasks.splits import group_by_text
from kvsearch.workers.base import SerialExecutor
from kvsearch.workers.models import ModelSource, ModelWorkers
from kvsearch.workers.ray import RayExecutor

SampleIndices = list[int]  # the samples that share a prompt


class PlanEvaluator:
    """Measures candidates by running their plans; an `Evaluator`, exact in every phase and under every policy.

    Results are data, as in `CandidateBank`, and do not depend on which candidates are evaluated together.

    Args:
        base: policies and phases.
        samples: of one protocol; see `list_samples`.
        objective: what candidates are judged by, "nll" or "metric".
        batch: contexts that are read together.
        max_memory: bytes for compressed caches; see `compress_prompts`.

    Raises:
        IncompatibleError: a prompt is too long for the model, or makes it emit NaN.
    """

    def __init__(
        self,
        setup: SearchSetup,
        samples: Sequence[BankSample],
        *,
        objective: str = "nll",
        batch: int = 8,
        max_memory: int | None = None,
    ) -> None:
        self.setup = setup
        self.objective = objective
        self.samples = tuple(samples)
        self.model = setup.loaded.model
        check_samples(self.model, self.samples)
        # on a model with sliding windows nothing may be padded between a prompt and what follows it
        self.batch = 1 if has_windows(self.model) else batch
        self.memory = max_memory
        self._splitting = SplittingRunner()
        self.tokens_spent = 0  # that the model has read: prompts, and what followed them under every candidate

    def evaluate(self, job: Sequence[Ints]) -> Floats:
        """Judge every candidate of a job on all samples by the objective, float64 [P, S]; NaN where the model gives it.

        Raises:
            UsageError: a sample without an answer.
            IncompatibleError: the model emits NaN for a prompt.
        """
        if self.objective != "metric":
            require_answers(self.samples)
        programs = [Program.from_plan(self.model, self.setup.plan(np.asarray(table), {}, 0)) for table in job]
        values = np.full((len(programs), len(self.samples)), np.nan)

        def measure(_: object, batch: list[SampleIndices], candidates: slice) -> None:
            numbers = range(candidates.start, candidates.stop)
            for joint in self._read({str(number): programs[number] for number in numbers}, batch):
                for method, index, value in self._measure_questions(joint, batch):
                    values[int(method), index] = value

        with run_attention(self.model):
            contexts = group_by_text((sample.task.task.name, sample.prompt_sha256) for sample in self.samples)
            for batch in make_batches(contexts, self.batch, self._batch_key):
                self._splitting.run(batch, len(programs), len(programs), list, measure)
        return values

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""

    # --- contexts -------------------------------------------------------------------------------------------------

    def _batch_key(self, context: SampleIndices) -> tuple[str, bool]:
        """Return the key that contexts of one batch share."""
        sample = self.samples[context[0]]
        return sample.task.task.name, is_beyond_switch(self.model, len(sample.prompt))

    def _read(self, programs: Mapping[str, Program], contexts: Sequence[SampleIndices]) -> Iterator[JointReplies]:
        """Prefill the prompts of some contexts under all programs."""
        firsts = [self.samples[context[0]] for context in contexts]
        prompts = [sample.prompt for sample in firsts]
        stop = find_stop_tokens(self.setup.loaded, firsts[0].task.format)
        last_logits = None
        try:
            for joint in compress_prompts(self.model, programs, prompts, stop, firsts[0].finished, self.memory):
                # The same object as long as the prompts were read once: what is read again counts again.
                if joint.logits is not last_logits:
                    last_logits = joint.logits
                    self.tokens_spent += sum(map(len, prompts))
                yield joint
        except NonFiniteError as error:
            raise IncompatibleError(f"{firsts[error.row].place}: {error}") from error

    def _measure_questions(
        self, joint: JointReplies, contexts: Sequence[SampleIndices]
    ) -> Iterator[tuple[str, int, float]]:
        """Yield values by method and sample: the first question of every context, then the second, and so on."""
        for number in range(max(map(len, contexts))):
            # a context without a question of that number repeats its first one, unheard
            indices = [context[number if number < len(context) else 0] for context in contexts]
            measure = self._scores if self.objective == "metric" else self._losses
            values = measure(joint, indices * len(joint.methods))
            for row, value in enumerate(values):
                method, column = divmod(row, len(contexts))
                if number < len(contexts[column]):
                    yield joint.methods[method], indices[column], value

    def _scores(self, joint: JointReplies, indices: SampleIndices) -> list[float]:
        """Score greedy replies to samples by their metric; NaN for all if the model gives NaN for one."""
        samples = [self.samples[index] for index in indices]
        replies = joint.replies
        limits = [sample.limit for sample in samples]
        try:
            reply_ids = replies.ask([sample.question_ids for sample in samples], limits)
        # The replies of all rows have stopped with the one that is wrong.
        except NonFiniteError:
            return [math.nan] * len(samples)
        self.tokens_spent += sum(
            len(sample.question_ids) + len(reply) for sample, reply in zip(samples, reply_ids, strict=True)
        )
        return [sample.score(reply) for sample, reply in zip(samples, reply_ids, strict=True)]

    def _losses(self, joint: JointReplies, indices: SampleIndices) -> list[float]:
        """Return the mean losses of teacher-forced answers, as defined by `CandidateBank.measure_losses`."""
        samples = [self.samples[index] for index in indices]
        sums = np.zeros(len(samples))
        rows = max(sample.predicting for sample in samples)
        if rows:
            logits = joint.replies.force([sample.following for sample in samples], rows)
            sums += sum_answer_losses(logits, stack_answers(samples, self.model.device))
            self.tokens_spent += sum(len(sample.following) for sample in samples)
        for row, sample in enumerate(samples):
            if len(sample.answer) > sample.predicting:  # the prompt predicts the first
                last = joint.logits[row % len(joint.logits)]
                sums[row] += sum_answer_losses(last[None], sample.answer[None, :1])[0]
        return [float(total) / max(1, len(sample.answer)) for total, sample in zip(sums, samples, strict=True)]


def make_executor(search: PreparedSearch, cap: int, progress: Progress | None = None) -> Executor:
    """Make the executor of a search: in this process, or in each of the model's workers if it has any.

    `cap` is the largest budget of any candidate.

    Raises:
        KvsearchError: see `CandidateBank`.
    """
    if isinstance(workers := search.setup.loaded.workers, ModelWorkers):
        return RayExecutor(make_worker_factory(search, workers.source, cap), workers.pool)
    how = search.settings.objective, search.search_split, cap
    return SerialExecutor(make_evaluator(search.setup, search.samples, *how, progress=progress))


def make_worker_factory(search: PreparedSearch, source: ModelSource, cap: int) -> partial[Evaluator]:
    """Return a factory of the evaluator in a worker: questions are sent, the model is loaded there."""
    nobody: Any = None
    # Samples hold their questions; the other prompts of a task would be sent to every worker for nothing.
    tasks = {id(sample.task): replace(sample.task, prompts=()) for sample in search.samples}  # its questions alone
    samples = [replace(sample, task=tasks[id(sample.task)]) for sample in search.samples]
    how = search.settings.objective, replace(search.search_split, tasks=()), cap
    return partial(make_evaluator, replace(search.setup, loaded=nobody), samples, *how, source)


def make_evaluator(
    base: SearchSetup,
    samples: Sequence[BankSample],
    objective: str,
    split: Split,
    cap: int,
    source: ModelSource | None = None,
    progress: Progress | None = None,
) -> Evaluator:
    """Make the evaluator of candidates: a bank where only prompts are evicted, else runs of their plans.

    The model is that of `setup`, or loaded from its `source`.
    """
    if source is not None:
        base = replace(base, loaded=source.load())
    options: dict[str, Any] = {"objective": objective, "max_memory": split.max_memory}
    if base.evicts_prompts_only:
        return CandidateBank(base.loaded, base.policies_by_layer, samples, cap, **options, progress=progress)
    return PlanEvaluator(base, samples, **options, batch=split.batch)
