"""What kvpress makes of our files. Run by the Python of `.venv-kvpress`, where kvsearch is not installed.

Arguments: a model directory, token ids as JSON, and a press as code in which PATH is the exported file. Prints the
positions that every layer and head keeps of the prompt, as JSON [L][Hkv][...].
"""

import inspect
import json
import sys

import kvpress
import numpy as np
import torch
from transformers import AutoModelForCausalLM

directory, ids, lines = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa", dtype=torch.float32).eval()
names = {name: value for name, value in vars(kvpress).items() if inspect.isclass(value)} | {
    "np": np,
    "json": json,
    "model": model,
}
for line in lines:
    exec(line, names)
press = names["press"]
prompt = torch.tensor([ids])
with torch.no_grad(), press(model):
    cache = model(prompt, use_cache=True).past_key_values

masks = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
with torch.no_grad():
    whole = model(prompt, use_cache=True).past_key_values
kept = []
for mask, cut, full in zip(masks, cache.layers, whole.layers, strict=True):
    rows = []
    for head, keys in enumerate(full.keys[0]):
        if mask is None:
            rows.append(sorted(torch.cdist(cut.keys[0, head], keys).argmin(-1).tolist()))
        else:
            gone = set(mask[2][mask[1] == head].tolist())
            rows.append([at for at in range(len(ids)) if at not in gone])
    kept.append(rows)
sys.stdout.write(json.dumps(kept) + "\n")
