"""kvsearch export --to: a plan or profile in the files of another tool, or as a folder to share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvsearch.config.options import Option
from kvsearch.errors import IncompatibleError, UsageError
from kvsearch.jobs.groups import Loading
from kvsearch.jobs.talk import Talk
from kvsearch.plan.files import atomic_write
from kvsearch.runs.lock import locked
from kvsearch.runs.sums import finish, unfinish

if TYPE_CHECKING:
    from kvsearch.exporters.base import Exported, Inputs
    from kvsearch.plan import ModelFingerprint, Plan

PANEL = "Other tools"
PLAN = "plan"  # the target of every other kind of export: one plan file


class Targeted(Loading):
    """Who the plan is for."""

    to: Annotated[
        str, Option("plan: a plan file; or a target of --list.", metavar="TARGET", panel=PANEL, recorded=False)
    ] = PLAN
    lossy: Annotated[
        bool, Option("Write it though the target cannot express all of the plan.", panel=PANEL, recorded=False)
    ] = False
    model: Annotated[
        str | None,
        Option("The model, for targets that are told of its query heads or weights.", panel=PANEL, recorded=False),
    ] = None
    scores: Annotated[
        Path | None,
        Option(
            "--to folder: directory of `evaluate -o` or `run` with what the plan scores, for its card.",
            shown="the run that is exported",
            panel=PANEL,
            recorded=False,
        ),
    ] = None
    push_to_hub: Annotated[
        str | None,
        Option(
            "With --to folder: upload the folder to this repository of the hub, made private if it is new.",
            metavar="USER/NAME",
            panel=PANEL,
            recorded=False,
        ),
    ] = None

    def inputs(self, model: ModelFingerprint, length: int | None, talk: Talk) -> Inputs:
        """Return what the target is told besides a plan or profile of this `model`, which is loaded where it needs it.

        Raises:
            UsageError: there is no such target.
            IncompatibleError: `--model` is another one.
        """
        from kvsearch.exporters import exporter_of
        from kvsearch.exporters.base import Inputs

        if self.model is None or not exporter_of(self.to).needs_model:
            return Inputs(length)
        from kvsearch.models.architecture import describe

        loaded = self.load(self.model, talk)
        model.require(loaded.fingerprint, "what is exported")
        return Inputs(length, describe(loaded.model), loaded.model)

    def scores_of(self, plan: Plan, place: Path) -> str | None:
        """Return what is known of the scores of a plan from `place`, where the target has a word for them.

        Raises:
            UsageError: `--scores` is for another target, or of another plan.
        """
        if self.to != "folder":
            if self.scores is not None:
                raise UsageError(f"--scores is for --to folder, and target {self.to} has no card")
            return None
        from kvsearch.report.plan_scores import plan_scores
        from kvsearch.report.reader import WHOLE_RUN

        of_run = place if place.is_dir() else place.parent
        source = self.scores or (of_run if (of_run / WHOLE_RUN).exists() else None)
        return None if source is None else plan_scores(source, plan)

    def refuse_loss(self, found: Exported) -> None:
        """Raise IncompatibleError if something is lost, unless that was asked for."""
        if found.losses and not self.lossy:
            raise IncompatibleError(
                f"target {self.to} cannot express all of the plan: {'; '.join(found.describe())}; --lossy to write it "
                "all the same"
            )


def write_files(found: Exported, path: Path, force: bool) -> None:
    """Write the files of a target at `path`, or into the folder at `path`, with their checksums.

    Raises:
        UsageError: something is there already, and `force` is off, or it is a folder in place of a file or vice versa;
            another process is writing to the folder.
        EnvironmentFault: they cannot be written.
    """
    from kvsearch.exporters.base import SINGLE

    if SINGLE in found.files:
        atomic_write(path, found.files[SINGLE], overwrite=force)
        return
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file, and the target is a folder: choose another path")
    with locked(path):
        taken = [name for name in found.files if (path / name).exists()]
        if taken and not force:
            raise UsageError(f"{path / taken[0]} exists: choose another folder, or --force to replace it")
        unfinish(path, tuple(found.files))
        for name, data in found.files.items():
            atomic_write(path / name, data)
        finish(path, tuple(found.files))


def upload(path: Path, repository: str) -> str:
    """Upload a folder to the Hugging Face hub; a repository that is new is private. Returns its address.

    Raises:
        EnvironmentFault: nobody is logged in, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    from kvsearch.errors import EnvironmentFault

    hub = HfApi(library_name="kvsearch")
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=path, commit_message="Plan made by kvsearch")
    except Exception as error:  # of the hub, of its HTTP library, of the network
        reason = " ".join(str(error).split())[:300]
        raise EnvironmentFault(f"{path} is written, but cannot be uploaded to {repository}: {reason}") from error
    return f"https://huggingface.co/{repository}"
