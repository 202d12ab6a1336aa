"""What DefensiveKV's authors keep of a prompt. Run by the Python of `.venv-kvpress`, where kvsearch is not installed.

Arguments: a model directory, token ids as JSON, the file of the authors' press, and a share of attention. The press
computes on tensors of the CPU here, without the kernels of its package. Prints the positions that every layer and head
keeps at 60% of the prompt, as JSON [L][Hkv][...].

Their code differs from their text in two places, which are set right here: the window's attention is what its last
candidates got, as one number for all heads, in place of what each head's window got; and norms of values are shares of
what all heads have at a position, in place of shares of what a head has at all positions. A share of 0 leaves out what
is taken first.
"""

import importlib.util
import json
import sys
import types
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

SHARE = 0.9  # of the authors' code
RATIO = 0.4  # evicted


@dataclass
class Scorer:
    compression_ratio: float = RATIO


for name, parent in (
    ("efficient_ada_scorer_press", "EfficientAdaScorerPress"),
    ("efficient_ada_global_scorer_press", "EfficientAdaGlobalScorerPress"),
):
    module = types.ModuleType(name)
    setattr(module, parent, Scorer)
    sys.modules[f"kvpress.presses.{name}"] = module

directory, ids, source, share = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], float(sys.argv[4])
spec = importlib.util.spec_from_file_location("authors", source)
authors = importlib.util.module_from_spec(spec)
sys.modules["authors"] = authors
spec.loader.exec_module(authors)


class Press(authors.EfficientDefensiveKVPress):
    @staticmethod
    def compute_window_attention(module, hidden_states, keys, window_size, position_embeddings):
        attention, _ = authors.EfficientDefensiveKVPress.compute_window_attention(
            module, hidden_states, keys, window_size, position_embeddings
        )
        heads = keys.shape[1]
        candidates = attention.view(1, heads, -1, *attention.shape[-2:]).mean((2, 3)).sum(-1, keepdim=True)
        if share == 0:
            return attention, 1.0
        return attention, SHARE - (candidates - (1 - share)) / candidates

    def vwl1norm(self, values, module, scores, window_bias, ave_attn_weights):
        heads, group = values.shape[1], module.num_key_value_groups
        weights = module.o_proj.weight.T.view(heads, group, module.head_dim, -1)
        norms = (values[:, :, None] @ weights).norm(p=1, dim=-1).mean(2)
        over_positions = scores * norms.sum(-2, keepdim=True) / norms.sum(-1, keepdim=True)
        return super().vwl1norm(values, module, over_positions, window_bias, ave_attn_weights)


model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa", dtype=torch.float32).eval()
inputs = {}
for index, layer in enumerate(model.model.layers):
    layer.self_attn.register_forward_pre_hook(
        lambda module, arguments, options, index=index: inputs.update({index: options}), with_kwargs=True
    )
with torch.no_grad():
    cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    press = Press()
    press.window_size = 8
    kept = []
    for index, (layer, states) in enumerate(zip(model.model.layers, cache.layers, strict=True)):
        heads, length = states.keys.shape[1:3]
        sizes = types.SimpleNamespace(bsz=1, num_key_value_heads=heads, head_lens=[length] * heads)
        options = {"metadata": sizes, "position_embeddings": inputs[index]["position_embeddings"]}
        hidden = inputs[index]["hidden_states"]
        scores = press.score(layer.self_attn, hidden, states.keys, states.values, None, options)[0]
        highest = scores.topk(int(length * (1 - RATIO) * heads + 1e-6)).indices.tolist()
        kept.append([sorted(at % length for at in highest if at // length == head) for head in range(heads)])
sys.stdout.write(json.dumps(kept) + "\n")
