"""Calibrate query statistics: moments of the queries of a model before their rotary embedding, over many texts.

ExpectedAttention (Devoto et al. 2025) estimates mean and covariance anew from every prompt; measured once over many
texts they are what other tools load. Mean and mean modulus of the complex pairs that the rotary embedding turns are
what TriAttention scores keys by.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvsearch.calibration.base import Calibration
from kvsearch.calibration.options import QueryStatisticsOptions
from kvsearch.calibration.prompts import CalibrationPrompt, check_lengths, encode_prompts
from kvsearch.core.items import Progress, with_progress
from kvsearch.models.architecture import describe, require_plain_rotary
from kvsearch.models.loading import LoadedModel
from kvsearch.models.work import Work
from kvsearch.plan import Profile
from kvsearch.plan.profile_arrays import QUERY_ABS, QUERY_COVARIANCE, QUERY_MEAN
from kvsearch.policies import Observation, Policy
from kvsearch.policies.base import Needs
from kvsearch.runtime.attention import run_attention
from kvsearch.runtime.collector import Moments, unrotate_queries
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.speed import scale_to_first

LayerQueries = tuple[Moments, Tensor]  # of one layer, and the sum of the moduli of the complex pairs, [Hq, R/2]


class QueryStatisticsCalibration(Calibration[QueryStatisticsOptions]):
    """Queries of all context tokens behind the sinks of the policy, by query head of every full layer.

    The profile has "query_mean" [L, Hq, D], "query_cov" [L, Hq, D, D], divided by the number of queries, and
    "query_abs" [L, Hq, R/2], the mean modulus of pairs (i, i + R/2) of the R rotary dimensions.
    """

    def prepare(self) -> list[CalibrationPrompt]:
        (policy,) = self.policies
        require_plain_rotary(self.loaded.model, "query statistics")
        prompts = encode_prompts(self.loaded, self.data, max_length=self.options.max_length)
        check_lengths(prompts, policy, lambda _: policy.sink_count)
        return prompts

    def estimate(self, prompts: Sequence[CalibrationPrompt]) -> Work:
        (policy,) = self.policies
        measure_first = partial(_measure_layers, self.loaded, prompts[0], policy)
        return scale_to_first(self.loaded.model, [prompt.work() for prompt in prompts], measure_first)

    def measure(self, prompts: Sequence[CalibrationPrompt], progress: Progress | None = None) -> Profile:
        (policy,) = self.policies
        # one after the other: covariances of all contexts at once would not fit a large model's host
        contexts = self.loaded.map(partial(_measure_layers, policy=policy), prompts)
        layers: list[LayerQueries] = []
        for context in with_progress(contexts, len(prompts), progress):
            pairs = zip(layers, context, strict=True) if layers else ()
            merged = [(moments.merged(more), moduli + others) for (moments, moduli), (more, others) in pairs]
            layers = merged or context
        statistics = [moments.statistics() for moments, _ in layers]
        arrays = {
            QUERY_MEAN: torch.cat([layer.mean for layer in statistics]),
            QUERY_COVARIANCE: torch.cat([layer.covariance for layer in statistics]),
            QUERY_ABS: torch.stack([moduli / moments.rows.double() for moments, moduli in layers]),
        }
        lengths = [prompt.length for prompt in prompts]
        queries = int(layers[0][0].rows)
        settings = {"data": self.data.name, **self.options.settings(), "queries": queries}
        metadata = self.describe(policy.spec, settings, lengths, policy.least)
        return Profile(metadata, {name: array.float().cpu().numpy() for name, array in arrays.items()})


def _measure_layers(loaded: LoadedModel, prompt: CalibrationPrompt, policy: Policy) -> list[LayerQueries]:
    """Compute the statistics of one context by layer."""

    def look(seen: Observation) -> LayerQueries:
        assert seen.queries is not None
        assert seen.rotary is not None
        positions = torch.arange(prompt.length, device=seen.queries.device)[None]
        cos, _ = seen.rotary(positions[0, :1])
        plain = unrotate_queries(seen.queries, positions, seen.rotary)[:, :, policy.sink_count :]
        everything = torch.ones(1, plain.shape[2], dtype=torch.bool, device=plain.device)
        pairs = cos.shape[-1] // 2
        moduli = torch.hypot(plain[..., :pairs], plain[..., pairs : 2 * pairs])
        return Moments.of(plain, everything), moduli.double().sum(2)[0]

    needs = dict.fromkeys(describe(loaded.model).full_layers, (Needs(query_rows=prompt.length),))
    with run_attention(loaded.model):
        return DensePass(
            loaded.model, needs, look, prompt.ids.to(loaded.device), refusal=prompt.refusal(loaded.name)
        ).noted
