"""kvsearch evaluate: score methods and plans on the same samples, at the same number of entries."""

from __future__ import annotations

from kvsearch.cli import evaluate_options as own
from kvsearch.cli import task_options as asked
from kvsearch.cli.common import Common, command


@command
def evaluate(
    *,
    model: own.Model,
    common: Common,
    plan: own.Plans = None,
    methods: own.Methods = None,
    budgets: own.Budgets = None,
    ratios: own.Ratios = None,
    phases: own.Phases = None,
    settings: own.Settings = None,
    baselines: own.Baselines = None,
    subject: own.Subject = None,
    tasks: asked.Tasks = "synthetic",
    length: asked.Length = None,
    split: asked.Split = None,
    details: asked.TaskDetails,
    protocol: own.ProtocolName = None,
    samples: own.Samples = 20,
    max_length: own.MaxLength = None,
    batch: own.Batch = 8,
    max_memory: own.MaxMemory = None,
    continuation: own.Continuation = None,
    stride: own.Stride = None,
    output: own.Directory = None,
    force: own.Force = False,
    reuse: own.Reuse = None,
    samples_file: own.SamplesFile = None,
    table: own.TableFile = None,
    columns: own.ColumnsName = None,
    losses: own.Losses = False,
) -> None:
    """Score methods or plans on the same questions as the full cache, all at the same size.

    With --output, a run that is interrupted goes on where it stopped when the same command is given again. --tasks
    ppl:FILE measures perplexity: contexts of --length tokens are compressed, what follows them is predicted.

    Example: kvsearch evaluate bundled --methods uniform,pyramid,adakv,lava --budgets 64,128 -o runs/table
    """
    from kvsearch.cli.evaluate_output import Deliveries, deliver, kept, output_losses
    from kvsearch.cli.evaluate_perplexity import PERPLEXITY, perplexity, refuse_unread
    from kvsearch.evaluation.compare import Settings, prepare
    from kvsearch.plan.protocol import QUESTION_AGNOSTIC, find_protocol
    from kvsearch.strategies.request import read_contest
    from kvsearch.tasks.catalog import find_tasks

    options = details.options(length, split)
    if tasks.startswith(PERPLEXITY):
        refuse_unread(
            subject=subject, protocol=protocol, max_length=max_length, max_memory=max_memory, output=output,
            force=force or None, reuse=reuse, samples_file=samples_file, table=table, columns=columns,
            losses=losses or None,
        )  # fmt: skip
        contest = read_contest(plan or (), methods, budgets, ratios, phases, settings or (), baselines)
        how = Settings(samples, seed=common.seed, batch=batch)
        perplexity(model, common, contest, tasks, options, how, continuation, stride)
        return
    own.refuse_perplexity_options(continuation, stride)
    contest = read_contest(plan or (), methods, budgets, ratios, phases, settings or (), baselines, subject)
    files = Deliveries.checked(output, reuse, force, samples_file, table, columns)
    how = Settings(
        samples,
        find_protocol(protocol or QUESTION_AGNOSTIC),
        common.seed,
        batch,
        own.memory_bytes(max_memory),
        max_length,
    )
    chosen = find_tasks(tasks, options)
    if common.dry_run:
        common.print_json({"tasks": [task.name for task in chosen], "protocol": how.protocol, **contest.as_json()})
        return
    loaded = common.load(model)
    evaluation = prepare(loaded, contest.contenders(loaded), contest.subject, chosen, how)
    with kept(evaluation, files, common) as ledger, common.progress("batches") as progress:
        result = evaluation.run(progress, ledger)
        lost = output_losses(evaluation, chosen, files, progress) if losses or files.has_losses else None
    deliver(result, lost, files, common)
