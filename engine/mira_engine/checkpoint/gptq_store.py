"""The store whose draft's codes somebody has chosen better than to nearest: made, put in place.

It is written beside the store in use, under another name and layer by layer, and gets its
own name when it is whole; `ModelHome.store_dir` gives that one from then on, and the one
rounded to nearest goes. Who chooses the codes is a parameter. Memory holds one expert.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from ..errors import PrepareError, StoreError
from ..library import ModelHome
from ..types import Plane, Precision, Rounding
from .experts import CheckpointExperts
from .files import MANIFEST_FILE
from .formats import ExpertFormat, ExpertTensors, NestedFormat, make_format
from .progress import Progress
from .quantised_expert import QuantisedExpert
from .store import StoreManifest, StoreWriter, file_name
from .writing import disk_errors, partial_path, sync_folder, write_json

STEP = "draft"
"""Name of the job's step in progress reports."""

FALLBACKS_FILE = "fallbacks.json"
"""In the store's folder: by layer, the experts that were rounded to nearest all the same."""


class ExpertChooser(Protocol):
    """Chooses the INT4 codes of experts, layer after layer."""

    def choose(self, layer: int, expert: int, tensors: ExpertTensors) -> QuantisedExpert | None:
        """Returns the codes of one expert, `None` where there is nothing to choose them by."""
        ...


def chosen_manifest(planned: StoreManifest, calibration: str) -> StoreManifest:
    """Describes the store that takes the place of a planned one.

    Args:
        planned: The store rounded to nearest.
        calibration: Fingerprint of what codes are chosen by.
    """
    return replace(planned, rounding=Rounding.GPTQ, calibration=calibration)


def unfinished_dir(home: ModelHome, precision: Precision) -> Path:
    """Returns where the store is until it is whole."""
    return partial_path(home.gptq_store_dir(precision))


def finished_manifest(
    home: ModelHome, precision: Precision, planned: StoreManifest
) -> StoreManifest | None:
    """Returns the manifest of the finished store, `None` without one of these weights.

    Args:
        home: The model.
        precision: Of the store.
        planned: The store rounded to nearest that belongs to the checkpoint.
    """
    try:
        found = StoreManifest.from_file(home.gptq_store_dir(precision) / MANIFEST_FILE)
    except StoreError:
        return None
    if not _has_all_files(home.gptq_store_dir(precision), found):
        return None
    as_nearest = replace(found, rounding=Rounding.NEAREST, calibration="")
    return found if as_nearest.is_same_store(planned) else None


def _has_all_files(folder: Path, manifest: StoreManifest) -> bool:
    """Whether every layer's files are there and have their length."""
    for plane, expected in manifest.file_bytes.items():
        for layer in range(manifest.num_layers):
            path = folder / file_name(layer, plane)
            if not path.exists() or path.stat().st_size != expected:
                return False
    return True


def write_store(
    checkpoint: CheckpointExperts,
    writer: StoreWriter,
    precision: Precision,
    chooser: ExpertChooser,
    progress: Progress,
) -> None:
    """Writes the layers that are missing, then the manifest.

    Args:
        checkpoint: Where the experts come from.
        writer: Where they go.
        precision: `int4`, or `nested`, whose high plane takes the codes.
        chooser: Chooses the codes.
        progress: Reports `experts`.

    Raises:
        CheckpointError: A shard cannot be read.
        FormatError: An expert cannot be held in the format.
        DiskSpaceError: The disk is full; finished layers are kept.
        CancelledError: Somebody asked to stop; finished layers are kept.
    """
    fmt = make_format(precision, checkpoint.shape)
    for layer in range(len(checkpoint.modules)):
        if not writer.is_layer_done(layer):
            records = _records(checkpoint, fmt, layer, chooser, writer.folder, progress)
            writer.write_layer(layer, records)
    writer.finish()


def _records(
    checkpoint: CheckpointExperts,
    fmt: ExpertFormat,
    layer: int,
    chooser: ExpertChooser,
    folder: Path,
    progress: Progress,
) -> Iterator[Mapping[Plane, torch.Tensor]]:
    num_layers, num_experts = len(checkpoint.modules), checkpoint.num_experts
    detail, fallbacks = f"GPTQ, layer {layer + 1} of {num_layers}", []
    for expert in range(num_experts):
        done = layer * num_experts + expert
        progress.report(STEP, done, num_layers * num_experts, "experts", detail)
        tensors = checkpoint.load(layer, expert)
        chosen = chooser.choose(layer, expert, tensors)
        if chosen is None:
            fallbacks.append(expert)
            yield fmt.encode(tensors)
        elif isinstance(fmt, NestedFormat):
            yield fmt.encode_with_high(tensors, chosen)
        else:
            yield fmt.encode_quantised(chosen)
    # Before the layer counts as finished: a kill in between must not lose the note.
    write_json(folder / FALLBACKS_FILE, read_fallbacks(folder) | {str(layer): fallbacks})


def read_fallbacks(folder: Path) -> dict[str, list[int]]:
    """Returns the experts of a store that were rounded to nearest, by layer."""
    try:
        return json.loads((folder / FALLBACKS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def put_in_place(home: ModelHome, precision: Precision) -> None:
    """Gives the finished store its name, and deletes the ones that it takes the place of.

    Raises:
        PrepareError: It is not finished, or a folder cannot be renamed or deleted.
    """
    place, made = home.gptq_store_dir(precision), unfinished_dir(home, precision)
    if not (made / MANIFEST_FILE).exists():
        raise PrepareError(f"{made} is no finished store.", hint="Run it again.")
    before = place.with_name(f"{place.name}.before")
    drop_store(before)
    with disk_errors(place):
        if place.exists():
            place.rename(before)  # Not deleted first: a kill must not leave the model without.
        made.rename(place)
        sync_folder(place.parent)
    drop_store(before)
    drop_store(home.nearest_store_dir(precision))


def give_up(home: ModelHome, precision: Precision) -> None:
    """Deletes the store, finished or not, and what it is made from.

    Raises:
        PrepareError: Something cannot be deleted.
    """
    for folder in (home.gptq_store_dir(precision), unfinished_dir(home, precision), home.draft_dir):
        drop_store(folder)


def drop_store(folder: Path) -> None:
    """Deletes a store, its marker first, so that no half of one looks whole.

    Raises:
        PrepareError: It cannot be deleted.
    """
    with disk_errors(folder):
        if folder.exists():
            (folder / MANIFEST_FILE).unlink(missing_ok=True)
            shutil.rmtree(folder)
