"""Makes the draft of a prepared model anew by GPTQ: record, quantise, put in place.

Or takes the codes of a GPTQ checkpoint of the same model as they are.

One resumable job per model. The prompts are read through the model itself, which records
what reaches each expert; then a process of its own chooses the codes expert by expert.
The model stays usable with the draft that it has until the new one is whole. Recorded
batches and finished layers are files. Runs in the engine process, in the thread that
asked, with no other engine loaded.

Source: Specter, draft quantisation (GPTQ, symmetric INT4, experts only). Unlike there a
`nested` model gets the codes as its high plane, and experts are calibrated on the
target's own inputs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from mira_assets.calibration import calibration_prompts

from .checkpoint import gptq_store
from .checkpoint.convert import checkpoint_revision, planned_manifest
from .checkpoint.experts import CheckpointExperts
from .checkpoint.gptq_calibrated import working_bytes
from .checkpoint.gptq_checkpoint import GptqExperts
from .checkpoint.gptq_given import GivenCodes
from .checkpoint.gptq_process import GptqJob, require_gptqmodel, run_job
from .checkpoint.gptq_store import STEP
from .checkpoint.preflight import SPARE_BYTES
from .checkpoint.progress import OnProgress, Progress
from .checkpoint.store import StoreManifest, StoreWriter
from .checkpoint.writing import require_space
from .config import format_bytes
from .errors import PrepareError, StoreError
from .events import Notice
from .library import ModelHome
from .load_plan import OnNotice
from .prepare import is_checkpoint_gone, locked
from .routing_recording import RoutingRecording
from .runtime.probe import default_num_threads
from .runtime.recording import RecordingSettings
from .system_memory import system_memory
from .types import Precision

GPTQ_VERSION = 1
"""Raised when the same prompts would give other codes."""

RECORDING = RecordingSettings(max_reply_tokens=128, max_bytes=2 << 30)
"""Longer replies than predictors take: each expert wants as many inputs as a matrix has columns."""


def make_gptq_draft(
    home: ModelHome,
    precision: Precision,
    *,
    prompts: Sequence[str] | None = None,
    recording: RecordingSettings = RECORDING,
    on_progress: OnProgress,
    on_notice: OnNotice,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Gives a prepared model a draft with codes chosen by GPTQ, unless it has one.

    Without `prompts`, such a draft of these weights is kept whatever it was made from; with
    them, it is made anew unless it comes from the same prompts and settings. With `nested`
    the high plane is the draft, so the target changes too; `int4` is all draft.

    Args:
        home: A model that is ready in `precision`, its checkpoint still here.
        precision: Format of the target.
        prompts: What to calibrate on, `None` for the prompts that ship with the program.
        recording: Bounds of the calibration.
        on_progress: Called with step, done, total, unit, detail.
        on_notice: Told the memory that it takes before, and what was rounded to nearest after.
        is_cancelled: Asked between passes, and five times a second while codes are chosen.

    Raises:
        StoreError: The model is not prepared in that precision.
        PrepareError: GPTQModel is not installed, the checkpoint is gone, there is too little
            memory, another process works on this model, or a file cannot be written.
        DiskSpaceError: There is no room.
        BudgetError: The machine has no memory for the recording now.
        GenerationError: The model has no tokenizer.
        CancelledError: Somebody asked to stop; what is finished is kept.
    """
    require_gptqmodel()
    checkpoint = _open_checkpoint(home, precision)
    held = home.draft_precision(precision)
    revision = checkpoint_revision(checkpoint)
    planned = planned_manifest(checkpoint, held, source=home.title, revision=revision)
    texts = [p.text for p in calibration_prompts()] if prompts is None else list(prompts)
    manifest = gptq_store.chosen_manifest(planned, _fingerprint(revision, texts, recording))
    progress = Progress(on_progress=on_progress, is_cancelled=is_cancelled)
    with locked(home):
        recorded = RoutingRecording(home, precision, home.draft_dir, progress, step=STEP)
        found = gptq_store.finished_manifest(home, held, planned)
        if found is not None and (prompts is None or found.calibration == manifest.calibration):
            recorded.clear()  # A kill may have left it.
            return
        _announce(checkpoint, held, recording, on_notice)
        folder = gptq_store.unfinished_dir(home, held)
        writer = StoreWriter(folder, manifest)
        if not writer.is_finished:
            require_space(home.root, writer.missing_bytes + SPARE_BYTES, "The GPTQ draft")
            recorded.open(manifest.calibration)
            if not recorded.is_finished:
                recorded.record(texts, recording, on_notice)
            run_job(_job(home, held, manifest), progress)
        gptq_store.put_in_place(home, held)
        recorded.clear()
    _tell_fallbacks(home, held, manifest, on_notice)


