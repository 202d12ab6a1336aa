"""KVzip: the prompt is read again, after itself, and entries are worth the most attention that they then get."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import find_attention_modules, read_output_weight
from kvsearch.policies import create_policy
from kvsearch.policies.base import Needs, SecondPass
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.observe import LED_BY, read_again
from kvsearch.runtime.shared_prefill import prefill_all
from tests.families import build, prompts
from tests.runtime.helpers import feed, held_tokens, running

LENGTH, CHUNK = 30, 12


@pytest.mark.parametrize("plus", [False, True])
def test_scores_are_the_most_attention_from_what_is_read_again(plus: bool) -> None:
    model, (ids, _) = build("llama"), prompts(1, LENGTH)
    with running(model, NAME):
        found = read_again(model, [Needs(reread=SecondPass(CHUNK, plus))], ids)
    values: dict[int, Tensor] = {}
    for index, module in find_attention_modules(model).items():
        module.v_proj.register_forward_hook(lambda _, __, out, index=index: values.__setitem__(index, out[0].detach()))
    wanted = [torch.zeros(2, LENGTH) for _ in found]
    model.set_attn_implementation("eager")  # the model's own code
    for first in range(0, LENGTH, CHUNK):
        whole = torch.cat([ids, ids[:, max(0, first - LED_BY) : first + CHUNK]], 1)
        with torch.no_grad():
            output = model(whole, output_attentions=True, output_hidden_states=True)
        for layer, weights in enumerate(output.attentions):
            taken = weights[0, :, LENGTH:, :LENGTH]
            if plus:
                weight = read_output_weight(find_attention_modules(model)[layer], len(taken))
                value = (
                    values[layer][:LENGTH].unflatten(-1, (2, -1)).transpose(0, 1).repeat_interleave(len(taken) // 2, 0)
                )
                taken = taken * (value @ weight).norm(dim=-1)[:, None]
                taken = taken / output.hidden_states[layer][0, LENGTH:].norm(dim=-1)[:, None]
            best = taken.amax(1).view(2, -1, LENGTH).amax(1)
            wanted[layer] = torch.maximum(wanted[layer], best)
    for layer, scores in found.items():
        torch.testing.assert_close(scores[SecondPass(CHUNK, plus)][0], wanted[layer], atol=1e-5, rtol=1e-3)


def test_no_sequence_depends_on_its_neighbours_and_all_ways_agree() -> None:
    """A padded batch, each prompt alone, and `generate` keep the same entries."""
    model, (ids, mask) = build("llama"), prompts(2, LENGTH, pads=7)
    program = Program.uniform(model, create_policy("kvzip", {"chunk": CHUNK, "protect": 2}), lambda _: 12)
    with running(model, NAME):
        together = PlanCache(model, program)
        prefill_all(model, [together], ids, mask)
        for row, pads in enumerate((7, 0)):
            alone = PlanCache(model, program)
            prefill_all(model, [alone], ids[row : row + 1, pads:], mask[row : row + 1, pads:])
            for layer in alone.planned:
                assert held_tokens(alone, layer, 1, 2)[0] == held_tokens(together, layer, 2, 2)[row]
    with attach(model, program) as planned:
        with pytest.raises(UsageError, match="give `generate` the attention_mask"):
            planned.generate(ids, pad_token_id=0, max_new_tokens=1, do_sample=False)
        planned.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
        for layer in planned.cache.planned:
            kept = [planned.cache.kept_positions(layer, 1, head)[:12] for head in range(2)]
            assert kept == [together.kept_positions(layer, 1, head) for head in range(2)]


def test_where_it_cannot_be_read_again() -> None:
    model, (ids, mask) = build("llama"), prompts(1, LENGTH)
    policy = create_policy("kvzip", {"protect": 2})
    program = Program.uniform(model, policy, lambda _: 12)
    with running(model, NAME), pytest.raises(UsageError, match="a policy wants the prompt read again"):
        feed(model, PlanCache(model, program), [(ids, mask)])
    with pytest.raises(UsageError, match="needs the prompt read again and has no decode rule: use it in prefill"):
        Program(program.prefill, program.prefill)
    model.config.max_position_embeddings = LENGTH + 10
    with running(model, NAME), pytest.raises(IncompatibleError, match="leaves no room to read it again"):
        prefill_all(model, [PlanCache(model, program)], ids, mask)
