"""Every verb of the command line, in the order of the help: its help, its options, and what it prints of its result.

Nothing that computes and no options are imported here: the help of `kvsearch` alone reads this file.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvsearch.cli.command import MAIN_VERBS, list_kind_parts, print_forecast, verb
from kvsearch.cli.plan import run_export
from kvsearch.core.errors import EnvironmentFault, IncompatibleError, UsageError
from kvsearch.core.printed import pluralize

if TYPE_CHECKING:
    from kvsearch.cli.console import Console
    from kvsearch.commands.bench import BenchOptions
    from kvsearch.commands.calibrate import CalibrateOptions
    from kvsearch.commands.evaluate import EvaluateOptions, HeadroomOptions
    from kvsearch.commands.evolve import EvolveOptions
    from kvsearch.commands.export import ExportOptions
    from kvsearch.commands.generate import CompressOptions, GenerateOptions
    from kvsearch.commands.listings import DoctorOptions, ListingOptions
    from kvsearch.commands.lm_eval import LmEvalOptions
    from kvsearch.commands.report import ReportOptions, ShowOptions, VerifyOptions
    from kvsearch.commands.reproduce import ReproduceOptions
    from kvsearch.commands.run import RunOptions
    from kvsearch.commands.select import SelectOptions
    from kvsearch.commands.validate import ValidateOptions

__all__ = ["MAIN_VERBS"]


@verb("kvsearch.commands.run:RunOptions", forecast="dry_run")
def run(options: RunOptions, console: Console) -> None:
    """Find the best plan of a size: fit rankings, measure budgets, pick on held-out questions, score on others.

    A plan is written if it beats the single-policy baselines of equal size, or is likely better; else the best
    baseline is. The same command goes on where it stopped; --dry-run says what every stage costs.

    Example: kvsearch run bundled --budget 51 -o runs/best
    """
    from kvsearch.commands import run as command

    result = command.run(options, reporter=console)
    lines = command.remarks(options, result)
    console.print_result(result.as_json, lambda: list_kind_parts("selection", result) if console.verbose else (), lines)


@verb("kvsearch.commands.calibrate:CalibrateOptions", forecast="dry_run")
def calibrate(options: CalibrateOptions, console: Console) -> None:
    """Measure which cache entries a model can live without, and write a profile.

    lukv: from what entries are worth to later answers. lava, cake, adakv: what these rules decide prompt by
    prompt, averaged to static budgets. polykv: what every layer loses under each of several patterns. probe: a ranking
    of entries, fitted to what they are worth, which other methods and `evaluate` then take as the policy probe=DIR.
    query_bank: likewise, by stored queries of questions, as query_bank=DIR. The same command goes on where it stopped;
    --dry-run says what it costs.

    Example: kvsearch calibrate bundled --method lukv --policy snapkv -o runs/snapkv
    """
    from kvsearch.commands import calibrate as command
    from kvsearch.plan.saved import PROFILE

    profile = command.calibrate(options, reporter=console)
    content = {"profile": str(options.output / PROFILE), **profile.metadata.model_dump(mode="json")}
    console.print_result(lambda: content, remarks=command.remarks(options, profile))


@verb("kvsearch.commands.validate:ValidateOptions", forecast="dry_run")
def validate(options: ValidateOptions, console: Console) -> None:
    """Score the strategy of every signal against its inverse, a uniform strategy and random ones of the same size.

    A signal is useful if its strategy is better than its inverse, and than the uniform strategy or random ones by more
    than strategies differ by chance; unproven if it is better, but random ones may be, too; harmful if it is worse than
    the uniform one; else useless. What was found is kept in DIR/validation, with finished replies, so the same command
    goes on where it stopped.

    Example: kvsearch validate runs/polykv --samples 40
    """
    from kvsearch.commands import validate as command

    result = command.validate(options, reporter=console)
    lines = command.remarks(options, result)
    console.print_result(result.as_json, lambda: list_kind_parts("validation", result), lines)


@verb("kvsearch.commands.select:SelectOptions", forecast="dry_run")
def select(options: SelectOptions, console: Console) -> None:
    """Choose the best strategy of a PolyKV calibration, unless a single-policy baseline is as good: then choose that.

    Candidates and baselines answer questions of split select in rounds; those that are behind beyond chance leave. A
    strategy is written if it beats the best baseline, or is likely better. It is scored on split report, beside the
    best candidates, with what it gains by its policies and what by its budgets.

    Example: kvsearch select runs/polykv --budget 64 -o plan.json
    """
    from kvsearch.commands import select as command

    result = command.select(options, reporter=console)
    lines = command.remarks(options, result)
    console.print_result(result.as_json, lambda: list_kind_parts("selection", result), lines)


@verb("kvsearch.commands.evolve:EvolveOptions", forecast="dry_run")
def evolve(options: EvolveOptions, console: Console) -> None:
    """Search the budgets that serve a task best, at an exact total; a start plan is kept unless one found beats it.

    Searched on split train, chosen on split select, reported on split report, on contexts that no --start was fitted
    or chosen on. Writes plan.json, report.json and a ledger to the directory; the same command goes on with an
    interrupted search.

    Example: kvsearch evolve bundled --budget 64 --set window=8 --group-size 2 -o runs/evolve
    """
    from kvsearch.commands import evolve as command
    from kvsearch.report.search import make_tables

    result = command.evolve(options, reporter=console)
    console.print_result(result.as_json, lambda: make_tables(result), command.remarks(options, result))


@verb("kvsearch.commands.export:ExportOptions", dry_run=True)
def export(options: ExportOptions, console: Console) -> None:
    """Write a plan that evicts a share of any prompt (--ratio) or keeps so many entries (--budget).

    Of a PolyKV profile: every layer takes the pattern that its signals prefer, and the share of the budget that its
    sensitivity asks for.

    Examples: kvsearch export runs/snapkv --ratio 0.8 -o plan.json

    kvsearch export runs/polykv --budget 512 --budget-signal entropy -o plan.json

    kvsearch export plan.json --to folder -o deploy
    """
    run_export(options, console)


@verb("kvsearch.commands.evaluate:EvaluateOptions", forecast="dry_run")
def evaluate(options: EvaluateOptions, console: Console) -> None:
    """Score methods or plans on the same questions as the full cache, all at the same size.

    With --output, a run that is interrupted goes on where it stopped when the same command is given again. --tasks
    ppl:FILE asks nothing: contexts of --length tokens are compressed, and what follows them is predicted. Where the
    full cache itself scores next to nothing, the exit code is 4: nothing is shown by such questions.

    Example: kvsearch evaluate bundled --methods uniform,pyramid,adakv,lava --budgets 64,128 -o runs/table
    """
    from kvsearch.commands import evaluate as command

    result = command.evaluate(options, reporter=console)
    remarks = [] if options.output is None else [f"kept in {options.output}"]
    problem = None if result.doubt is None else IncompatibleError(result.doubt)
    console.print_result(result.as_json, lambda: list_kind_parts("evaluation", result), remarks, problem)


@verb("kvsearch.commands.reproduce:ReproduceOptions", dry_run=True)
def reproduce(options: ReproduceOptions, console: Console) -> None:
    """Make a table of a paper again, on any model: calibrate, search and ask as the paper did.

    The same command goes on where it stopped. For the bundled models there is a short form of every table, in their
    language. Beside the values are the paper's numbers where the model is the paper's.

    Examples: kvsearch reproduce --list

    kvsearch reproduce lava-table10 --list

    kvsearch reproduce lava-table10 bundled -o runs/reproduce
    """
    from kvsearch.commands import reproduce as command
    from kvsearch.commands.groups import format_command
    from kvsearch.report.paper_table import list_tables

    if options.listed:
        table = list_tables(options.table)
        rows = [dict(zip(table.header, (cell.text for cell in row), strict=True)) for row in table.rows]
        console.print_result(lambda: {"tables": rows, "notes": table.notes}, lambda: [table])
    elif console.dry_run:
        print_forecast(command.dry_run, options, console)
    else:
        reproduced = command.reproduce(options, reporter=console)
        remarks = [f"wrote {', '.join(map(str, reproduced.files))}", format_command("show", reproduced.files[0])]
        console.print_result(reproduced.as_json, reproduced.tables, remarks)


@verb("kvsearch.commands.generate:GenerateOptions", forecast="dry_run")
def generate(options: GenerateOptions, console: Console) -> None:
    """Read a context into the cache the plan allows, then answer a prompt from it (greedy).

    With --cache the context is one that `kvsearch compress` has read before. Several prompts are asked one by one, and
    none sees another. Without --context and --prompt a bundled model answers a question about a text of its own.
    """
    from kvsearch.commands import generate as command
    from kvsearch.tasks.given import find_expected_reply

    replies = command.generate(options, reporter=console)
    if console.as_json:
        answers = [asdict(reply) for reply in replies]
        console.print_json(answers if len(options.prompt) > 1 else answers[0])
        return
    _, _, prompts, _ = options.inputs
    for prompt, reply in zip(prompts, replies, strict=True):
        console.say(f"context: {reply.context_tokens} tokens; prompt: {prompt.strip() or '(none)'}")
        console.print_reply(reply.text)
    if options.context is None and not options.prompt:
        console.say(f"expected to begin with: {find_expected_reply(options.seed)}")
    last = replies[-1]
    peak = max(reply.most for reply in replies)
    mass = (
        ""
        if not last.evicted_mass
        else f"; {100 * last.evicted_mass:.1f}% of the attention at its end was on evicted entries"
    )
    console.say(
        f"cache: {last.entries} of {last.full_entries} entries ({last.bytes / 2**20:.2f} MiB, "
        f"full {last.full_bytes / 2**20:.2f} MiB) after the context, at most {peak} while answering{mass}"
    )


@verb("kvsearch.commands.generate:CompressOptions", forecast="estimate_compression")
def compress(options: CompressOptions, console: Console) -> None:
    """Compress a context once under a plan, and save it to a file that can be queried any time.

    `kvsearch generate MODEL --cache FILE --prompt ...` answers from the file with the tokens that follow without the
    detour, on the same kind of device; another one rounds otherwise. Without --context a bundled model reads a text
    of its own.
    """
    from kvsearch.commands import generate as command

    held = command.compress(options, reporter=console)
    saved = command.summarize_saved(options, held)
    console.print_result(lambda: saved, remarks=command.describe_written(options, saved))


@verb("kvsearch.commands.bench:BenchOptions", forecast="dry_run")
def bench(options: BenchOptions, console: Console) -> None:
    """Measure time and memory of plans beside the full cache, on this machine.

    The full cache is measured as transformers' DynamicCache, as its StaticCache (where all layers have full attention)
    and on kvsearch's own storage: what the last one gains is not a gain of evicting. All of them are in memory at once.
    """
    from kvsearch.commands import bench as command

    costs = command.bench(options, reporter=console)
    console.print_result(costs.as_json, costs.parts)


@verb("kvsearch.commands.report:ShowOptions")
def show(options: ShowOptions, console: Console) -> None:
    """Show a plan or a profile: tables and a heat map of layers and heads.

    For a profile: local eviction ratios and whether they are stable across questions and texts; of LU-KV, how far the
    policy's ranking is from the oracle's, and the eviction loss of uniform budgets and of LU-KV's; of a dynamic method,
    how many entries a static table moves. Of PolyKV: what every pattern does to every layer, without --ratio.
    """
    from kvsearch.commands import report as command

    view = command.show(options, reporter=console)
    console.print_result(view.as_json, view.parts)


@verb("kvsearch.commands.report:VerifyOptions")
def verify(options: VerifyOptions, console: Console) -> None:
    """Check that what runs have written is complete: checksums, ledgers, schemas, totals of plans, weights.

    One line says how many artefacts are whole, unfinished or damaged; what is not whole is named with what to do. -v
    lists all. Exit code 2 if anything is damaged. No model is loaded, and nothing is written.

    Example: kvsearch verify runs/best plan.json
    """
    from kvsearch.commands import report as command

    verification = command.verify(options, reporter=console)
    problem = None
    if damaged := verification.damaged:
        artefacts = pluralize(len(verification.artefacts), "artefact")
        count = f"{len(damaged)} of {artefacts} {'is' if len(damaged) == 1 else 'are'} damaged"
        first = damaged[0]
        problem = UsageError(f"{count}, the first is {first.path}: {first.problem}; {first.remedy}")
    console.print_result(
        verification.as_json, lambda: verification.parts(all_artefacts=bool(console.verbose)), problem=problem
    )


@verb("kvsearch.commands.report:ReportOptions")
def report(options: ReportOptions, console: Console) -> None:
    """Write one self-contained HTML page about runs: figures, tables, and how they were made.

    Each run says in one sentence what was found. Every figure and table has its numbers as CSV; tables sort by a click
    on a heading. Several runs are grouped by their models. A search that still runs shows how far it is.

    Example: kvsearch report runs/best runs/table -o report.html
    """
    from kvsearch.commands import report as command

    written = command.write_report(options, reporter=console)
    counts = f"{pluralize(written['figures'], 'figure')}, {pluralize(written['tables'], 'table')}"
    lines = [f"wrote {options.output}: {counts}, {written['bytes'] / 1000:.0f} kB"]
    if written["files"]:
        lines.append(f"wrote {pluralize(len(written['files']), 'file')} to {options.figures}")
    console.print_result(lambda: written, remarks=lines)


@verb("kvsearch.commands.evaluate:HeadroomOptions", forecast="estimate_headroom")
def headroom(options: HeadroomOptions, console: Console) -> None:
    """Evict by true importance, by simple policies and at random, and compare with the full cache.

    The scores say how much there is to win at this size, and whether these tasks tell methods apart. With --output, the
    same command goes on where it stopped.

    Example: kvsearch headroom bundled --length 1024
    """
    from kvsearch.commands import evaluate as command

    result = command.headroom(options, reporter=console)
    console.print_result(result.as_json, lambda: list_kind_parts("headroom", result))


@verb("kvsearch.commands.lm_eval:LmEvalOptions", forecast="dry_run")
def lm_eval(options: LmEvalOptions, console: Console) -> None:
    """Run tasks of lm-evaluation-harness on the cache that a plan leaves (needs the extra `lm-eval`).

    Example: kvsearch lm-eval bundled --plan plan.json --tasks arc_easy --limit 100
    """
    from kvsearch.commands import lm_eval as command
    from kvsearch.report.scores import list_harness_lines

    results = command.run_lm_eval(options, reporter=console)
    console.print_result(lambda: results, lambda: list_harness_lines(results))


@verb("kvsearch.commands.listings:ListingOptions", needs_arguments=False)
def policies(options: ListingOptions, console: Console) -> None:
    """List the eviction policies, also of other installed packages, or show one in full.

    With --json and NAME, an object with these keys:

    name, package, source, title, formula, implementation (module:Class)
    parameters: an object of names and defaults
    phases: those in which it evicts
    stages: how many scores choose what stays of the prompt
    needs: a list of what it reads besides keys and values
    sinks and window: how many entries it always keeps
    decode: its rule while decoding, in words

    What depends on parameters without a default is null. With --json and no
    NAME: an object with policies, a list of such objects, and problems, a
    list of objects with name, package and error, of those that cannot be used.

    Example: kvsearch policies snapkv
    """
    from kvsearch.commands import listings as command

    content, parts = command.policies(options, reporter=console)
    console.print_result(lambda: content, lambda: parts)


@verb("kvsearch.commands.listings:ListingOptions", needs_arguments=False)
def tasks(options: ListingOptions, console: Console) -> None:
    """List the tasks that evaluate can ask, or show one in full.

    With --json, an object with tasks, a list of objects with these keys, and sets (names that stand for several tasks):

    spec: what --tasks takes
    category: the group that tables average it in
    metric
    source: where its texts come from
    needs: the file that you must bring, if any
    packages: Python packages that its metric needs
    options: the options of evaluate that it reads
    split and splits: the default one, and all there are

    Example: kvsearch tasks ruler:vt
    """
    from kvsearch.commands import listings as command

    content, parts = command.tasks(options, reporter=console)
    console.print_result(lambda: content, lambda: parts)


@verb("kvsearch.commands.listings:ListingOptions", needs_arguments=False)
def recipes(options: ListingOptions, console: Console) -> None:
    """List the recipes that are shipped, which --recipe takes by name, or print one.

    Examples: kvsearch recipes run

    kvsearch recipes evolve/paper-8b
    """
    from kvsearch.commands import listings as command

    content, parts = command.recipes(options, reporter=console)
    console.print_result(lambda: content, lambda: parts)


@verb("kvsearch.commands.listings:DoctorOptions", needs_arguments=False)
def doctor(options: DoctorOptions, console: Console) -> None:
    """Check versions, devices and the bundled models, and run one tiny generation on the runtime's cache."""
    from kvsearch.commands import listings as command

    facts = command.doctor(options, reporter=console)
    missing = [name for name, value in facts.items() if value == command.NOT_INSTALLED]
    problem = None
    if missing:
        problem = EnvironmentFault(f"{', '.join(missing)} missing: run `pip install -e .` again where kvsearch is")
    console.print_result(lambda: facts, lambda: [facts], problem=problem)
