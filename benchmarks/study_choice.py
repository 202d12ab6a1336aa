"""How good the method is that is chosen by scores, and by losses of the right replies, on so many contexts.

    python benchmarks/study_choice.py runs/real/needles/run --size 83 --dtype bfloat16
    python benchmarks/study_choice.py runs/real/questions/run --size 102 --dtype bfloat16 --methods 16

Takes a finished run of `kvsearch run` and the methods that lost least in its first screening. They answer the questions
of both its splits, select and report, and the right replies are teacher-forced. Then some contexts are drawn, again and
again; one method is chosen by what it scores there and one by what it loses there, and both are judged by what they
score on the other contexts. The regret is how many points the best method is above the chosen one; it is picked by the
same questions, so a regret of zero is out of reach.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from kvsearch.commands.run import CHOICE_FOLDER, CURVES_FOLDER, FIT_FOLDER, RunOptions, resolve_plan_length
from kvsearch.core.arrays import Floats
from kvsearch.core.errors import UsageError, assert_present
from kvsearch.evaluation.compare import prepare_plans
from kvsearch.evaluation.reply_store import read_replies
from kvsearch.models.loading import load
from kvsearch.plan import Size, load_profile
from kvsearch.plan.saved import PROFILE
from kvsearch.runs.identity import LEDGER, read_config
from kvsearch.selection.candidates import find_policy_candidates
from kvsearch.selection.joint import read_policy_curves
from kvsearch.selection.plan_race import force_beside_replies, negate_losses, score_losses
from kvsearch.selection.scores import Scores
from kvsearch.tasks.encode import have_right_replies
from kvsearch.tasks.metrics.likelihood import read_loss

CONTEXTS = (6, 8, 12, 16, 24)
DRAWS = 2000


def ask_methods(args: argparse.Namespace) -> tuple[list[str], Floats, Floats]:
    """Return the methods, and what each scores and loses in every context, [contexts, methods]."""
    recorded = assert_present(read_config(args.run), "a run without a configuration").options
    options = RunOptions.of(**{**recorded, "model": args.model, "dtype": args.dtype, "output": args.run})
    loaded = load(options.model, options.loading())
    rankings = {name: load_profile(args.run / FIT_FOLDER / name / PROFILE) for name in options.rankings}
    calibrated = replace(read_policy_curves(load_profile(args.run / CURVES_FOLDER / PROFILE)), rankings=rankings)
    screened: dict[str, list[float]] = {}
    for reply in read_replies(args.run / CHOICE_FOLDER / str(args.size) / "screen-1" / LEDGER).values():
        screened.setdefault(reply.method, []).append(read_loss(reply.reply))
    scores: list[Floats] = []
    losses: list[Floats] = []
    for name in ("select", "report"):
        split = options.split(name, options.find_tasks(options.model, name), options.protocol)
        encoded = split.encode(loaded)
        longest = max(len(prompt.context) for task in encoded for prompt in task.prompts)
        size = resolve_plan_length(Size(args.size), calibrated.profile.metadata.length, longest)
        plans = find_policy_candidates(loaded, calibrated, size).plans
        known = sorted(plans.keys() & screened.keys(), key=lambda method: fmean(screened[method]))[: args.methods]
        prepared = prepare_plans(loaded, {method: plans[method] for method in known}, split)
        if not have_right_replies(encoded):
            raise UsageError("questions without right replies")
        answered = prepared.of(known, force_beside_replies(encoded)).run()
        by_kind = (
            Scores.of(answered.samples, answered.contexts),
            score_losses([negate_losses(answered.samples)], answered.contexts),
        )
        for values, of_kind in zip((scores, losses), by_kind, strict=True):
            labels = [prepared.names[method] for method in known]
            values.append(np.stack([of_kind.sums[label] / of_kind.questions for label in labels], 1))
    return known, np.concatenate(scores), np.concatenate(losses)


def main() -> None:
    """Print what every method scores and loses, then the regrets of both rules by the number of contexts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a finished run")
    parser.add_argument("--size", type=int, required=True, help="the size, in entries per kv head")
    parser.add_argument("--methods", type=int, default=16, help="how many methods are compared")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    names, scores, losses = ask_methods(parser.parse_args())
    for number in np.argsort(-scores.mean(0)):
        print(f"{names[number]:<28}{100 * scores[:, number].mean():6.1f}{-losses[:, number].mean():8.3f}")
    rng = np.random.default_rng(0)
    for count in CONTEXTS:
        if count > len(scores) - max(CONTEXTS) // 2:
            continue
        regrets = []
        for _ in range(DRAWS):
            order = rng.permutation(len(scores))
            chosen_by, judged_by = order[:count], order[count:]
            judged = scores[judged_by].mean(0)
            chosen = [judged[values[chosen_by].mean(0).argmax()] for values in (scores, losses)]
            regrets.append(judged.max() - chosen)
        by_scores, by_losses = 100 * np.mean(regrets, 0)
        print(f"{count} contexts: regret {by_scores:.2f} by scores, {by_losses:.2f} by losses")


if __name__ == "__main__":
    main()
