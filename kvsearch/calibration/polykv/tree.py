"""The growing tree: outputs of the model on K tokens with one layer ablated, for all ablations in one sweep.

Eviction changes no prompt, so the K tokens that follow it are all that has to be computed again, and a layer below the
ablated one computes nothing new at all. The sweep goes up through the layers once: at layer l the tokens of the
baseline branch into one group for every ablation of l, and all groups go on through the layers above, where they see
the full cache. The layers are run as the model itself ran them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvsearch.core.errors import IncompatibleError
from kvsearch.core.items import Item, group_by_key
from kvsearch.models.architecture import describe, find_decoder, find_text_config
from kvsearch.policies import Observation
from kvsearch.policies.base import Needs
from kvsearch.runtime.attention import Output, make_additive_mask, make_causal_mask
from kvsearch.runtime.logits import Logits
from kvsearch.runtime.observe import DensePass, ObservedLayer, States
from kvsearch.runtime.replay.replay import FollowedLayer, Noted, select_rows
from kvsearch.runtime.stock import find_stateful_layers, make_stock_layers

SCRATCH_BYTES = 64 * 2**20  # of masks and attention logits at a time
TOLERANCE = 1e-2  # of our logits against the model's own, as a share of their size; rounding in bf16 is below it


class TreeLayer(ObservedLayer[Noted]):
    """Lets every group of a branching batch see the whole contexts and its own tokens.

    A group has all M rows of tokens. While the layer is `branching`, the last groups take these outputs
    [M, Hq, K, Dv] for their attention.
    """

    branching: list[Tensor] | None = None
    seen: Tensor | None = None  # [M, 1, K, T + K] bool: what the following tokens see; None: all, causally

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Output:
        if self.branching is None:
            self.seen = mask
            return super().attend(module, query, key, value, mask, **kwargs)
        if self.continuation is None:
            raise IncompatibleError(f"layer {self.index} runs in an unknown order: this model cannot be swept")
        old = query.shape[0] - sum(len(made) for made in self.branching)
        parts = [made.to(query.dtype) for made in self.branching]
        if old:
            parts.insert(0, self._shared((query[:old], key[:old], value[:old]), self.continuation.logits))
        return torch.cat(parts).transpose(1, 2).contiguous(), None

    def follow(self, module: nn.Module, tokens: States, mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Attend as `ObservedLayer` does, without a copy of a prompt for every row that follows it."""
        if self.rows is None:
            return super().follow(module, tokens, mask, **kwargs)
        logits = Logits.of_call(module, tokens[0], tokens[1], kwargs)
        return self._shared(tokens, logits).transpose(1, 2).contiguous()

    def _shared(self, tokens: States, logits: Logits) -> Tensor:
        """Attend with groups of the rows of tokens to the contexts and to themselves, [groups * M, Hq, K, Dv]."""
        count = tokens[0].shape[2]
        length = self.keys.shape[2]
        seen = make_causal_mask(count, length + count, tokens[0].device)[None, None] if self.seen is None else self.seen
        if self.rows is None:
            return attend_shared((self.keys, self.values), tokens, seen, logits)
        outputs = []
        places = []
        for prompts, followers in sort_by_followers(self.rows.tolist()):
            past = select_rows(self.keys, prompts), select_rows(self.values, prompts)
            query, key, value = (
                tensor.view(-1, len(self.rows), *tensor.shape[1:])[:, followers.to(tensor.device)].flatten(0, 2)
                for tensor in tokens
            )
            visible = seen if len(seen) == 1 else select_rows(seen, followers[0])
            output = attend_shared(past, (query, key, value), visible, logits)
            outputs.append(output.view(-1, followers.numel(), *output.shape[1:]))
            places.append(followers.flatten())
        back = torch.cat(places).argsort().to(tokens[0].device)
        return torch.cat(outputs, 1)[:, back].flatten(0, 1)


