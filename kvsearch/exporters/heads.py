"""Targets that are told a number for every head."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from kvsearch.core.arrays import Ints
from kvsearch.core.errors import IncompatibleError
from kvsearch.exporters.base import SINGLE, BudgetExporter, Budgets, Exported, Inputs, Loss
from kvsearch.plan import ModelFingerprint, canonical_json
from kvsearch.plan.rounding import largest_remainder
from kvsearch.policies.registry import policy_of


class AttentionMatching(BudgetExporter):
    """The share of all entries that every kv head gets, `{"L0H0": share, ...}`, adding up to 1.

    Attention Matching makes its own entries; what it takes from a plan is how they are shared out.
    """

    name: ClassVar[str] = "attention-matching"
    tool: ClassVar[str] = "Attention Matching, head_budgets/*.json"
    keeps: ClassVar[str] = "how entries are shared out between kv heads; not their number, not the policy"
    proportional: ClassVar[bool | None] = None

    def write(self, budgets: Budgets, inputs: Inputs) -> Exported:  # noqa: ARG002
        """Write the shares, exact to a float."""
        shares = {
            f"L{layer}H{head}": entries / budgets.total for (layer, head), entries in np.ndenumerate(budgets.entries)
        }
        losses = [Loss("no policy: the tool fits entries of its own", budgets.total)]
        usage = (f"head_budgets {{path}}, and a total of {budgets.total} entries",)
        return Exported({SINGLE: canonical_json(shares)}, usage, losses)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Share out as many entries as the heads could hold of a prompt of `length` tokens."""
        shares = json.loads(files[SINGLE])
        rows = [[shares[f"L{layer}H{head}"] for head in range(model.kv_heads)] for layer in range(model.layers)]
        total = length * model.layers * model.kv_heads
        return largest_remainder(np.array(rows).ravel() * total, total).reshape(model.layers, model.kv_heads)


class HeadKV(BudgetExporter):
    """A score of every query head on one line, `{"layer-head": [score]}`; every query head holds a cache of its own.

    HeadKV gives head h round(s_h / sum(s) * (B // beta) * L * Hq + B - B // beta) entries, with B its
    `--max_capacity_prompts` and beta its `--head_beta`. With beta 1 the scores are the budgets.
    """

    name: ClassVar[str] = "headkv"
    tool: ClassVar[str] = "HeadKV and KVCache-Factory, --head_path"
    keeps: ClassVar[str] = "budgets of all kv heads, for every query head of the group; ranks as SnapKV"
    needs_model: ClassVar[bool] = True
    coarser: ClassVar[str] = "the tool has a mean of whole entries, {at} per head"
    ranks: ClassVar[tuple[str, ...]] = ("snapkv",)

    def write(self, budgets: Budgets, inputs: Inputs) -> Exported:
        """Write the line; the query heads of a group have the budget of their kv head."""
        group = inputs.known_architecture.group
        mean = max(1, budgets.total // budgets.entries.size)
        scores = {
            f"{layer}-{head * group + member}": [int(entries)]
            for (layer, head), entries in np.ndenumerate(budgets.entries)
            for member in range(group)
        }
        per_layer = [round(float(row.mean())) for row in budgets.entries]
        usage = (
            f"--method headkv --head_path {{path}} --head_beta 1 --max_capacity_prompts {mean} "
            f"--window_sizes {policy_of(budgets.policy).recent_count}",
            f"as a list per layer: max_capacity_prompts = {per_layer}",
        )
        return Exported({SINGLE: json.dumps(scores).encode() + b"\n"}, usage, at=mean)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Give heads their share of a mean of `length` entries, as the tool does with beta 1."""
        scores = np.array([np.mean(score) for score in json.loads(files[SINGLE]).values()])
        capacity: Ints = np.rint(scores / scores.sum() * length * scores.size).astype(np.int64)
        return capacity.reshape(model.layers, model.kv_heads, -1)[:, :, 0]


class DuoAttentionGates(BudgetExporter):
    """A folder of `full_attention_heads.tsv`, L lines of Hkv gates from 0 to 1, and `config.json` with two sizes.

    Heads with the highest gates keep everything, the others `sink_size` first and `recent_size` last entries. A gate is
    the share of the prompt that the plan keeps, so that other shares of streaming heads can be asked for, too.
    """

    name: ClassVar[str] = "duo"
    tool: ClassVar[str] = "DuoAttention, OmniServe / LServe, kvpress"
    keeps: ClassVar[str] = "which heads keep everything; all others keep first and recent entries, as many each"
    coarser: ClassVar[str] = "heads keep everything or first and recent entries only"
    ranks: ClassVar[tuple[str, ...]] = ("duo_attention", "streaming")
    proportional: ClassVar[bool | None] = None

    def write(self, budgets: Budgets, inputs: Inputs) -> Exported:  # noqa: ARG002
        """Write the folder; as many heads keep everything as come nearest to the plan's total."""
        policy = policy_of(budgets.policy)
        at = budgets.known_length
        sinks = policy.sink_count
        recent = policy.recent_count or max(1, int(budgets.entries.min()) - sinks)
        streaming = min(at, sinks + recent)
        if streaming >= at:
            raise IncompatibleError(
                f"{sinks} first and {recent} recent entries are all of {at} tokens: nothing to evict"
            )
        order = np.argsort(-budgets.entries, axis=None, kind="stable")
        whole = round((budgets.total - streaming * order.size) / (at - streaming))
        whole = min(max(whole, 0), order.size)
        keeps_all = np.zeros_like(budgets.entries)
        keeps_all.flat[order[:whole]] = 1
        gates = budgets.entries / at * (1 - 1e-9) + 1e-9 * keeps_all  # heads on both sides may hold as many
        table = "\n".join("\t".join(f"{gate:.12g}" for gate in row) for row in gates) + "\n"
        share = 1 - whole / order.size
        usage = (
            f"DuoAttention: sparsity {share:.4f} with the folder {{path}}",
            f"kvpress: DuoAttentionPress(head_compression_ratio={share:.4f}) with the folder's pattern",
        )
        files = {
            "full_attention_heads.tsv": table.encode(),
            "config.json": canonical_json({"sink_size": sinks, "recent_size": recent, "sparsity": share}),
        }
        return Exported(files, usage)

    def read(self, files: Mapping[str, bytes], model: ModelFingerprint, length: int) -> Ints:
        """Let the share of heads stream that the folder names, those of the lowest gates."""
        config = json.loads(files["config.json"])
        gates = np.loadtxt(io.BytesIO(files["full_attention_heads.tsv"]), delimiter="\t", ndmin=2)
        order = np.argsort(gates, axis=None, kind="stable")
        entries = np.full(gates.size, length, dtype=np.int64)
        streaming = order[: round(gates.size * config["sparsity"])]
        entries[streaming] = min(length, config["sink_size"] + config["recent_size"])
        return entries.reshape(model.layers, model.kv_heads)