def take_gptq_draft(
    home: ModelHome,
    precision: Precision,
    folder: Path,
    *,
    on_progress: OnProgress,
    on_notice: OnNotice,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Gives a prepared model a draft with the codes of a GPTQ checkpoint, unless it has that one.

    Args:
        home: A model that is ready in `precision`, its own checkpoint still here.
        precision: Format of the target.
        folder: The same model's GPTQ checkpoint, INT4 and symmetric.
        on_progress: Called with step, done, total, unit, detail.
        on_notice: Told where the target changes too.
        is_cancelled: Asked between experts.

    Raises:
        StoreError: The model is not prepared in that precision.
        ModelError: The folder holds no GPTQ form of this model, or is damaged.
        PrepareError: The model's checkpoint is gone, another process works on it, or a file
            cannot be written.
        DiskSpaceError: There is no room.
        CancelledError: Somebody asked to stop; finished layers are kept.
    """
    checkpoint = _open_checkpoint(home, precision)
    given, held = GptqExperts(folder), home.draft_precision(precision)
    chooser = GivenCodes(checkpoint, given)
    planned = planned_manifest(
        checkpoint, held, source=home.title, revision=checkpoint_revision(checkpoint)
    )
    calibration = f"checkpoint {given.shards.fingerprint()}"
    manifest = gptq_store.chosen_manifest(planned, calibration)
    progress = Progress(on_progress=on_progress, is_cancelled=is_cancelled)
    with locked(home):
        found = gptq_store.finished_manifest(home, held, planned)
        if found is not None and found.calibration == calibration:
            return
        _tell_target(held, on_notice)
        writer = StoreWriter(gptq_store.unfinished_dir(home, held), manifest)
        if not writer.is_finished:
            require_space(home.root, writer.missing_bytes + SPARE_BYTES, "The GPTQ draft")
            gptq_store.write_store(checkpoint, writer, held, chooser, progress)
        gptq_store.put_in_place(home, held)
        gptq_store.drop_store(home.draft_dir)


def _open_checkpoint(home: ModelHome, precision: Precision) -> CheckpointExperts:
    if not home.is_ready(precision):
        raise StoreError(
            f"{home.title} is not prepared in {precision}.",
            hint=f"Run: mira-chat prepare {home.name} --precision {precision}",
        )
    if is_checkpoint_gone(home):
        raise PrepareError(
            f"A GPTQ draft is made from the checkpoint of {home.title}, which is gone.",
            hint=f"Run: mira-chat rm {home.name}, then prepare it with --draft gptq.",
        )
    return CheckpointExperts(home.checkpoint_dir)


def _fingerprint(revision: str, texts: Sequence[str], recording: RecordingSettings) -> str:
    made_from = [GPTQ_VERSION, revision, list(texts), asdict(recording)]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def _announce(
    checkpoint: CheckpointExperts,
    held: Precision,
    recording: RecordingSettings,
    on_notice: OnNotice,
) -> None:
    """Says what memory the work takes and what else it changes, before it begins.

    Raises:
        PrepareError: There is less.
    """
    layer_bytes = recording.max_bytes // len(checkpoint.modules)
    needed = working_bytes(checkpoint.shape, max_input_bytes=layer_bytes)
    available = system_memory().available_bytes
    if needed > available:
        raise PrepareError(
            f"GPTQ needs {format_bytes(needed)} of memory, {format_bytes(available)} is free.",
            hint="Close other programs and run it again.",
        )
    text = (
        f"GPTQ takes one matrix at a time and holds at most {format_bytes(needed)} for it "
        "and its layer's inputs."
    )
    on_notice(Notice(code="gptq-memory", text=text))
    _tell_target(held, on_notice)


def _tell_target(held: Precision, on_notice: OnNotice) -> None:
    if held is Precision.NESTED:
        text = (
            "With nested, the codes of GPTQ are half of the target as well, which "
            "strays further from the full model then; targets in int8 and bf16 stay as they are."
        )
        on_notice(Notice(code="gptq-target", text=text))


def _job(home: ModelHome, held: Precision, manifest: StoreManifest) -> GptqJob:
    return GptqJob(
        checkpoint_dir=str(home.checkpoint_dir),
        traces_dir=str(home.draft_dir),
        store_dir=str(gptq_store.unfinished_dir(home, held)),
        precision=held,
        source=manifest.source,
        revision=manifest.revision,
        calibration=manifest.calibration,
        num_threads=default_num_threads(),
    )


def _tell_fallbacks(
    home: ModelHome, held: Precision, manifest: StoreManifest, on_notice: OnNotice
) -> None:
    fallbacks = gptq_store.read_fallbacks(home.gptq_store_dir(held))
    num_fallbacks = sum(map(len, fallbacks.values()))
    if num_fallbacks:
        total = manifest.num_layers * manifest.num_experts
        text = (
            f"GPTQ chose the codes of {total - num_fallbacks} of {total} experts; "
            f"{num_fallbacks} that calibration did not reach are rounded to nearest."
        )
        on_notice(Notice(code="gptq-fallbacks", text=text))
