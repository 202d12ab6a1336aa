"""Query bank: entries that stored queries of questions would attend to, each at its own place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from kvsearch.core.errors import UsageError
from kvsearch.kernels import constant
from kvsearch.policies.base import Needs, Observation
from kvsearch.policies.decoding import State, Step
from kvsearch.policies.fitted import (
    CalibratedRanking,
    find_row,
    load_fitted_profile,
    require_arrays,
    select_heads,
    spread_places,
    unrotate_keys,
)
from kvsearch.policies.scoring import choose_chunk_bytes
from kvsearch.policies.tensors import Tensor, torch

QUERY_BANK_METHOD = "query_bank"  # of the profile that has the queries
QUERIES_ARRAY = "queries"  # its arrays
EVEN_ARRAY = "even"
EVEN_SCORE = 1e-13  # the mean score of heads that are ranked evenly: where nothing is looked at, all are told apart
MEAN = "mean"  # running state: of the scores of the prompt's entries that are ranked
NORMALISER = "normaliser"  # running state: log of the sum of exponentials over the prompt, of every query


@dataclass(frozen=True)
class QueryBank(CalibratedRanking):
    """score[i] = max_n sum_g A[g, n, i] |v_i W_O[g]|, with A[g, n, :] = softmax_i(s q[g, n].k_i) over the entries i.

    q[g, n] are the N queries per query head that `calibrate --method query_bank` stored; the query heads g of a kv
    head have theirs of the same tokens. Queries and keys are both at position 0 (un-rotated): a logit is what the query
    would give to the entry if it stood where the entry stands, so that no distance is in it; what the rotary embedding
    multiplies it by (YaRN) counts. The softmax is over the entries themselves, protected ones included, beside learned
    sinks where the model has them.

    Heads that the calibration marks as even are ranked by an even spread: their scores are what the same mean, m, makes
    of places in [0, 1), 2 m even_places(i), see `spread_places`.

    While decoding, the scores of the prompt's entries stay as they are. A new token gets its score when it comes, once:
    its attention among the prompt's entries and itself. With a `refresh` all entries are scored anew every so many
    steps instead, over those that are held.
    """

    name: ClassVar[str] = QUERY_BANK_METHOD
    source: ClassVar[str] = "kvsearch; importance as LU-KV, arXiv 2602.08585, Eq. 4, over stored queries"
    summary: ClassVar[str] = "max over stored queries of sum_g A |v W_O|"
    weakness: ClassVar[str] = "as `probe`"
    made_by: ClassVar[str] = "`calibrate --method query_bank`"

    @classmethod
    def check_weights(cls, digest: str) -> None:
        _bank(digest)

    def needs(self) -> Needs:
        return Needs(projection=True, unrotated=True)

    def score(self, observation: Observation) -> Tensor:
        """Return the largest attention of the bank times the projected value norm, [B, Hkv, T] fp32."""
        scores = self._attended(observation)[0]
        return self._evened(scores, self._mean(observation)[..., None], observation)

    def start(self, observation: Observation) -> State:
        """Return the scores of the prompt's entries, and of heads the normaliser of every query and the mean score."""
        state = super().start(observation)
        state.heads[NORMALISER] = self._attended(observation)[1].clone()  # [B, Hkv, G, N]
        state.heads[MEAN] = self._mean(observation).clone()  # [B, Hkv]
        return state

    def arriving(self, step: Step) -> Tensor:
        seen = step.arrived
        state = step.cached.state.heads
        logits = torch.cat(list(self._logits(seen)), 3)  # [B, Hkv, G, N, K]
        shape = seen.keys.shape[:2]
        taken = (logits - state[NORMALISER].view(*shape, *logits.shape[2:4], 1)).sigmoid()
        attended = (taken * seen.projected_norms("l2")[:, :, :, None]).sum(2).amax(2)
        return self._evened(attended, state[MEAN].view(*shape, 1), seen).flatten(0, 1)

    def _mean(self, observation: Observation) -> Tensor:
        """Return the mean score of the entries that are ranked, [B, Hkv]."""
        ranked = observation.candidates(self.sink_count, self.recent_count)
        total = self._attended(observation)[0].masked_fill(~ranked[:, None], 0.0).sum(-1)
        return (total / ranked.sum(-1).clamp(min=1)[:, None]).clamp(min=EVEN_SCORE)

    def _evened(self, scores: Tensor, mean: Tensor, observation: Observation) -> Tensor:
        """Return scores [B, Hkv, T], in heads that are even those that places make of a `mean` [B, Hkv, 1]."""
        _, of_layer = self._stored(observation)
        even = select_heads(of_layer, observation)[..., None]
        return torch.where(even, 2 * mean * spread_places(observation.index)[:, None], scores)

    def _stored(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return the queries of a layer [Hkv, G, N, D], and heads that are ranked evenly [Hkv] bool, as views."""
        queries, even, layers = _bank(self.weights, observation.keys.device)
        row = find_row(observation.layer, layers, QUERY_BANK_METHOD)
        return queries[row], even[row]

    def _attended(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return scores [B, Hkv, T] and the normaliser of every query [B, Hkv, G, N], once per observation."""

        def compute() -> tuple[Tensor, Tensor]:
            norms = observation.projected_norms("l2")
            sinks = observation.sinks_of(slice(None))
            scores = torch.zeros_like(norms[:, :, 0])
            sums: list[Tensor] = []
            for logits in self._logits(observation):
                whole = logits.logsumexp(-1, keepdim=True)
                whole = whole if sinks is None else torch.logaddexp(whole, sinks)
                taken = (logits - whole).exp_() * norms[:, :, :, None]
                scores = torch.maximum(scores, taken.sum(2).amax(2))
                sums.append(whole[..., 0])
            return scores.masked_fill(~observation.valid[:, None], 0.0), torch.cat(sums, 3)

        return observation.shared((QUERY_BANK_METHOD, self.weights), compute)

    def _logits(self, observation: Observation) -> Iterator[Tensor]:
        """Yield logits of a few queries at a time, -inf at padding, [B, Hkv, G, n, T] fp32."""
        of_layer, _ = self._stored(observation)
        queries = select_heads(of_layer, observation)  # [B or 1, Hkv, G, N, D]
        stored = queries.shape[2]
        group = observation.projected_norms("l2").shape[2]
        if stored not in (1, group):
            raise UsageError(
                f"policy query_bank: its weights are for {stored} query heads of every kv head, and this model has "
                f"{group}"
            )
        keys = (unrotate_keys(observation) * _amplitude(observation))[:, :, None].transpose(-1, -2)
        hidden = ~observation.valid[:, None, None, None]
        size = keys.shape[0] * keys[0, 0, 0, 0].numel()
        step = max(1, choose_chunk_bytes(keys.device) // (8 * size * queries.shape[1] * queries.shape[2]))
        for part in torch.split(queries, step, 3):
            logits = (part @ keys) * observation.scaling
            if observation.softcap is not None:
                logits = observation.softcap * torch.tanh(logits / observation.softcap)
            yield logits.masked_fill(hidden, float("-inf"))


def _amplitude(observation: Observation) -> Tensor:
    """Return the factor by which the rotary embedding scales products of queries and keys, by dimension, [D] fp32."""
    made = torch.ones(observation.keys.shape[-1], device=observation.keys.device)
    if observation.rotary is not None:
        cos = observation.rotary(observation.index.new_zeros(1))[0][0].float()
        made[: len(cos)] = cos.square()
    return made


@constant
@lru_cache(maxsize=16)
def _bank(digest: str, device: Any = "cpu") -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return the queries [L, Hkv, G, N, D], the heads that are even [L, Hkv] bool, and the model layer of each row.

    Older files have no even heads. UsageError if the file is not here, or its arrays have other shapes.
    """
    profile = load_fitted_profile(digest, QUERY_BANK_METHOD)
    tails = {QUERIES_ARRAY: ("G", "N", "D"), **({EVEN_ARRAY: ()} if EVEN_ARRAY in profile.arrays else {})}
    require_arrays(profile, tails, {"D": profile.metadata.model.head_dim})
    queries = torch.from_numpy(profile.arrays[QUERIES_ARRAY].copy()).float()
    even = (
        torch.from_numpy(profile.arrays[EVEN_ARRAY] > 0)
        if EVEN_ARRAY in profile.arrays
        else torch.zeros(queries.shape[:2]) > 0
    )
    return queries.to(device), even.to(device), profile.metadata.layers
