"""Exporters of query statistics (`calibrate --method query_statistics`), for tools that score keys by them."""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np
from safetensors.numpy import save

from kvsearch.core.arrays import Floats
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.printed import escape_markdown
from kvsearch.exporters.base import CARD_FILE, WEIGHTS_FILE, ExportedFiles, ExportInputs, ProfileExporter
from kvsearch.models.loading import MODEL_CONFIG_FILE
from kvsearch.plan import Profile, canonical_json
from kvsearch.plan.methods import name_methods_with
from kvsearch.plan.profile_arrays import QUERY_ABS, QUERY_COVARIANCE, QUERY_MEAN
from kvsearch.policies.expected_attention import ExpectedAttention
from kvsearch.policies.registry import build_policy

STATISTICS = "statistics.safetensors"


def read_statistics(profile: Profile, target: str) -> dict[str, Floats]:
    """Return the arrays of a profile of query statistics, of all layers of its model.

    Raises:
        UsageError: it has none.
        IncompatibleError: layers of another kind than full attention were not measured.
    """
    metadata = profile.metadata
    if QUERY_MEAN not in profile.arrays:
        raise UsageError(
            f"target {target} is made of query statistics, and this profile is of method {metadata.method}: calibrate "
            f"--method {name_methods_with(QUERY_MEAN)}"
        )
    if len(metadata.layers) != metadata.model.layers:
        raise IncompatibleError(
            f"target {target} is told of all layers, and {metadata.model.layers - len(metadata.layers)} of "
            f"{metadata.model.layers} have no full attention: nothing was measured there"
        )
    return {name: np.asarray(profile.arrays[name]) for name in (QUERY_MEAN, QUERY_COVARIANCE, QUERY_ABS)}


class KvpressEA(ProfileExporter):
    """Mean and covariance of queries for `ExpectedAttentionStatsPress`, a folder as the hub's mixin reads it."""

    name: ClassVar[str] = "kvpress-ea"

    def export(self, profile: Profile, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Make the folder."""
        arrays = read_statistics(profile, self.name)
        metadata = profile.metadata
        policy = build_policy(metadata.policy)
        if not isinstance(policy, ExpectedAttention):
            raise UsageError(f"target {self.name} is for policy expected_attention, not {policy.name}")
        layers, heads, size = arrays[QUERY_MEAN].shape
        config = {
            "num_layers": layers, "num_heads": heads, "head_dim": size, "model_name": metadata.model.name,
            "dataset_name": str(metadata.provenance.settings.get("data")), "num_samples": metadata.questions,
            "sample_seq_len": metadata.length, "n_sink": policy.sinks,
        }  # fmt: skip
        files = {
            WEIGHTS_FILE: save({name: arrays[name] for name in (QUERY_MEAN, QUERY_COVARIANCE)}),
            MODEL_CONFIG_FILE: canonical_json(config),
        }
        usage = (
            f"press = ExpectedAttentionStatsPress(compression_ratio=0.8, n_sink={policy.sinks}, "
            f"n_future_positions={policy.future}, use_covariance={policy.covariance}, use_vnorm={policy.value_norm}, "
            f"epsilon={policy.epsilon}, stats_folder={{path!r}})",
        )
        return ExportedFiles(files, usage)


class TriAttention(ProfileExporter):
    """Statistics of the complex pairs (i, i + D/2) of queries before their rotary embedding, by query head.

    `layerLL_headHH.q_mean_real`, `.q_mean_imag`: the mean of a pair as a complex number; `.q_abs_mean`: the mean of
    its modulus, [D/2] each. The card has the script that makes the pickled file of it that the tools read, as kvsearch
    writes no pickles.
    """

    name: ClassVar[str] = "triattention"

    def export(self, profile: Profile, inputs: ExportInputs) -> ExportedFiles:  # noqa: ARG002
        """Make the folder.

        Raises:
            UsageError, IncompatibleError: as `read_statistics`; part of a head is not turned.
        """
        arrays = read_statistics(profile, self.name)
        mean = arrays[QUERY_MEAN]
        modulus = arrays[QUERY_ABS]
        size = mean.shape[2]
        pairs = modulus.shape[2]
        if 2 * pairs != size:
            raise IncompatibleError(
                f"target {self.name} is told of heads that are turned as a whole, and {2 * pairs} of {size} numbers "
                "of a head are"
            )
        parts = {"q_mean_real": mean[..., :pairs], "q_mean_imag": mean[..., pairs:], "q_abs_mean": modulus}
        named = {
            f"layer{layer:02}_head{head:02}.{name}": np.ascontiguousarray(part[layer, head])
            for name, part in parts.items()
            for layer in range(mean.shape[0])
            for head in range(mean.shape[1])
        }
        about = {
            "head_dim": size, "dtype": "float32", "rope_style": "half", "model": profile.metadata.model.name,
            "sampled_heads": [[layer, head] for layer in range(mean.shape[0]) for head in range(mean.shape[1])],
        }  # fmt: skip
        file_metadata = {"metadata": json.dumps(about)}
        card = _CARD.format(model=escape_markdown(profile.metadata.model.name))
        files = {STATISTICS: save(named, file_metadata), CARD_FILE: card.encode()}
        return ExportedFiles(files, ("the script in {path}/README.md makes the .pt file that the tools read",))


_CARD = """\
# Query statistics of {model} for TriAttention

`statistics.safetensors` has, for every query head, `q_mean_real`, `q_mean_imag` and `q_abs_mean` over the pairs
(i, i + D/2) of its queries before the rotary embedding. TriAttention and TensorRT-LLM read a
pickled file; this makes it:

```python
import json
from collections import defaultdict

import torch
from safetensors import safe_open

stats = defaultdict(dict)
with safe_open("statistics.safetensors", "pt") as file:
    metadata = json.loads(file.metadata()["metadata"])
    for name in file.keys():
        head, _, part = name.partition(".")
        stats[head][part] = file.get_tensor(name)
torch.save({{"metadata": metadata, "stats": dict(stats)}}, "statistics.pt")
```
"""
