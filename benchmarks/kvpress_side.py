"""What kvpress keeps of a prompt: the part of compare_kvpress.py that runs in an environment of its own.

    .venv-kvpress/bin/python benchmarks/kvpress_side.py FOLDER RATIO...

Reads from FOLDER a checkpoint (`model`) and `tokens.safetensors` (the prompt, and a text for query statistics), and
writes `kvpress.safetensors`: for every press and ratio what it `kept` (bool) and its `scores` (float), both
[layers, kv heads, tokens]; the metadata are the versions. The presses run as they are: what they keep is found by
looking up the rows they return, or read from the mask of those that do not drop.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

SINKS = 4  # tokens that ExpectedAttention leaves out of its query statistics
EAGER = "ObservedAttention"  # the press that reads the attention the model computed
TENS = "Knorm, full tens"  # the press whose prompt is cut to a multiple of ten

UNEXPLAINED = "[red]not explained"


def run_in(python: Path, folder: Path, *arguments: float) -> None:
    """Run this file under another Python, without network."""
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    subprocess.run([python, __file__, folder, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL, env=offline)


def save_statistics(model: Any, text: Any, folder: Path) -> None:
    """Mean and covariance of the unrotated queries of a text, as ExpectedAttentionStatsPress reads them."""
    import torch
    from kvpress.presses.expected_attention_with_stats import ExpectedAttentionStats, patch_rotary_embedding

    with patch_rotary_embedding(model) as captured:
        model(input_ids=text, logits_to_keep=1)
    queries = torch.cat(captured)[:, :, SINKS:]  # [layers, heads, tokens, d]
    centred = queries - queries.mean(2, keepdim=True)
    layers, heads, _, width = queries.shape
    stats = ExpectedAttentionStats(layers, heads, width, "text", "model", 1, text.shape[1], SINKS)
    stats.query_mean.data = queries.mean(2)
    stats.query_cov.data = centred.transpose(-1, -2) @ centred / (queries.shape[2] - 1)
    stats.save_pretrained(folder)


def presses(statistics: str) -> dict[str, Callable[[float], Any]]:
    """A maker of each press from the share to evict."""
    import kvpress
    from kvpress import CriticalKVPress, ExpectedAttentionPress, PyramidKVPress, SnapKVPress

    return {
        "SnapKV": SnapKVPress,
        "PyramidKV": PyramidKVPress,
        "PyramidKV, w=8, beta=4": lambda ratio: PyramidKVPress(ratio, window_size=8, beta=4),
        "AdaKV(SnapKV)": lambda ratio: kvpress.AdaKVPress(SnapKVPress(ratio)),
        "CriticalKV(SnapKV)": lambda ratio: CriticalKVPress(SnapKVPress(ratio)),
        "CriticalKV(ExpectedAttention)": lambda ratio: CriticalKVPress(ExpectedAttentionPress(ratio, use_vnorm=False)),
        "StreamingLLM": kvpress.StreamingLLMPress,
        "TOVA": kvpress.TOVAPress,
        EAGER: kvpress.ObservedAttentionPress,
        "Knorm": kvpress.KnormPress,
        TENS: kvpress.KnormPress,
        "KeyDiff": kvpress.KeyDiffPress,
        "ExpectedAttention": ExpectedAttentionPress,
        "ExpectedAttention, epsilon=0.01": lambda ratio: ExpectedAttentionPress(ratio, epsilon=0.01),
        "ExpectedAttention, covariance=False": lambda ratio: ExpectedAttentionPress(ratio, use_covariance=False),
        "ExpectedAttention, value_norm=False": lambda ratio: ExpectedAttentionPress(ratio, use_vnorm=False),
        "ExpectedAttentionStats": lambda ratio: kvpress.ExpectedAttentionStatsPress(ratio, stats_folder=statistics),
    }


def watch(press: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Two tables that a press fills as it runs: what each layer kept, and the scores it went by."""
    kept: dict[int, Any] = {}
    scores: dict[int, Any] = {}
    scorer = press if hasattr(press, "score") else press.press
    compress, score = press.compress, scorer.score

    def watched_score(module: Any, *args: Any, **kwargs: Any) -> Any:
        found = score(module, *args, **kwargs)
        scores[module.layer_idx] = found[0].float().clone()  # some presses write to it later
        return found

    def watched_compress(module: Any, hidden: Any, keys: Any, values: Any, *rest: Any) -> Any:
        module.masked_key_indices = None
        found = compress(module, hidden, keys, values, *rest)
        kept[module.layer_idx] = rows_kept(keys[0], found[0][0])
        if module.masked_key_indices is not None:  # nothing was dropped; what is masked stands for it
            kept[module.layer_idx][module.masked_key_indices[1:]] = False
        return found

    press.compress, scorer.score = watched_compress, watched_score
    return kept, scores


def rows_kept(before: Any, after: Any) -> Any:
    """Which rows of `before` [heads, n, d] are in `after` [heads, b, d], bit by bit; bool [heads, n]."""
    mask = before.new_zeros(before.shape[:2]).bool()
    for head, (old, new) in enumerate(zip(before.numpy(), after.numpy(), strict=True)):
        position = {row.tobytes(): index for index, row in enumerate(old)}
        mask[head, [position[row.tobytes()] for row in new]] = True
        if len(position) < len(old) or int(mask[head].sum()) < len(new):
            raise SystemExit("two entries are the same: what the press kept cannot be told")
    return mask


def count_reason(press: str, kept: Any, ratio: float) -> str:
    """Why kvpress keeps so many entries; nothing to say if they are the share asked for."""
    counts, share = kept.sum(-1), round(kept.shape[-1] * (1 - ratio), 6)  # [layers, kv heads]
    cut, same = max(1, int(kept.shape[-1] * (1 - ratio))), bool((counts == counts[0, 0]).all())
    if press.startswith("PyramidKV") and abs(counts.double().mean() - share) <= 0.5:
        return "no pyramid: its last layer would fall below the window" if same else f"pyramid {counts[:, 0].tolist()}"
    heads = counts.shape[1]
    if press.startswith("AdaKV") and (counts.sum(1) == heads * cut).all():
        return f"{counts.min()} to {counts.max()}: the heads of a layer compete for {heads} x {cut}"
    if not same or counts[0, 0] != cut:
        return UNEXPLAINED
    return "" if cut == math.floor(share + 0.5) else f"{share:g} were asked for: int(n * (1 - ratio)) rounds down"


def package_versions(*more: str) -> dict[str, str]:
    """Versions on this side."""
    return {"Python": platform.python_version()} | {name: version(name) for name in (*more, "transformers", "torch")}


def main(folder: Path, ratios: list[float]) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import DynamicCache, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    tokens = load_file(folder / "tokens.safetensors")
    length, layers = tokens["prompt"].shape[1], range(model.config.num_hidden_layers)
    save_statistics(model, tokens["text"], folder / "statistics")
    found: dict[str, torch.Tensor] = {}
    for name, make in presses(str(folder / "statistics")).items():
        model.set_attn_implementation("eager" if name == EAGER else "sdpa")
        prompt = tokens["prompt"][:, : length // 10 * 10 if name == TENS else length]
        for ratio in ratios:
            press = make(ratio)
            kept, scores = watch(press)
            with press(model):
                model(input_ids=prompt, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
            found[f"kept/{name}/{ratio}"] = torch.stack([kept[layer] for layer in layers])
            found[f"scores/{name}/{ratio}"] = torch.stack([scores[layer] for layer in layers])
    save_file(found, folder / "kvpress.safetensors", package_versions("kvpress"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [float(ratio) for ratio in sys.argv[2:]])
