"""A decode step that is captured with its kernels goes on, token after token, as steps of PyTorch's operations do.

What a launch is given is written down once: grids, widths and chunks must hold for all steps that are replayed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.kernels import attention
from kvsearch.policies import create_policy
from kvsearch.runtime import Program, attach
from kvsearch.runtime.attach import PlannedModel
from kvsearch.runtime.decode import decoding, steps
from kvsearch.runtime.store.flat import FlatBlock
from tests.families import build, prompts
from tests.kernels.serving import interpreted
from tests.runtime.recorder import Recorder, capturing

pytestmark = pytest.mark.nightly

TOKENS = 18
POLICIES = {"h2o": {}, "tova": {}, "snapkv": {"window": 2, "kernel": 3, "refresh": 4}}


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
@pytest.mark.parametrize(("name", "fused"), [("h2o", False), ("tova", True), ("snapkv", True)])
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
    def test_replayed_steps_are_those_of_the_cpu(self, widths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where room runs out and graphs of what was there before are dropped."""
        room = 6
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
        assert captured == 3
        assert recorder.log.count("replayed") >= TOKENS - 1 - 2 * captured
        assert set(widths) == {longest + ahead for longest in (11, 17) for ahead in range(room, TOKENS + 1, room)}
        for layer in run.cache.planned.values():
            (block,) = layer.holder.blocks  # type: ignore[union-attr]
            assert isinstance(block, FlatBlock)
            assert not block.fixed  # the cache is left as others leave it
