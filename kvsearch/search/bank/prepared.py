"""The samples of a bank as its passes need them: every prompt read once, sorted, and kept where there is room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch.budgets.allocator import Ints
from kvsearch.errors import IncompatibleError
from kvsearch.policies import Policy
from kvsearch.search.bank.passes import Pass, Portion, side_by_side
from kvsearch.search.bank.prefill import Prefilled, prefill
from kvsearch.search.bank.samples import BankSample
from kvsearch.search.bank.store import SampleStore
from kvsearch.search.objectives import Floats, answer_nll

Progress = Callable[[int, int], None]


class PreparedSamples:
    """Samples whose prompts were read, each different one once.

    Keeps the best `cap` entries of every head in `store`, and with `full` what the full cache says of every answer.
    The model must run the attention "kvsearch" while prompts are read.
    """

    def __init__(
        self,
        model: Any,
        policies: Mapping[int, Policy],
        windows: Mapping[int, int],
        samples: Sequence[BankSample],
        cap: int,
        store: SampleStore,
        full: bool,
    ) -> None:
        self.model, self.policies, self.windows = model, policies, windows
        self.samples, self.cap, self.store, self.full = samples, cap, store, full
        self.given: Floats = np.zeros(len(samples))  # -log p of the first token of an answer that the prompt predicts
        self.full_nll: Floats = np.full(len(samples), np.nan)  # sums over the tokens of each answer
        self.tokens = 0  # that the model has read so far
        self._vocabulary = 0
        self._last: dict[str, Tensor] = {}  # logits [V] after each prompt that replies follow at once

    def read(self, progress: Progress | None = None) -> None:
        """Read all prompts.

        Raises:
            IncompatibleError: the model emits NaN or infinity under the full cache.
            EnvironmentFault: the store cannot write a file.
        """
        users: dict[str, list[int]] = {}
        for index, sample in enumerate(self.samples):
            users.setdefault(sample.prompt_sha256, []).append(index)
        for done, (name, indices) in enumerate(users.items()):
            self._prepare(name, indices)
            if progress is not None:
                progress(done + 1, len(users))

    def portion(self, indices: Sequence[int], widths: Sequence[int]) -> Portion:
        """Some samples side by side; `widths` are how many entries per head each full-attention layer must have."""
        samples = [self.samples[index] for index in indices]
        wanted = dict(zip(self.policies, widths, strict=True))
        found: list[list[tuple[Tensor, Tensor]]] = [self._stored(sample, wanted) for sample in samples]
        layers = []
        for index, states in enumerate(zip(*found, strict=True)):
            right = index in self.windows
            layers.append((side_by_side([k for k, _ in states], right), side_by_side([v for _, v in states], right)))
        return self._portion(samples, layers)

    def last_logits(self, indices: Sequence[int]) -> Tensor | None:
        """Logits [S, V] fp32 after prompts that replies follow at once; None where a question comes first."""
        names = [self.samples[index].prompt_sha256 for index in indices]
        if any(name not in self._last for name in names):
            return None
        return torch.stack([self._last[name] for name in names]).to(self.model.device)

    def full_log_probs(self, index: int) -> Tensor:
        """What the full cache says of the answer of a sample: log-probabilities [1, rows, V] fp32."""
        rows = self.samples[index].predicting
        if not rows:
            return torch.zeros(1, 0, self._vocabulary)
        return self.store.get(_answer_name(index), {"log_probs": rows})["log_probs"]

    # --- reading a prompt -----------------------------------------------------------------------------------------

    def _prepare(self, name: str, indices: Sequence[int]) -> None:
        sample = self.samples[indices[0]]
        found = prefill(self.model, self.policies, sample.prompt, None if self.full else self.cap)
        self.tokens += found.length
        if not bool(found.logits.isfinite().all()):
            raise IncompatibleError(
                f"{sample.place}: the model emits NaN or infinite logits: check its dtype and weights"
            )
        self._vocabulary = len(found.logits)
        if not len(sample.asked):
            self._last[name] = found.logits.cpu()
        for index in indices:
            self._note_full(index, found)
        self.store.put(name, self._kept(found))

    def _note_full(self, index: int, found: Prefilled) -> None:
        """What the prompt itself says of an answer, and what the full cache says."""
        sample = self.samples[index]
        if len(sample.answer) > sample.predicting:
            self.given[index] = answer_nll(found.logits[None, None], sample.answer[None, :1])[0]
        if not self.full or not len(sample.answer):
            return
        layers = [(keys[None], values[None]) for keys, values in found.layers]
        everything = np.full((1, len(self.policies), layers[next(iter(self.policies))][0].shape[1]), found.length)
        logits = Pass(self.model, self._portion([sample], layers), everything).forced()
        self.full_nll[index] = self.given[index]
        if logits is None:
            return
        self.tokens += len(sample.following)
        self.full_nll[index] += answer_nll(logits[0], sample.answer[None, -sample.predicting :])[0]
        self.store.put(_answer_name(index), {"log_probs": logits[0].float().log_softmax(-1)})

    def _kept(self, found: Prefilled) -> dict[str, Tensor]:
        kept = {}
        for index, (keys, values) in enumerate(found.layers):
            last = keys.shape[1] if index in self.windows else self.cap
            kept[f"keys.{index}"], kept[f"values.{index}"] = _alone(keys[:, :last]), _alone(values[:, :last])
        return kept

    def _stored(self, sample: BankSample, wanted: Mapping[int, int]) -> list[tuple[Tensor, Tensor]]:
        layers = range(len(self.policies) + len(self.windows))
        widths = {index: wanted.get(index, self.windows.get(index, 0)) for index in layers}
        names = {f"{part}.{index}": width for index, width in widths.items() for part in ("keys", "values")}
        found = self.store.get(sample.prompt_sha256, names)
        return [(found[f"keys.{index}"], found[f"values.{index}"]) for index in layers]

    def _portion(self, samples: Sequence[BankSample], layers: Sequence[tuple[Tensor, Tensor]]) -> Portion:
        lengths: Ints = np.array([len(sample.prompt) for sample in samples], dtype=np.int64)
        return Portion(samples, lengths, layers, self.windows)


def _alone(states: Tensor) -> Tensor:
    """The same without the memory of what was cut off."""
    if states.untyped_storage().nbytes() == states.nbytes:
        return states
    return states.clone(memory_format=torch.contiguous_format)


def _answer_name(index: int) -> str:
    return f"answer {index}"
