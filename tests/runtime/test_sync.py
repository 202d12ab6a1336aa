"""Masks are looked at once per step; that steps wait for nothing else is tested on the fake accelerator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvsearch.policies import create_policy
from kvsearch.runtime import PlanCache, Program
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.program import PhaseProgram
from tests.families import DEVICES, build, prompts
from tests.runtime.helpers import feed, running


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("phases", ["prefill", "both"])
def test_the_mask_of_a_padded_batch_is_looked_at_once_per_step(
    phases: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many layers there are: transformers itself looks at it once in every step, too."""
    model = build("llama", device)
    ids, mask = prompts(2, 20, pads=5, device=device)
    phase = PhaseProgram(dict.fromkeys(range(4), create_policy("tova")), lambda length: np.array([[9, 12]] * 4))
    looks: list[str] = []

    def look(flag: torch.Tensor) -> bool:
        looks.append("bool")
        return bool(flag.numpy())

    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, Program(phase, phase if phases == "both" else None))
        feed(model, cache, [(ids, mask)])
        for step in range(1, 4):
            seen = torch.cat([mask, mask.new_ones(2, step)], 1)
            shown = seen[:, None, None].bool()
            with monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, "__bool__", look)
                model(ids[:, :1], attention_mask=shown, position_ids=ids[:, :1], past_key_values=cache)
    assert len(looks) == 3
