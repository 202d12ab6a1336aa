"""What answers lose without the context in one layer, in all but one, and in all: can layers stand in for others?

    python benchmarks/study_effects.py                                  # both bundled models
    python benchmarks/study_effects.py bundled-redundant --questions 8

The questions and right answers are those of the model's calibration data. Losses are KL divergences of next-token
distributions from those of the full cache, summed over the tokens of an answer, in nats; means over the questions. An
answer counts as right if each of its tokens is the most likely one after the tokens before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch.nn.functional import kl_div

from kvsearch.calibration.data import find_default_data, load_calibration_data
from kvsearch.calibration.importance import ImportancePass
from kvsearch.calibration.prompts import Continuation, encode_prompts
from kvsearch.models.loading import BUNDLED, load
from kvsearch.runtime.attention import run_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(BUNDLED))
    parser.add_argument("--questions", type=int, help="the first ones of the calibration data (default: all)")
    parser.add_argument(
        "--first", type=int, default=4, help="entries that stay everywhere, at the start of the context"
    )
    parser.add_argument("--last", type=int, default=8, help="entries that stay everywhere, at its end")
    args = parser.parse_args()
    for model in args.models:
        study(model, args.questions, args.first, args.last)


def study(model: str, questions: int | None, first: int, last: int) -> None:
    loaded, data = load(model), load_calibration_data(find_default_data(model)).limit_questions(questions)
    found: dict[str, list[tuple[float, bool]]] = {}
    with run_attention(loaded.model):
        for prompt in encode_prompts(loaded, data):
            passed = ImportancePass(loaded.model, [], prompt.ids.to(loaded.device))
            layers, heads = len(passed.observed), passed.model.config.num_key_value_heads
            ends = torch.zeros(heads, prompt.length, dtype=torch.bool)
            ends[:, :first] = ends[:, prompt.length - last :] = True
            everywhere = dict.fromkeys(range(layers), ends)
            hidden = {"none": {}, "all": everywhere}
            for layer in range(layers):
                hidden[f"{layer}"] = {layer: ends}
                hidden[f"all but {layer}"] = {other: ends for other in everywhere if other != layer}
            for after in prompt.continuations:
                full = seeing(passed, after, {})
                for name, keep in hidden.items():
                    changed = seeing(passed, after, keep)
                    answer = after.tokens[0, -len(changed) :].to(changed.device)
                    right = bool((changed.argmax(-1) == answer).all())
                    before, after_change = (logits.float().log_softmax(-1) for logits in (full, changed))
                    nats = float(kl_div(after_change, before, reduction="sum", log_target=True))
                    found.setdefault(name, []).append((nats, right))

    def mean(name: str) -> tuple[float, float]:
        nats, right = zip(*found[name], strict=True)
        return sum(nats) / len(nats), sum(right) / len(right)

    print(f"{model}: {len(found['none'])} questions, {first} + {last} entries stay everywhere")
    print(f"{'layer':>8} {'without its context':>24} {'with its context alone':>26}")
    for layer in range(layers):
        print(
            f"{layer:>8}",
            *(f"{nats:10.2f} nats, {right:4.0%} right" for nats, right in (mean(str(layer)), mean(f"all but {layer}"))),
        )
    single = sum(mean(str(layer))[0] for layer in range(layers))
    print(
        f"sum of single effects {single:.2f} nats, joint effect {mean('all')[0]:.2f} nats ({mean('all')[1]:.0%} right)"
    )
    print(f"full cache {mean('none')[1]:.0%} right\n")


def seeing(passed: ImportancePass, after: Continuation, keep: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the logits that predict the tokens of an answer."""
    return passed.logits_seeing(after.tokens.to(passed.model.device), keep)[after.predicting]


if __name__ == "__main__":
    main()
