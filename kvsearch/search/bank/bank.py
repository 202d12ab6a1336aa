"""The candidate bank: one dense prefill per prompt, then any number of candidates at the price of the answers alone.

Evicting a prompt changes nothing that the model computes for it, so one pass over it serves every candidate. Keys and
values are stored once, sorted by rank inside each head, and a candidate is how many of them each head keeps: budgets in
entries per kv head, int64 [L, Hkv], full-attention layers in ascending order. What follows the prompt, a teacher-forced
answer or a greedy reply, is computed for a whole population in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvsearch.core.arrays import Floats, Ints
from kvsearch.core.errors import IncompatibleError, InternalError
from kvsearch.core.items import Progress, group_by_key, with_progress
from kvsearch.core.resources import Closing
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.memory import find_default_memory
from kvsearch.policies import Policy
from kvsearch.runtime import Program
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode.replies import find_stop_tokens
from kvsearch.runtime.program import require_room
from kvsearch.search.bank.memory import (
    BlockWork,
    PassMemory,
    SampleNeed,
    SplittingRunner,
    check_fits,
    split_into_blocks,
)
from kvsearch.search.bank.passes import BankPass, BankReply, LayerStates, stack_answers, stack_states
from kvsearch.search.bank.prepared import SampleStore, drop_unused_memory, find_windows, prefill, resolve_policies
from kvsearch.search.bank.samples import BankSample, check_samples, require_answers
from kvsearch.signals.predictions import sum_answer_losses


class CandidateBank(Closing):
    """Measures losses, replies and scores of many candidates on samples whose prompts are prefilled once.

    A context manager: leaving it frees what is held, files included.

    Results are data: a candidate under which the model emits NaN or infinity has losses or scores that are not finite,
    and no replies. They depend on which candidates are evaluated together by rounding only: on a CPU not at all unless
    a pass has just a few tokens, on a GPU in the last digits.

    Args:
        loaded: the model.
        base: what ranks the entries: a policy, or one for each full-attention layer, or equally many for each, and a
            candidate gives entries to one of them. Candidates are then [choices * L, Hkv], with the layers under the
            first of their policies, then under the next; memory is taken for each.
        samples: of one protocol; see `list_samples`.
        cap: the largest budget of any candidate, in entries per kv head.
        objective: what `evaluate` judges by: "nll", see `measure_losses`, or "metric", see `score_replies`.
        max_memory: bytes for stored prompts and passes; the model itself, and the dense attention of the prompt that
            is being read, come on top. Default: 8 GiB, or half of what a GPU has free. At most half of it holds
            prompts; the others are spilled, see `SampleStore`.
        progress: told (prompts read, prompts).

    Raises:
        UsageError: a policy without one order of its entries, or less memory than one sample and candidate take.
        IncompatibleError: a prompt is too long for the model, or makes it emit NaN.
        EnvironmentFault: a full disk, or too little memory to read the longest prompt.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        base: Policy | Mapping[int, Policy | Sequence[Policy]],
        samples: Sequence[BankSample],
        cap: int,
        *,
        objective: str = "nll",
        max_memory: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.loaded = loaded
        self.samples = tuple(samples)
        self.cap = cap
        self.objective = objective
        self._policies = resolve_policies(loaded.model, base)
        self._windows = find_windows(loaded.model)
        self._choices = len(next(iter(self._policies.values())))
        self.shape = (self._choices * len(self._policies), describe(loaded.model).kv_heads)
        # Every refusal comes before the first prompt is read.
        check_samples(loaded.model, self.samples)
        sizes = PassMemory(loaded.model, tuple(self._windows.values()), self._choices)
        self._forcing = [sizes.estimate_forcing(sample, cap) for sample in self.samples]
        self._replying = [sizes.estimate_reply(sample, cap) for sample in self.samples]
        self._memory = find_default_memory(loaded.device) if max_memory is None else max_memory
        # prompts may take so much for good that enough is left for a pass
        # The largest pass must fit beside what is stored.
        largest_sample = check_fits([*self._forcing, *self._replying], self._memory)
        # Memory for reading does not depend on the ranking, but for what policies look at: one of them stands for all.
        (policy, *_), *_ = self._policies.values()
        program = Program.uniform(loaded.model, policy, partial(min, cap))
        require_room(loaded.model, {"the search": program}, [max(len(sample.prompt) for sample in self.samples)])
        self._store = SampleStore(max(0, min(self._memory // 2, self._memory - largest_sample)))
        self._splitting = SplittingRunner()
        self.tokens_spent = 0  # that the model has read: prompts, and what followed them under every candidate
        self._given: Floats = np.zeros(len(self.samples))  # -log p of first tokens of answers that prompts predict
        self._last: dict[str, Tensor] = {}  # logits [V] after prompts that replies follow at once
        try:
            with run_attention(loaded.model):
                self._read(progress)
        except BaseException:
            self.close()
            raise

    def _read(self, progress: Progress | None) -> None:
        """Prefill every distinct prompt once, and store the `cap` highest-ranked entries of every head."""
        # Questions about one context share its prompt, which is read and stored once.
        users = group_by_key(range(len(self.samples)), lambda index: self.samples[index].prompt_sha256)
        for name, indices in with_progress(users.items(), len(users), progress):
            sample = self.samples[indices[0]]
            layers, logits = prefill(self.loaded.model, self._policies, sample.prompt, self.cap)
            self.tokens_spent += len(sample.prompt)
            if not bool(logits.isfinite().all()):
                raise IncompatibleError(
                    f"{sample.place}: the model emits NaN or infinite logits: check its dtype and weights"
                )
            if not len(sample.question_ids):
                self._last[name] = logits.cpu()
            for index in indices:
                answer = self.samples[index].answer
                if len(answer) > self.samples[index].predicting:
                    # Predicted by the prompt itself, before anything is evicted, so equal for all candidates.
                    self._given[index] = sum_answer_losses(logits[None, None], answer[None, :1])[0]
            kept = {}
            for layer, choices in enumerate(layers):
                for choice, (keys, values) in enumerate(choices):
                    # No candidate has more than `cap` entries in a head; windows belong to the model and are kept
                    # whole.
                    last = keys.shape[1] if layer in self._windows else self.cap
                    kept[f"keys.{layer}.{choice}"] = drop_unused_memory(keys[:, :last])
                    kept[f"values.{layer}.{choice}"] = drop_unused_memory(values[:, :last])
            self._store.put(name, kept)

    # --- what candidates are worth --------------------------------------------------------------------------------

    def evaluate(self, job: Sequence[Ints]) -> Floats:
        """Judge all candidates of a job on all samples by the objective, float64 [P, S]."""
        return self.score_replies(job) if self.objective == "metric" else self.measure_losses(job)

    def measure_losses(self, candidates: Sequence[Ints]) -> Floats:
        """Return the mean -log p of teacher-forced answers, over the tokens of each in nats, float64 [P, S].

        `candidates` are P tables [L, Hkv]. The first token of an answer that follows the prompt at once is predicted by
        the prompt itself: it has the same -log p under every candidate.

        Raises:
            UsageError: a sample without an answer, or too little memory.
            RuntimeError, MemoryError: torch or Python ran out of memory for a single candidate and sample.
        """
        table = self._stack_candidates(candidates)
        require_answers(self.samples)
        losses = np.zeros((len(table), len(self.samples)))

        def act(states: LayerStates, indices: list[int], part: slice) -> None:
            samples = [self.samples[index] for index in indices]
            logits = BankPass(self.loaded.model, samples, states, self._windows, table[part]).force_answers()
            # None where prompts predict all answer tokens: these losses are in `_given`.
            if logits is not None:
                answers = stack_answers(samples, self.loaded.device)
                losses[part, indices] = np.stack([sum_answer_losses(of_candidate, answers) for of_candidate in logits])

        self._run(table, self._forcing, act)
        self.tokens_spent += len(table) * sum(len(sample.following) for sample in self.samples)
        # Sums of tokens first, the mean at the end: answers have different lengths.
        losses += self._given
        return losses / np.array([max(1, len(sample.answer)) for sample in self.samples], dtype=np.float64)

    def score_replies(self, candidates: Sequence[Ints]) -> Floats:
        """Return the metric of every reply, 0 to 1, float64 [P, S]; UsageError if a reply cannot be judged."""
        replies = self.generate_replies(candidates)
        scores = np.full((len(replies), len(self.samples)), np.nan)
        for row, of_candidate in enumerate(replies):
            for column, (sample, reply) in enumerate(zip(self.samples, of_candidate, strict=True)):
                if not reply.failed:
                    scores[row, column] = sample.score(reply.tokens)
        return scores

    def close(self) -> None:
        """Free the stored prompts; the bank cannot be used afterwards."""
        self._store.close()

    # --- passes ---------------------------------------------------------------------------------------------------

    def generate_replies(self, candidates: Sequence[Ints]) -> list[list[BankReply]]:
        """Generate greedy replies by candidate and sample, up to each question's limit; errors as `measure_losses`."""
        table = self._stack_candidates(candidates)
        replies: dict[tuple[int, int], BankReply] = {}

        def act(states: LayerStates, indices: list[int], part: slice) -> None:
            samples = [self.samples[index] for index in indices]
            first = None  # where a question comes first
            names = [sample.prompt_sha256 for sample in samples]
            if all(name in self._last for name in names):
                first = torch.stack([self._last[name] for name in names]).to(self.loaded.device)
            reader = BankPass(self.loaded.model, samples, states, self._windows, table[part])
            stops = [find_stop_tokens(self.loaded, sample.task.format) for sample in samples]
            for candidate, row in enumerate(reader.generate_replies(first, stops), part.start):
                replies.update({(candidate, index): reply for index, reply in zip(indices, row, strict=True)})

        self._run(table, self._replying, act)
        for (_, index), reply in replies.items():  # the question, and all of the reply but its last token
            self.tokens_spent += len(self.samples[index].question_ids) + max(0, len(reply.generated) - 1)
        return [[replies[candidate, index] for index in range(len(self.samples))] for candidate in range(len(table))]

    def load_states(self, indices: Sequence[int], widths: Sequence[int]) -> LayerStates:
        """Load keys and values of samples as one batch; `widths` are the entries per head of each candidate row."""
        # As candidates have their rows: all layers under the first policy, then all under the next.
        rows = [(layer, choice) for choice in range(self._choices) for layer in self._policies]
        wanted = {
            **{(layer, 0): width for layer, width in self._windows.items()},
            **dict(zip(rows, widths, strict=True)),
        }
        names = {
            f"{part}.{layer}.{choice}": width
            for (layer, choice), width in wanted.items()
            for part in ("keys", "values")
        }
        stored = [self._store.get(self.samples[index].prompt_sha256, names) for index in indices]

        def stack(part: str, layer: int, choice: int) -> Tensor:
            name = f"{part}.{layer}.{choice}"
            return stack_states([states[name] for states in stored], right=layer in self._windows)

        return [
            [
                (stack("keys", layer, choice), stack("values", layer, choice))
                for choice in range(1 if layer in self._windows else self._choices)
            ]
            for layer in sorted({layer for layer, _ in wanted})
        ]

    def _stack_candidates(self, candidates: Sequence[Ints]) -> Ints:
        """Stack candidates as int64 [P, L, Hkv]."""
        table: Ints = np.array(candidates, dtype=np.int64).reshape(len(candidates), *self.shape)
        # A budget above a prompt's length keeps all of it, so only shorter stores are a fault.
        if table.max(initial=0) > self.cap < max(len(sample.prompt) for sample in self.samples):
            raise InternalError(f"a candidate wants {table.max()} entries of a head, the bank keeps {self.cap}")
        return table

    def _run(self, table: Ints, needs: Sequence[SampleNeed], act: BlockWork[LayerStates, int]) -> None:
        """Run `act` on all candidates and samples, in blocks as large as memory permits."""
        if not len(table):
            return
        # The largest budget of a layer in any candidate: what is behind it is never read.
        widths = np.minimum(table.max((0, 2)), self.cap).tolist()

        def load(indices: list[int]) -> LayerStates:
            return self.load_states(indices, widths)

        with run_attention(self.loaded.model):
            # Stored prompts stay where they are, so passes have what is left of the memory.
            for samples, size in split_into_blocks(needs, len(table), self._memory - self._store.nbytes):
                self._splitting.run(samples, size, len(table), load, act)
