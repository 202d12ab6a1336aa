"""Decode steps that are captured, as a GPU would: nothing is waited for or copied to it, and the same comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.runtime import Program, attach
from tests.families import build, prompts
from tests.runtime.policies import SMALL, for_model
from tests.runtime.recorder import Recorder, capturing
from tests.torture.device.accelerator import device, events, recording

TOKENS = 16
BUDGETS = np.array([[9, 9], [6, 13]])  # of two layers and two heads


class Strict(Recorder):
    """Refuses what CUDA refuses while it captures."""

    def capture(self, step: Any) -> Any:
        with recording():
            made = super().capture(step)
        found = {event for event in events() if event[0] != "kernel"}
        if found:
            raise RuntimeError(f"{found} while capturing")
        return made


@pytest.mark.filterwarnings("error::kvsearch.core.errors.KvsearchWarning")
@pytest.mark.parametrize(("name", "decode"), [*((name, True) for name in SMALL), ("h2o", False)])
def test_replayed_steps_are_those_of_every_policy(name: str, decode: bool) -> None:
    model, policy = build("llama", num_hidden_layers=2).to(device(1)), for_model(SMALL[name])
    phases = ("prefill", "decode") if decode and policy.no_decode_rule() is None else ("prefill",)
    program = Program.of_policy(model, policy, dict.fromkeys(phases, lambda _: BUDGETS))
    ids, mask = prompts(2, 20, pads=5, device="fakegpu:1")
    made = []
    for graphs in (Strict(), None):
        with attach(model, program) as planned, capturing(graphs):
            found = planned.generate(
                ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        made.append((torch.stack(found.logits).cpu(), planned.cache.entries()))
        assert graphs is None or graphs.log.count("replayed") > 3
    torch.testing.assert_close(made[0][0], made[1][0], atol=2e-5, rtol=0)
    assert torch.equal(made[0][1], made[1][1])


def test_what_a_gpu_would_wait_for_is_not_captured() -> None:
    x = torch.ones(3, device=device(1))
    with pytest.raises(RuntimeError, match="while capturing"):
        Strict().capture(lambda: x.cpu())
    with pytest.raises(RuntimeError, match="while it is captured"):
        Strict().capture(lambda: float(x.add_(1).sum()))
    assert x.tolist() == [1, 1, 1]
