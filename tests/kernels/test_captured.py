"""A decode step that is captured with its kernels goes on, token after token, as steps of PyTorch's operations do.

What a launch is given is written down once: grids, widths and chunks must hold for all steps that are replayed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.kernels import chunked
from kvsearch.kernels.dispatch import interpreted
from kvsearch.policies import create_policy
from kvsearch.runtime import Program, attach, decoding
from kvsearch.runtime.graphs import capturing
from tests.families import build, prompts
from tests.runtime.recorder import Recorder

TOKENS = 18
POLICIES = {
    "streaming": {"sinks": 2}, "h2o": {}, "tova": {}, "snapkv": {"window": 2, "kernel": 3, "refresh": 4},
}  # fmt: skip


@pytest.mark.filterwarnings("error::kvsearch.errors.KvsearchWarning")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "attention alone"])
@pytest.mark.parametrize("name", POLICIES)
def test_what_is_replayed_says_what_the_plain_loop_does(
    name: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, done = [], {"steps": 0}
    launch, step = chunked.Chunked.launch, decoding.fused_step

    def counted(*args: object, **kwargs: object) -> None:
        launched.append(name)
        launch(*args, **kwargs)  # type: ignore[arg-type]

    def stepped(*args: object, **kwargs: object) -> Tensor | None:
        found = step(*args, **kwargs) if fused else None  # type: ignore[arg-type]
        done["steps"] += found is not None
        return found

    monkeypatch.setattr(chunked.Chunked, "launch", counted)
    monkeypatch.setattr(decoding, "fused_step", stepped)
    model, (ids, mask) = build("llama", num_hidden_layers=1), prompts(2, 20, pads=5)
    # rows of a layer are added up in one block; elsewhere one head is over its budget before the other
    budgets = np.array([[9, 9] if name == "tova" else [6, 24]])
    program = Program.of_policy(
        model, create_policy(name, POLICIES[name]), dict.fromkeys(("prefill", "decode"), lambda _: budgets)
    )

    def say(graphs: bool) -> tuple[Tensor, Tensor, Tensor]:
        with attach(model, program, graphs=graphs) as planned:
            made = planned.generate(
                ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            return made.sequences, torch.stack(made.logits), planned.cache.entries()

    with interpreted(False):
        expected = say(graphs=False)
    assert not launched
    recorder = Recorder()
    with capturing(lambda _: recorder):
        found = say(graphs=True)
    assert launched
    assert bool(done["steps"]) == fused
    assert recorder.log.count("replayed") > TOKENS // 3, recorder.log
    torch.testing.assert_close(found[1], expected[1], atol=2e-5, rtol=0)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])
