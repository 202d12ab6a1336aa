"""The candidate bank: what it costs, what it holds, what it does with little memory and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.search.bank import memory as bank_memory
from kvsearch.search.bank.bank import CandidateBank
from kvsearch.search.bank.passes import BankPass
from kvsearch.search.bank.samples import BankSample
from tests import tiny
from tests.search.bank.cases import SNAPKV, random_candidates, samples_of, tokens_of, without_answers


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny.loaded(tie_word_embeddings=False)


@pytest.fixture(scope="module")
def samples(model: LoadedModel) -> list[BankSample]:
    return samples_of(model, "question-agnostic")


def least(bank: CandidateBank) -> int:
    """Bytes that one sample and candidate take at least."""
    return bank_memory.check_fits([*bank._forcing, *bank._replying], 10**12)


def test_every_context_is_read_once_and_every_candidate_reads_what_follows(
    model: LoadedModel, samples: list[BankSample]
) -> None:
    """Of the entries only the cap is stored: 4 layers, 2 kv heads, 16 fp32 numbers for a key and for a value."""
    progress: list[tuple[int, int]] = []
    bank = CandidateBank(model, SNAPKV, samples, 50, progress=lambda done, whole: progress.append((done, whole)))
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert bank.tokens_spent == sum({sample.prompt_sha256: len(sample.prompt) for sample in samples}.values())
    assert bank._store.nbytes == 3 * 50 * 4 * 2 * 2 * 16 * 4
    assert model.model.config._attn_implementation == "sdpa"
    read, candidates = bank.tokens_spent, random_candidates(model, 3, 50)
    bank.measure_losses(candidates)
    asked = sum(len(sample.question.ids) + len(sample.answer) - 1 for sample in samples)
    assert bank.tokens_spent - read == 3 * asked
    read = bank.tokens_spent
    replies = tokens_of(bank, candidates)  # no stop token among them: all are as long as they may be
    assert [[len(reply or []) for reply in row] for row in replies] == [[sample.limit for sample in samples]] * 3
    expected = sum(len(sample.question.ids) + sample.limit - 1 for sample in samples)
    assert bank.tokens_spent - read == 3 * expected


def test_little_memory_changes_no_result(model: LoadedModel, samples: list[BankSample]) -> None:
    candidates = random_candidates(model, 5, 50)
    with CandidateBank(model, SNAPKV, samples, 50) as bank:
        roomy = bank.measure_losses(candidates), tokens_of(bank, candidates)
        need, stored = least(bank), bank._store.nbytes
    memory = need + stored // 2
    with CandidateBank(model, SNAPKV, samples, 50, max_memory=memory) as bank:
        assert 0 < bank._store.nbytes <= min(stored // 2, memory // 2)
        tight = bank.measure_losses(candidates), tokens_of(bank, candidates)
    np.testing.assert_allclose(tight[0], roomy[0], atol=2e-5)
    assert tight[1] == roomy[1]
    with pytest.raises(UsageError, match=rf"takes {need:,} bytes, there are {need - 1:,}: raise .* at least 1 bytes"):
        CandidateBank(model, SNAPKV, samples, 50, max_memory=need - 1)


def test_running_out_of_memory_goes_on_with_less(
    model: LoadedModel, samples: list[BankSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = random_candidates(model, 7, 50)
    bank = CandidateBank(model, SNAPKV, samples, 50)
    expected, spent = bank.measure_losses(candidates), bank.tokens_spent
    forced, tried = BankPass.force_answers, []

    def limited(self: BankPass) -> Any:
        tried.append((self.count, len(self.samples)))
        if self.count * len(self.samples) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return forced(self)

    monkeypatch.setattr(BankPass, "force_answers", limited)
    np.testing.assert_allclose(bank.measure_losses(candidates), expected, atol=2e-5)
    assert tried[:4] == [(7, 6), (3, 6), (1, 6), (1, 3)]  # candidates first, then samples
    # what failed does not count
    assert bank.tokens_spent - spent == 7 * sum(len(sample.following) for sample in samples)


def test_a_candidate_that_breaks_the_model_is_data(model: LoadedModel, samples: list[BankSample]) -> None:
    """The entries ranked from 30 on are broken: candidates that keep less never see them."""
    bank = CandidateBank(model, SNAPKV, samples, 50)
    for held, _ in bank._store._held.values():
        assert isinstance(held, dict)
        held["values.1.0"][:, 30:] = float("nan")
    small, large = (np.full(bank.shape, budget) for budget in (25, 40))
    losses, scores = bank.measure_losses([small, large]), bank.score_replies([large, small])
    assert np.isfinite(losses).tolist() == [[True] * 6, [False] * 6]
    assert np.isfinite(scores).tolist() == [[False] * 6, [True] * 6]
    replies = tokens_of(bank, [small, large])
    assert [[reply is None for reply in row] for row in replies] == [[False] * 6, [True] * 6]


def test_a_model_that_is_broken_itself(samples: list[BankSample]) -> None:
    broken = tiny.loaded()
    broken.model.model.norm.weight.data[0] = float("inf")
    with pytest.raises(IncompatibleError, match="task listed, example 0, question 0: the model emits NaN or infinite"):
        CandidateBank(broken, SNAPKV, samples, 50)


def test_bad_samples(samples: list[BankSample]) -> None:
    short = tiny.loaded(max_position_embeddings=64)
    with pytest.raises(IncompatibleError, match="the model takes at most 64"):
        CandidateBank(short, SNAPKV, samples, 50)


def test_questions_without_answers_have_scores_but_no_losses(model: LoadedModel) -> None:
    samples, candidates = without_answers(model), random_candidates(model, 2, 30)
    bank = CandidateBank(model, SNAPKV, samples, 30)
    assert ((bank.score_replies(candidates) > 0) & (bank.score_replies(candidates) <= 1)).all()
    with pytest.raises(UsageError, match="task talk, example 0, question 0: nll needs a right answer, and there is no"):
        bank.measure_losses(candidates)