def sort_by_followers(rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Group prompts by their number of followers; `rows` are the prompts that rows of tokens follow.

    Returns, for every number n, the prompts that are followed by so many rows, [P], and these rows, [n, P].
    """
    followers = group_by_key(range(len(rows)), lambda place: rows[place])
    alike = group_by_key(followers, lambda prompt: len(followers[prompt]))
    return [
        (torch.tensor(prompts), torch.tensor([followers[prompt] for prompt in prompts]).T) for prompts in alike.values()
    ]


def attend_shared(
    past: tuple[Tensor, Tensor], states: tuple[Tensor, Tensor, Tensor], seen: Tensor, logits: Logits
) -> Tensor:
    """Compute attention of many groups of K tokens after the same contexts, [groups * B, Hq, K, Dv].

    `past` are keys [B, Hkv, T, D] and values [B, Hkv, T, Dv] of the contexts, `states` queries [groups * B, Hq, K, D],
    keys and values of the tokens, group by group; `seen` is [B or 1, 1, K, T + K], bool or additive. The contexts are
    copied once for some groups, whose tokens hide from each other.
    """
    query, key, value = states
    batch, heads, length, _ = past[0].shape
    query_heads, count = query.shape[1:3]
    groups = len(query) // batch
    queries = query.view(groups, batch, heads, query_heads // heads, count, -1)
    own = [tensor.view(groups, batch, heads, count, -1) for tensor in (key, value)]
    visible = seen if seen.dtype == torch.bool else seen >= 0
    # own columns of other groups are computed in vain: an eighth of all at most
    step = min(max(1, length // (8 * count)), max(1, SCRATCH_BYTES // (4 * batch * query_heads * count * length)))
    outputs = []
    masks = _apart(visible, min(step, groups), query_heads // heads, length)
    if logits.plain:
        masks = make_additive_mask(masks, query.dtype)
    for first in range(0, groups, step):
        part = queries[first : first + step].permute(1, 2, 0, 3, 4, 5)  # [B, Hkv, groups, G, K, D]
        keys, values = (
            torch.cat([far, near[first : first + step].permute(1, 2, 0, 3, 4).flatten(2, 3)], 2)
            for far, near in zip(past, own, strict=True)
        )
        mask = masks[:, :, : part[0, 0, ..., 0].numel(), : keys.shape[2]]  # of the first groups is that of fewer
        output = _attention(part, keys, values, mask, logits)
        outputs.append(output.view(*part.shape[:-1], -1).permute(2, 0, 1, 3, 4, 5))
    return torch.cat(outputs).flatten(2, 3).flatten(0, 1)


def _apart(visible: Tensor, groups: int, width: int, length: int) -> Tensor:
    """Mask what groups see of the context and of all their tokens, [B, 1, groups * G * K, T + groups * K]."""
    batch = len(visible)
    count = visible.shape[2]
    far = visible[..., :length][:, :, None, None].expand(-1, -1, groups, width, -1, -1)
    near = visible.new_zeros(batch, 1, groups, width, count, groups, count)
    for group in range(groups):
        near[:, :, group, :, :, group] = visible[:, :, None, :, length:]
    return torch.cat([far.reshape(batch, 1, -1, length), near.reshape(batch, 1, -1, groups * count)], -1)


def _attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, logits: Logits) -> Tensor:
    """Attend [B, Hkv, groups, G, K, D] to keys [B, Hkv, N, D] and values [B, Hkv, N, Dv], [B, Hkv, groups * G * K, Dv].

    `mask` is [B or 1, 1, groups * G * K, N], additive where logits are plain, else bool.
    """
    batch, heads, groups, width = query.shape[:4]
    query = query.flatten(2, 4)
    if logits.plain:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=logits.scaling)
    scores = (
        logits.of(query, keys).masked_fill_(~mask, float("-inf")).view(batch * heads, groups, width, -1, keys.shape[2])
    )
    each = torch.arange(heads, device=query.device).repeat(batch)
    weights = logits.softmax(scores.transpose(1, 2), each).transpose(1, 2)
    return weights.reshape(batch, heads, -1, keys.shape[2]).to(values.dtype) @ values


class Tree(DensePass[Observation]):
    """A batch of contexts as the policies of layers see them, and sweeps over the tokens that follow.

    Of the last pass over these under the full cache it has what was `entering` every layer, with its `arguments`, and
    `leaving` for the final norm, [M, K, d_model] each.

    Args:
        model: a model whose attention implementation is "kvsearch".
        needs: by full-attention layer, what policies need of the contexts there.
        prompts, mask: as for `DensePass`.
    """

    layer = TreeLayer
    entering: list[Tensor]
    arguments: list[dict[str, Any]]
    leaving: Tensor

    def __init__(
        self, model: Any, needs: Mapping[int, Sequence[Needs]], prompts: Tensor, mask: Tensor | None = None
    ) -> None:
        if stateful := find_stateful_layers(make_stock_layers(model)):
            raise IncompatibleError(
                f"layers {', '.join(map(str, stateful))} of {type(model).__name__} carry a running state from token to "
                "token, so one sweep cannot ablate many layers: use --signals cosine,entropy"
            )
        every = {index: needs.get(index, ()) for index in range(describe(model).layers)}
        super().__init__(model, every, lambda prompt: prompt, prompts, mask)

    @cached_property
    def modules(self) -> Any:
        """The decoder's layers."""
        return find_decoder(self.model).layers

    @cached_property
    def top(self) -> nn.Module:
        """The decoder's final norm; IncompatibleError if it is unknown."""
        norm: nn.Module | None = getattr(find_decoder(self.model), "norm", None)
        if norm is None:
            raise IncompatibleError(
                f"{type(self.model).__name__} has its final norm in a place that is not known here: use --signals "
                "cosine,entropy"
            )
        return norm

    @contextmanager
    def baseline_pass(self, tokens: Tensor, rows: Tensor | None = None) -> Iterator[dict[int, FollowedLayer]]:
        """Teacher-force `tokens` [M, K] after contexts, and yield the states of each layer.

        Sweeps over them are possible until this ends.

        `rows` [M], on the host, says which context each row of tokens follows (None: one each, in order).

        Raises:
            IncompatibleError: the model makes its logits in a way that is not known here.
        """
        self.entering = []
        self.arguments = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.entering.append(args[0] if args else kwargs["hidden_states"])
            self.arguments.append({name: value for name, value in kwargs.items() if name != "hidden_states"})

        def note_last(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.leaving = args[0]

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in self.modules]
        hooks.append(self.top.register_forward_pre_hook(note_last))
        with ExitStack() as stack:
            try:
                output = stack.enter_context(self.following(tokens, rows=rows, logits_to_keep=1))
            finally:
                for hook in hooks:
                    hook.remove()
            self._check_head(output.logits[:, -1])
            yield {layer.index: layer for layer in self.continuations()}

    @torch.no_grad()
    def sweep(
        self, ablated: Mapping[int, Sequence[Item]], outputs: Callable[[int, Sequence[Item]], list[Tensor]]
    ) -> Tensor:
        """Compute the input of the final norm for every ablation, [groups, M, K, d_model], in the order of `ablated`.

        `ablated` has the ablations of each layer, ascending; `outputs(layer, items)` are the attention outputs
        [M, Hq, K, Dv] of that layer under some of them, computed when the sweep gets there.
        """
        batch = self.leaving.shape[0]
        hidden = self.leaving[:0]
        for index in range(min(ablated), len(self.modules)):
            made = outputs(index, some) if (some := ablated.get(index, ())) else []
            branches = self.entering[index]
            hidden = torch.cat([hidden.to(branches.device), branches.repeat(len(made), 1, 1)])
            layer: TreeLayer[Observation] = self.cache.layers[index]
            layer.branching = made
            try:
                result = self.modules[index](hidden, **_repeated(self.arguments[index], batch, len(hidden) // batch))
            finally:
                layer.branching = None
            hidden = result[0] if isinstance(result, tuple) else result
        return hidden.view(-1, batch, *hidden.shape[1:])

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute next-token logits [..., V] fp32 from inputs of the final norm [..., d_model]."""
        made: Tensor = self.model.get_output_embeddings()(self.top(hidden)).float()
        cap = getattr(find_text_config(self.model), "final_logit_softcapping", None)
        return made if cap is None else cap * torch.tanh(made / cap)

    def _check_head(self, expected: Tensor) -> None:
        made = self.logits(self.leaving[:, -1])
        expected = expected.float().to(made.device)
        apart = (made - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        if not bool(apart <= TOLERANCE) and bool(expected.isfinite().all()):
            raise IncompatibleError(
                f"{type(self.model).__name__} makes its logits in a way that is not known here (they differ by "
                f"{float(apart):.0%}): use --signals cosine,entropy"
            )


def _repeated(arguments: Mapping[str, Any], batch: int, times: int) -> dict[str, Any]:
    """Repeat the arguments of a layer for `times` as many rows; what a group sees is decided by its cache layer."""

    def longer(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(longer(item) for item in value)
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == batch:
            return value.repeat(times, *[1] * (value.dim() - 1))
        return value

    return {name: None if name == "attention_mask" else longer(value) for name, value in arguments.items()}
