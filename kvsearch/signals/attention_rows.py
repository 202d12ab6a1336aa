"""Signals from attention rows: importance of entries, effects of hiding entries, and dispersion of attention.

Rows are computed in pieces that bound the scratch memory. For one query, y = concat_h(A_h V_h) W_O under the full
cache, and yhat is the same with attention renormalised over the entries that are kept. The loss of a layer's attention
output (LAVa) is |y - yhat|_1. A bias of the output projection cancels.

How scattered the attention of a layer is are PolyKV's budget signal (arXiv 2606.15157, Eq. 4: the entropy of the mean
row, which is high for two heads that look at one place each) and CAKE's preference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from kvsearch.policies.base import Observation
from kvsearch.policies.cake import compute_row_moments
from kvsearch.policies.scoring import choose_chunk_bytes, count_window_rows, iterate_window_rows, softmax, sum_columns

MIN_NORM = 1e-6
LOG_OFFSET = 1e-10  # added inside CAKE's logarithm, as in the official code
# exponents are below it: masses far below the largest are no 0, and a sum of all is still no infinity
EXPONENT_SHIFT = 60.0
MIN_BLOCK_ROWS = 64  # rows of a block at least: a product of fewer is slow


def score_rows(
    query: Tensor, keys: Tensor, scaling: float, softcap: float | None, tables: int, places: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield causal logits of the K rows, a few kv heads at a time, [B, heads, G, K, N] fp32.

    `query` [B, Hq, K, D] are the last K of the N tokens of `keys` [B, Hkv, N, D], or those at `places` [K] among them.
    `tables` is how many fp32 tables of that shape the caller makes of a piece.
    """
    batch, heads, length, _ = keys.shape
    rows = query.shape[2]
    # Keys are not repeated for the query heads of a group.
    queries = query.reshape(batch, heads, -1, query.shape[-1])  # a kv head's query heads as rows of one matrix
    group = query.shape[1] // heads
    first_later = length - rows if places is None else 0  # no row is before it
    columns = torch.arange(first_later, length, device=keys.device)
    later = columns > (columns if places is None else places)[:, None]
    step = max(1, choose_chunk_bytes(keys.device) // (4 * tables * batch * group * rows * length))
    for first in range(0, heads, step):
        part = slice(first, first + step)
        scores = (queries[:, part].float() * scaling) @ keys[:, part].float().transpose(-1, -2)
        scores = scores.view(batch, -1, group, rows, length)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores[..., first_later:].masked_fill_(later, float("-inf"))
        yield part, scores


def attention_rows(scores: Tensor, part: slice, sinks: Tensor | None) -> Tensor:
    """Compute attention from logits of `score_rows`; `sinks` [Hkv, G] are extra logits without an entry."""
    return softmax(scores, None if sinks is None else sinks[None, part, :, None, None])


def exponentiate_rows(scores: Tensor, part: slice, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Exponentiate the scores of `score_rows` in place; also returns the exponentials of the `sinks` [Hkv, G].

    A row's exponentials are divided by its largest, and multiplied by exp(`EXPONENT_SHIFT`).
    """
    largest = scores.amax(-1, keepdim=True)
    if sinks is None:
        return scores.sub_(largest - EXPONENT_SHIFT).exp_(), None
    beside = sinks[None, part, :, None, None]
    largest = torch.maximum(largest, beside)
    return scores.sub_(largest - EXPONENT_SHIFT).exp_(), (beside - largest + EXPONENT_SHIFT).exp()


def importance_rows(
    query: Tensor,
    keys: Tensor,
    norms: Tensor | None,
    context: int,
    scaling: float,
    softcap: float | None = None,
    group: str = "sum",
    sinks: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return max_k w_k agg_g A[q_g, k, j] |v_j W_O[q_g]|_2 over the query rows k, for the context entries j.

    `query` [B, Hq, K, D] are the last K tokens, `keys` [B, Hkv, T + K, D] all of them, `norms` [B, Hkv, G, T] (None:
    attention alone), `sinks` [Hkv, G] logits beside every row that are no entry, `weights` [B, K] the w_k (None: 1).
    Returns [B, Hkv, T] fp32 with T = `context`. Only K attention rows are ever computed; kernels hold none of them.
    """
    from kvsearch.kernels.dispatch import serves
    from kvsearch.kernels.rows import Rows

    if serves(query, keys):
        rows = Rows.of_last(query, keys, scaling, softcap, sinks)
        return rows.peaks(context, norms, weights, "max" if group == "max" else "sum")
    importance = query.new_zeros(*keys.shape[:2], context, dtype=torch.float32)
    for block, part, scores in score_row_blocks(query, keys, scaling, softcap, tables=2):
        taken = attention_rows(scores, part, sinks)[..., :context]
        if weights is not None:
            taken = taken * weights[:, None, None, block, None]
        _keep_largest(importance, taken, norms, part, group)
    return importance


def attend_and_weigh(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: Tensor | None,
    context: int,
    scaling: float,
    softcap: float | None,
    group: str,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute attention outputs [B, Hq, K, Dv] and the importance of entries, from one softmax.

    The same attention gives both: what `importance_rows` returns takes no second one. Arguments are its own, and the
    `values` [B, Hkv, T + K, Dv] of all tokens.
    """
    batch, heads = keys.shape[:2]
    outputs = values.new_empty(batch, heads, query.shape[1] // heads, query.shape[2], values.shape[-1])
    importance = query.new_zeros(batch, heads, context, dtype=torch.float32)
    for block, part, scores in score_row_blocks(query, keys, scaling, softcap, tables=3):
        attention = attention_rows(scores, part, sinks)
        attended = attention.flatten(2, 3).to(values.dtype) @ values[:, part, : attention.shape[-1]]
        outputs[:, part, :, block] = attended.view(*attention.shape[:-1], -1)
        _keep_largest(importance, attention[..., :context], norms, part, group)
    return outputs.view(*query.shape[:3], -1), importance


def score_row_blocks(
    query: Tensor, keys: Tensor, scaling: float, softcap: float | None, tables: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield causal logits of some of the K rows and a few kv heads at a time, [B, heads, G, R, n] fp32, with both.

    Of N entries the n are there that the last of the rows sees. `query` [B, Hq, K, D] are the last K tokens of `keys`
    [B, Hkv, N, D]; `tables` is how many fp32 tables of a block's shape the caller makes.
    """
    batch, heads, length, _ = keys.shape
    rows = query.shape[2]
    row_bytes = 4 * tables * batch * (query.shape[1] // heads) * length  # of one kv head
    step = min(rows, max(MIN_BLOCK_ROWS, choose_chunk_bytes(keys.device) // row_bytes))
    keys = keys.float()  # once, not for every block
    for first in range(0, rows, step):
        block = slice(first, min(first + step, rows))
        seen = keys[:, :, : length - rows + block.stop]
        for part, scores in score_rows(query[:, :, block], seen, scaling, softcap, tables):
            yield block, part, scores


def _keep_largest(largest: Tensor, attention: Tensor, norms: Tensor | None, part: slice, group: str) -> None:
    """Raise importance `largest` [B, Hkv, T] to that of some rows; `attention` [B, heads, G, R, T] is overwritten."""
    taken = attention if norms is None else attention.mul_(norms[:, part, :, None])
    over_group = taken.amax(2) if group == "max" else taken.sum(2)
    torch.maximum(largest[:, part], over_group.amax(2), out=largest[:, part])


def residual_weights(states: Tensor) -> Tensor:
    """Return 1 / |h_k| of residual streams h [B, K, d_model], [B, K] fp32: the w_k of KVzip+ (arXiv 2601.07891)."""
    weights: Tensor = 1 / states.float().norm(dim=-1).clamp(min=MIN_NORM)
    return weights


def compare_outputs(full: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
    """Compare attention outputs [..., K, d_model] after W_O, which broadcast: cosine (Eq. 2) and relative L2 distance.

    Both are per token, [..., K] fp32; the distance is |full - changed| / |full|.
    Outputs are compared before the residual is added: it would make every cosine nearly 1. All is computed in fp32.
    Equal vectors have cosine 1 and error 0 exactly, two zero vectors too. Of one zero vector the cosine is 0; the error
    is 1 whichever of the two is zero, as there is nothing to measure a change of nothing against.
    """
    first = full.float()
    second = changed.float()
    length = torch.linalg.vector_norm(first, dim=-1)
    other = torch.linalg.vector_norm(second, dim=-1)
    distance = torch.linalg.vector_norm(first - second, dim=-1)
    product = (first * second).sum(-1)
    # Rounding may leave a cosine just above 1.
    cosine = (product / length / other).clamp(-1, 1)  # one after the other: their product can overflow
    error = distance / length
    nothing = length == 0
    gone = other == 0
    cosine = cosine.masked_fill(nothing | gone, 0.0)
    error = torch.where(nothing, 1.0, error)
    equal = (distance == 0) | (nothing & gone)
    return cosine.masked_fill(equal, 1.0), error.masked_fill(equal, 0.0)


def attention_change(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    shown: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute A V - Ahat V of every query head, [B, Hq, K, Dv], and the attention on hidden entries, [B, Hq, K]; fp32.

    Ahat is the attention to those `shown` alone.
    `query` [B, Hq, K, D] are the last K tokens, `keys` [B, Hkv, N, D] and `values` [B, Hkv, N, Dv] are of all N tokens,
    `shown` [B, Hkv, K, N] bool has what each query attends to, itself at least; what comes after a query is hidden
    anyway. Softmax is fp32, over a few kv heads at a time. The change is exactly 0 where nothing is hidden.
    """
    outputs = []
    evicted = []
    for part, scores in score_rows(query, keys, scaling, softcap, tables=4):
        hidden = ~shown[:, part, None]
        attention = attention_rows(scores, part, sinks)
        mass = (attention * hidden).sum(-1, keepdim=True)
        kept = attention_rows(scores.masked_fill_(hidden, float("-inf")), part, sinks)
        # on what is kept A - Ahat is -mass * Ahat: the difference itself would drown a small mass in rounding
        change = torch.where(hidden, attention, -mass * kept)
        outputs.append(change @ values[:, part, None].float())
        evicted.append(mass[..., 0])
    return torch.cat(outputs, 1).flatten(1, 2), torch.cat(evicted, 1).flatten(1, 2)


def eviction_errors(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    keeps: Tensor,
    factors: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Measure how far kv heads' outputs move when they keep only a part of the prompt's entries, [n, Hkv] fp32.

    For each of n masks, the mean over rows of |(A V - Ahat V) W_O|^2, see `attention_change`, from one softmax: entries
    that the same masks show are summed up once, and what a mask keeps and hides is made of these sums.

    `query` [Hq, K, D] are the rows of the tokens at `places` [K] among the N of a sequence, `keys` [Hkv, N, D] and
    `values` [Hkv, N, Dv] are of all N. `keeps` [n, Hkv, T] bool are masks of the first T, the others are always shown;
    n is at most 62. `factors` [Hkv, G * Dv, G * Dv] fp32 are W_O W_O^T of all query heads of a kv head together,
    `sinks` [Hkv, G] logits beside every row that are no entry.
    """
    count, heads, length = keeps.shape
    rows = query.shape[1]
    bits = torch.arange(count, device=keeps.device)[:, None]
    # which masks show an entry, as a number: entries that the same ones show lie side by side
    shown, order = (keeps.long() << bits[:, None]).sum(0).sort(-1)
    order = order[..., None].to(keys.device)
    keys, values = (
        torch.cat([all_[:, :length].gather(1, order.expand(-1, -1, all_.shape[-1])), all_[:, length:]], 1)
        for all_ in (keys, values.float())
    )
    # A column of ones, so that one product gives sums of values and the mass.
    values = nn.functional.pad(values, (0, 1), value=1.0)  # a row's last sum is its mass
    errors = []
    for part, scores in score_rows(query[None], keys[None], scaling, softcap, tables=2, places=places):
        masses_of_rows, beside = exponentiate_rows(scores, part, sinks)
        exponentials = masses_of_rows[0].flatten(1, 2)  # [heads, G * K, N]
        for number, head in enumerate(range(heads)[part]):
            patterns, sizes = torch.unique_consecutive(shown[head], return_counts=True)  # [P] each
            pieces = [*sizes.tolist(), keys.shape[1] - length]
            *sums, kept = (
                masses @ states
                for masses, states in zip(
                    torch.split(exponentials[number], pieces, 1), torch.split(values[head], pieces), strict=True
                )
            )
            if beside is not None:
                kept[:, -1:] += beside[0, number].view(-1, 1)
            is_kept = (patterns >> bits & 1).to(kept)  # [n, P]
            of_patterns = torch.stack(sums)
            kept = kept + torch.einsum("np,prd->nrd", is_kept, of_patterns)
            hidden = torch.einsum("np,prd->nrd", 1 - is_kept, of_patterns)
            total = kept[..., -1:] + hidden[..., -1:]
            # on what is kept A - Ahat is minus the hidden mass times Ahat, see `attention_change`
            at_kept = kept[..., :-1] / kept[..., -1:].clamp(min=torch.finfo(torch.float32).tiny)
            change = (hidden[..., :-1] - hidden[..., -1:] * at_kept) / total
            of_rows = change.view(count, -1, rows, change.shape[-1]).transpose(1, 2).flatten(2)  # [n, K, G * Dv]
            errors.append(((of_rows @ factors[head]) * of_rows).sum(-1).clamp(min=0).mean(-1))
    return torch.stack(errors, 1)


def kept_prefix_errors(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slopes: Tensor,
    orders: Sequence[Tensor],
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Measure the weighted output error of kv heads that keep the first b entries of an order, [n, Hkv, T + 1] fp32.

    The error at index b is the sum of (g . (o_b - o))^2 over tokens and query heads: o is the attention output under
    the full cache, o_b that with attention renormalised over the b entries, and g its weight, `slopes` [Hq, K, Dv]. It
    is Fisher-weighted where g are derivatives of a log-likelihood.

    `query` [Hq, K, D] are the last K of N tokens, `keys` [Hkv, N, D] and `values` [Hkv, N, Dv] are of all N. Each of
    the n `orders` [Hkv, T] has the columns of the first T, the entry that stays longest first; the others are always
    seen. `sinks` [Hkv, G] are logits beside every row that are no entry.
    """
    length = orders[0].shape[1]
    slopes = slopes.view(len(keys), -1, *slopes.shape[1:])
    errors = []
    for part, scores in score_rows(query[None], keys[None], scaling, softcap, tables=6):
        (masses,), beside = exponentiate_rows(scores, part, sinks)  # [heads, G, K, N]
        # g . v for every entry: outputs are needed along g alone, so no values are added up.
        pulls = (slopes[part] @ values[part, None].float().transpose(-1, -2)).mul_(masses)
        seen = masses[..., length:].sum(-1, keepdim=True)
        seen = seen if beside is None else seen + beside[0]
        pulled = pulls[..., length:].sum(-1, keepdim=True)
        full = pulls.sum(-1, keepdim=True) / (masses[..., :length].sum(-1, keepdim=True) + seen)
        of_orders = []
        for order in orders:
            columns = order[part, None, None].to(keys.device).expand(*masses.shape[:-1], -1)
            # Prefix sums over the order give the mass of every budget at once.
            kept = torch.cat([seen, masses.gather(-1, columns)], -1).cumsum(-1)
            kept.clamp_(min=torch.finfo(torch.float32).tiny)  # of masses too far below the largest is nothing left
            moved = torch.cat([pulled, pulls.gather(-1, columns)], -1).cumsum(-1)
            of_orders.append(moved.div_(kept).sub_(full).square_().sum((1, 2)))
        errors.append(torch.stack(of_orders))
    return torch.cat(errors, 1)


def compute_output_loss(change: Tensor, weight: Tensor) -> Tensor:
    """Compute |change W_O|_1 of each query, [B, K] fp32 (LAVa, arXiv 2509.09754, Lemma 1 with p = 1).

    `change` [B, Hq, K, Dv] is that of the heads' outputs, `weight` [Hq, Dv, d_model] is W_O per query head, fp32.
    """
    moved = change.float().transpose(1, 2).flatten(2) @ weight.flatten(0, 1)
    return moved.abs().sum(-1)


def bound_output_loss(evicted: Tensor, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return 2 C sum_h Vmax_h m_h (LAVa Theorem 1), and with each head's own C_h 2 sum_h C_h Vmax_h m_h, which is less.

    Both bound the loss of each query, [B, K] fp32.
    m_h is `evicted` [B, Hq, K], the attention that query head h loses. Vmax_h is the largest L1 norm among the values
    [B, Hkv, N, Dv] that the query sees, the K queries being the last tokens. C_h is the most that W_O, `weight`
    [Hq, Dv, d_model], makes of a unit of L1 norm in head h: the largest L1 norm of a row. C is the largest C_h.
    """
    norms = torch.linalg.vector_norm(values, ord=1, dim=-1, dtype=torch.float32)
    largest = norms.cummax(-1).values[..., values.shape[2] - evicted.shape[2] :]
    moved = 2 * evicted * largest.repeat_interleave(evicted.shape[1] // largest.shape[1], 1)
    # Norm of W_O as a map from L1 to L1: its largest row sum.
    gains = weight.abs().sum(-1).amax(-1)
    return gains.amax() * moved.sum(1), (gains[:, None] * moved).sum(1)


def average_attention(
    query: Tensor,
    keys: Tensor,
    scaling: float,
    softcap: float | None,
    valid: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Average the attention to every key over heads and rows, [B, N] fp32.

    It adds up to 1, less what `sinks` take. Rows of padding are left out; 0 everywhere if no row is left.
    """
    rows = valid[:, keys.shape[2] - query.shape[2] :].sum(-1, keepdim=True)
    return sum_columns(query, keys, valid, scaling, softcap, sinks).mean(1) / rows.clamp(min=1)


def mean_entropy(mean: Tensor) -> float:
    """Return the entropy in nats of the attention to each key position, `mean` [N] (Eq. 4).

    What sinks take is at no position: it is left out, and the rest is not made to add up to 1.
    """
    return float(torch.special.entr(mean.double()).sum())


def measure_dispersion(observation: Observation, window: int) -> tuple[Tensor, Tensor]:
    """Measure entropy and variance of the attention of the last `window` rows to earlier entries, [B] each.

    Entropy is -sum a * log(a + 1e-10), the mean over the rows, variance the unbiased variance of a over the rows, both
    summed over query heads and candidates, fp32 (CAKE, arXiv 2503.12491, Eq. 5 and 6 as in the official code: the
    window's own columns are left out and the rest is not normalised again; the code adds the rows up, which is the same
    where all layers have as many). Where there is no candidate both are 0.
    """
    inside = observation.candidates(0, window)
    outside = ~inside[:, None, None, None]
    entropy = observation.keys.new_zeros(len(inside), dtype=torch.float32)
    for (rows_taken, _), probability in iterate_window_rows(observation, window):
        terms = (
            probability.add(LOG_OFFSET)
            .log_()
            .mul_(probability)
            .masked_fill_(outside[rows_taken, ..., : probability.shape[-1]], 0.0)
        )
        entropy[rows_taken] -= terms.sum((1, 2, 3, 4))
    variance = compute_row_moments(observation, window)[1].masked_fill(~inside[:, None, None], 0.0).sum((1, 2, 3))
    return entropy.clamp(min=0.0) / count_window_rows(observation, window), variance
