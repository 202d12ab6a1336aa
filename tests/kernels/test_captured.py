"""A decode step that is captured with its kernels goes on, token after token, as steps of PyTorch's operations do.

What a launch is given is written down once: grids, widths and chunks must hold for all steps that are replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.kernels import attention
from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attach import PlannedModel
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.decode import decoding, steps
from kvsearch.runtime.shared_prefill import read
from kvsearch.runtime.store.flat import FlatBlock
from tests.families import build, prompts
from tests.kernels.serving import interpreted
from tests.runtime.recorder import Recorder, capturing

pytestmark = pytest.mark.nightly

TOKENS = 18
POLICIES = {
    "streaming": {"sinks": 2}, "h2o": {}, "tova": {}, "snapkv": {"window": 2, "kernel": 3, "refresh": 4},
}  # fmt: skip


def say(run: PlannedModel) -> tuple[Tensor, Tensor]:
    """The tokens of a reply to a padded batch, and their logits."""
    ids, mask = prompts(2, 20, pads=5)
    with run:
        made = run.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return made.sequences, torch.stack(made.logits)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of every launch of attention that was not a replay."""
    found: list[int] = []
    launch = attention.Chunked.attend

    def noted(made: attention.Chunked, *args: Any, **kwargs: Any) -> None:
        found.append(made.columns)
        launch(made, *args, **kwargs)

    monkeypatch.setattr(attention.Chunked, "attend", noted)
    return found


@pytest.mark.filterwarnings("error::kvsearch.core.errors.KvsearchWarning")
@pytest.mark.parametrize(("name", "fused"), [*((name, True) for name in POLICIES), ("h2o", False)])
def test_what_is_replayed_says_what_the_plain_loop_does(
    name: str, fused: bool, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, step = {"steps": 0}, decoding.make_fused_step

    def stepped(*args: object, **kwargs: object) -> Tensor | None:
        found = step(*args, **kwargs) if fused else None  # type: ignore[arg-type]
        done["steps"] += found is not None
        return found

    monkeypatch.setattr(decoding, "make_fused_step", stepped)
    model = build("llama", num_hidden_layers=1)
    # rows of a layer are added up in one block; elsewhere one head is over its budget before the other
    budgets = np.array([[9, 9] if name == "tova" else [6, 24]])
    program = Program.of_policy(
        model, create_policy(name, POLICIES[name]), dict.fromkeys(("prefill", "decode"), lambda _: budgets)
    )
    plain, captured = (attach(model, program, graphs=graphs) for graphs in (False, True))
    with interpreted(False):
        expected = say(plain)
    assert not widths
    recorder = Recorder()
    with capturing(recorder):
        found = say(captured)
    assert widths
    assert bool(done["steps"]) == fused
    assert recorder.log.count("replayed") > TOKENS // 3, recorder.log
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=2e-5, rtol=0)
    assert torch.equal(captured.cache.entries(), plain.cache.entries())


class TestFlat:
    """Without a decode phase all entries of a layer lie behind one another."""

    def planned(self) -> PlannedModel:
        """Budgets that differ between heads; streaming keeps the same entries whatever rounds how."""
        model: Any = build("llama", num_hidden_layers=2)
        budgets = np.array([[6, 11], [3, 17]])
        return attach(model, Program.of_policy(model, create_policy("streaming"), {"prefill": lambda _: budgets}))

    @pytest.mark.filterwarnings("error::kvsearch.core.errors.KvsearchWarning")
    @pytest.mark.parametrize("room", [6, 512])
    def test_replayed_steps_are_those_of_the_cpu(
        self, room: int, widths: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where room runs out and graphs of what was there before are dropped."""
        monkeypatch.setattr(steps, "MAX_ROOM", room)
        with interpreted(False):
            expected = say(self.planned())
        assert not widths
        recorder, run = Recorder(), self.planned()
        with capturing(recorder):
            tokens, logits = say(run)
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(logits, expected[1], atol=2e-5, rtol=0)
        captured = recorder.log.count("captured")
        assert captured == (3 if room == 6 else 1)
        assert recorder.log.count("replayed") >= TOKENS - 1 - 2 * captured
        most = min(room, TOKENS)  # there is room for, made in turn
        assert set(widths) == {longest + ahead for longest in (11, 17) for ahead in range(most, TOKENS + 1, most)}
        for layer in run.cache.planned.values():
            (block,) = layer.holder.blocks  # type: ignore[union-attr]
            assert isinstance(block, FlatBlock)
            assert not block.fixed  # the cache is left as others leave it

    def test_questions_take_what_was_captured_of_others(self) -> None:
        """Padding is another step, and a longer question makes room anew; all else is captured once."""
        model: Any = build("llama", num_hidden_layers=1, tie_word_embeddings=False)
        program = Program.of_policy(model, create_policy("streaming"), {"prefill": lambda _: np.array([[6, 11]])})
        contexts = [prompts(1, 24, seed=seed)[0][0] for seed in (1, 2)]
        lengths = {"first": (5, 5), "alike": (5, 5), "padded": (3, 5), "alike again": (4, 4), "longer": (30, 30)}
        questions = [
            [prompts(1, count, seed=seed)[0][0] for count in pair] for seed, pair in enumerate(lengths.values())
        ]

        def answers(recorder: Recorder | None) -> Iterator[list[list[int]]]:
            with capturing(recorder), run_attention(model):
                replies = read(model, PlanCache(model, program), contexts, set())
                for asked in questions:
                    yield replies.ask(asked, [TOKENS, TOKENS])

        with interpreted(False):
            expected = list(answers(None))
        recorder = Recorder()
        captured = []
        for found, alone in zip(answers(recorder), expected, strict=True):
            assert found == alone
            captured.append(recorder.log.count("captured"))
        assert captured == [1, 1, 2, 2, 3]
