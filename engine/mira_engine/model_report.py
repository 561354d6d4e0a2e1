"""Says what a model is and how much room it takes, before any of its weights is fetched.

Runs in the engine process, in the thread that asked: transformers is asked for sizes, and
the hub for configuration, index and lengths. Of a hub model's files only the small ones
are downloaded, into the hub client's own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .checkpoint import builtin, fetch, hub_home
from .checkpoint.architecture import load_config
from .checkpoint.backbone import small_files
from .checkpoint.hub import USUAL_PATIENCE, Patience
from .checkpoint.hub_download import cached_bytes
from .checkpoint.hub_home import HubCheckpoint
from .checkpoint.preflight import KeyKind, Preflight, examine, figures_of
from .checkpoint.progress import Progress
from .checkpoint.shards import INDEX_FILE
from .errors import FormatError, ModelError
from .events import DescribeModel, ModelDescribed, PreparedSize
from .library import ModelHome
from .model.chat import check_chat_files
from .model.facts import experts_per_token
from .types import Precision


def describe(
    home: ModelHome,
    request: DescribeModel,
    *,
    is_cancelled: Callable[[], bool] = lambda: False,
    patience: Patience = USUAL_PATIENCE,
) -> ModelDescribed:
    """Describes a model; one that cannot be run is described with the reason.

    Raises:
        UnknownModelError: There is no such repository or revision.
        HubError: The hub refuses, is out of order or cannot be reached.
        CancelledError: Somebody asked to stop.
    """
    progress = Progress(is_cancelled=is_cancelled)
    found = _find(home, progress, patience)
    made = ModelDescribed(
        request_id=request.request_id,
        model=request.model,
        title=home.title,
        revision=found.revision.commit if found and found.revision else "",
        license=found.license if found else "",
        notes=(home.note,) if home.note else (),
    )
    try:
        figures = _figures(home, found, progress, patience)
    except ModelError as error:
        return replace(made, refusal=error.message, hint=error.hint)
    problem = figures.problem or _chat_problem(home, found)
    made = replace(made, **_facts(figures), **_lengths(home, found, figures))
    made = replace(
        made,
        sizes=tuple(_sizes(home, found, figures)),
        notes=(*made.notes, *_notes(figures)),
        refusal=problem.message if problem else "",
        hint=problem.hint if problem else "",
    )
    if found is not None and problem is None:
        hub_home.note(home, found)
    return made


def locate(
    home: ModelHome,
    *,
    is_cancelled: Callable[[], bool] = lambda: False,
    patience: Patience = USUAL_PATIENCE,
) -> ModelHome:
    """Returns a home whose configuration is on the disk; a hub model's is fetched.

    Raises:
        UnknownModelError: There is no such repository or revision.
        HubError: The hub refuses, is out of order or cannot be reached.
        CancelledError: Somebody asked to stop.
    """
    folders = (home.checkpoint_dir, home.backbone_dir)
    if not home.is_hub or any((folder / "config.json").is_file() for folder in folders):
        return home
    found = hub_home.find(home, Progress(is_cancelled=is_cancelled), patience)
    return replace(home, checkpoint_dir=found.folder)


def _find(home: ModelHome, progress: Progress, patience: Patience) -> HubCheckpoint | None:
    """Asks the hub, unless the model is ready and only its checkpoint is gone."""
    if not home.is_hub:
        return None
    if home.ready_precisions and not home.checkpoint_dir.is_dir():
        return None
    return hub_home.find(home, progress, patience)


def _figures(
    home: ModelHome, found: HubCheckpoint | None, progress: Progress, patience: Patience
) -> Preflight:
    if found is not None:
        return hub_home.figures(found, progress, patience)
    if home.is_builtin:
        return figures_of(builtin.builtin_config(), weights_bytes=builtin.CHECKPOINT_BYTES)
    if not (home.checkpoint_dir / "config.json").is_file():
        return examine(home.backbone_dir)
    return hub_home.folder_figures(home.checkpoint_dir)


def _chat_problem(home: ModelHome, found: HubCheckpoint | None) -> ModelError | None:
    folder = found.folder if found is not None else home.checkpoint_dir
    if home.is_builtin or not (folder / "config.json").is_file():
        return None
    try:
        load_config(folder)
        check_chat_files(folder)
    except ModelError as error:
        return error
    return None


def _facts(figures: Preflight) -> dict[str, object]:
    top_k = experts_per_token(figures.config)
    num_routed = len(figures.modules) * figures.num_experts
    idle = figures.num_expert_parameters * (figures.num_experts - top_k) // figures.num_experts
    return {
        "family": figures.config.model_type,
        "num_parameters": figures.num_parameters,
        "num_active_parameters": figures.num_parameters - (idle if num_routed else 0),
        "num_layers": len(figures.modules),
        "num_experts": figures.num_experts,
        "top_k": top_k,
        "expert_shape": figures.shape,
    }


def _lengths(home: ModelHome, found: HubCheckpoint | None, figures: Preflight) -> dict[str, object]:
    """How much has to be downloaded, and how much of it is here."""
    if home.is_builtin:
        has_checkpoint = builtin.is_checkpoint_complete(home.checkpoint_dir)
        whole = fetch.WHEEL_BYTES
        return {"download_bytes": whole, "cached_bytes": whole if has_checkpoint else 0}
    if found is None or found.revision is None:
        return {"download_bytes": 0, "cached_bytes": 0}
    revision = found.revision
    files = (*revision.small_files, *revision.weight_files(found.folder / INDEX_FILE))
    return {
        "download_bytes": sum(file.num_bytes for file in files),
        "cached_bytes": cached_bytes(revision, files),
    }


def _sizes(
    home: ModelHome, found: HubCheckpoint | None, figures: Preflight
) -> Iterator[PreparedSize]:
    folder = found.folder if found is not None else home.checkpoint_dir
    small_bytes = sum(path.stat().st_size for path in small_files(folder))
    for precision in Precision:
        stores = home.needed_precisions(precision)
        try:
            made_bytes = sum(figures.store_bytes(store) for store in stores)
            deleting_bytes = figures.peak_deleting_bytes(stores) if found is not None else None
            yield PreparedSize(
                precision=precision,
                prepared_bytes=figures.backbone_bytes + small_bytes + made_bytes,
                draft_bytes=figures.draft_bytes(precision),
                peak_bytes=figures.peak_bytes(stores) + 2 * small_bytes,
                peak_deleting_bytes=(
                    None if deleting_bytes is None else deleting_bytes + 2 * small_bytes
                ),
            )
        except FormatError:
            continue  # No room is needed for what cannot be made.


def _notes(figures: Preflight) -> Iterator[str]:
    skipped = figures.kinds.get(KeyKind.SKIPPED, 0)
    unknown = figures.kinds.get(KeyKind.UNKNOWN, 0)
    if skipped:
        yield f"{skipped} tensors for images, sound or several tokens ahead are left out."
    if unknown:
        yield f"{unknown} tensors have no place in the model and are left out."
