"""A hub model's way from its name to a checkpoint folder, and what of it is written down.

`source.json` in the model's home says which commit was taken, so that a download which
was stopped goes on with the same files even when the branch has moved on meanwhile, and
a model that is complete is found without a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import HubUnreachableError, UnknownModelError
from ..library import SOURCE_FILE, ModelHome, read_source
from . import hub, hub_cache
from .hub import USUAL_PATIENCE, HubRevision, Patience
from .hub_download import MOVE_CACHE, cached_bytes, download, fetch_small_files
from .preflight import Preflight, examine
from .progress import Progress
from .shards import INDEX_FILE, SINGLE_FILE, CheckpointShards
from .writing import disk_errors, is_one_disk, require_space, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCheckpoint:
    """Where a hub model's checkpoint is or will be.

    Attributes:
        folder: The snapshot; holds at least the small files.
        revision: What the hub says of it, `None` where it was not asked.
        is_complete: Whether the weights are there, checked.
        license: As its card says, or an empty string.
    """

    folder: Path
    revision: HubRevision | None
    is_complete: bool
    license: str = ""

    @property
    def commit(self) -> str:
        """A snapshot's folder is called after its commit."""
        return self.revision.commit if self.revision is not None else self.folder.name


def find(home: ModelHome, progress: Progress, patience: Patience = USUAL_PATIENCE) -> HubCheckpoint:
    """Finds a model's checkpoint: here if it is complete, else on the hub.

    A download that was begun keeps its commit. Where the hub cannot be reached, a complete
    snapshot in the client's cache will do.

    Raises:
        UnknownModelError: There is no such repository or revision.
        HubError: The hub refuses, is out of order or cannot be reached.
        CancelledError: Somebody asked to stop.
    """
    source = read_source(home.root)
    license_name = str(source.get("license") or "")
    if source.get("is_complete") is True and hub.is_complete(home.checkpoint_dir):
        return HubCheckpoint(
            folder=home.checkpoint_dir, revision=None, is_complete=True, license=license_name
        )
    pinned = str(source["commit"]) if source.get("is_started") is True else None
    try:
        revision = _look_up(home, pinned, progress, patience)
        folder = fetch_small_files(revision, progress, patience)
    except HubUnreachableError:
        snapshot = hub.cached_snapshot(home.repo_id, pinned or home.revision)
        if snapshot is None:
            raise
        return HubCheckpoint(folder=snapshot, revision=None, is_complete=True, license=license_name)
    return HubCheckpoint(
        folder=folder, revision=revision, is_complete=False, license=revision.license
    )


def _look_up(
    home: ModelHome, pinned: str | None, progress: Progress, patience: Patience
) -> HubRevision:
    if pinned is not None:
        try:
            return hub.look_up(home.repo_id, pinned, progress, patience)
        except UnknownModelError:
            if home.revision == pinned:
                raise
            # The publisher has rewritten the branch; what it names now is taken.
    return hub.look_up(home.repo_id, home.revision, progress, patience)


def figures(
    found: HubCheckpoint, progress: Progress, patience: Patience = USUAL_PATIENCE
) -> Preflight:
    """Works out a checkpoint's figures; asks the hub for the tensors' names of a single file.

    Raises:
        ModelError: The model cannot be described; says why.
        HubError: The hub did not answer.
        CancelledError: Somebody asked to stop.
    """
    if found.revision is None:
        return folder_figures(found.folder)
    files = found.revision.weight_files(found.folder / INDEX_FILE)
    if found.revision.has_index:
        keys = hub.weight_map(found.folder / INDEX_FILE)
    else:
        header = hub.read_remote_header(found.revision, SINGLE_FILE, progress, patience)
        keys = dict.fromkeys(header, SINGLE_FILE)
    return examine(
        found.folder, keys=keys, shard_bytes={file.name: file.num_bytes for file in files}
    )


def folder_figures(folder: Path) -> Preflight:
    """Works out the figures of a checkpoint that is here.

    Raises:
        ModelError: The model cannot be described; says why.
    """
    examine(folder)  # What the configuration rules out comes before damaged files.
    shards = CheckpointShards(folder)
    keys = {key: shards.shard_of(key) for key in shards}
    sizes = {name: (folder / name).stat().st_size for name in set(keys.values())}
    return examine(folder, keys=keys, shard_bytes=sizes)


def note(home: ModelHome, found: HubCheckpoint) -> None:
    """Writes down where a model that was found is, so that its home finds it again.

    What an earlier download wrote down of the same commit is kept.

    Raises:
        PrepareError: The file cannot be written.
    """
    source = read_source(home.root)
    if found.is_complete:
        if source.get("is_complete") is not True or source.get("snapshot") != str(found.folder):
            _write(home, found, source, is_started=True, is_complete=True)
    elif source.get("commit") != found.commit:
        _write(home, found, source, is_started=False)


def bring(
    home: ModelHome,
    found: HubCheckpoint,
    progress: Progress,
    patience: Patience,
    *,
    made_bytes: int,
    elsewhere: str = MOVE_CACHE,
) -> None:
    """Downloads a model's weights and writes down that they are here.

    Args:
        home: The model; its lock is held.
        found: From `find`.
        progress: Reports step `download` in bytes.
        patience: When to give up.
        made_bytes: What preparation writes afterwards; there must be room for it as well.
        elsewhere: What else than room helps where the disk is too small.

    Raises:
        ModelError: A file is absent, or comes with other contents twice.
        HubError: The hub refuses, is out of order or cannot be reached.
        DiskSpaceError: The disk is too small or full; what is there is kept.
        CancelledError: Somebody asked to stop; what is there is kept.
    """
    assert found.revision is not None
    begin(home, found)
    is_one = is_one_disk(found.folder, home.root)
    if not is_one:
        require_space(home.root, made_bytes, f"Preparing {home.title}")
    download(
        found.revision,
        progress,
        patience=patience,
        spare_bytes=made_bytes if is_one else 0,
        elsewhere=elsewhere,
    )
    _write(home, found, read_source(home.root), is_started=True, is_complete=True)


def begin(home: ModelHome, found: HubCheckpoint, *, is_deleting: bool = False) -> None:
    """Writes down that a commit is being downloaded or used up, and whether by us.

    Raises:
        PrepareError: The file cannot be written.
    """
    states = {"is_started": True, "is_deleting": is_deleting}
    _write(home, found, {"is_ours": _is_ours(home, found)}, **states)


def drop(home: ModelHome, found: HubCheckpoint) -> None:
    """Deletes what is left of a download that was used up; the model stays with its commit.

    Raises:
        PrepareError: A file cannot be written or deleted.
    """
    states = {"is_started": True, "is_deleting": True, "is_dropped": True}
    _write(home, found, read_source(home.root), **states)
    with disk_errors(found.folder):
        hub_cache.drop_revision(found.folder)


def tidy(home: ModelHome) -> None:
    """Deletes what is left of a ready model's download, where it was to be deleted.

    Raises:
        PrepareError: A file cannot be written or deleted.
    """
    source = read_source(home.root)
    found = HubCheckpoint(
        folder=home.checkpoint_dir,
        revision=None,
        is_complete=False,
        license=str(source.get("license") or ""),
    )
    if source.get("is_deleting") is True and not _is_shared(home, found):
        drop(home, found)


def may_delete(home: ModelHome, found: HubCheckpoint) -> bool:
    """Whether a checkpoint's weights were or will be downloaded for this home alone."""
    return _is_ours(home, found) and not _is_shared(home, found)


def _is_shared(home: ModelHome, found: HubCheckpoint) -> bool:
    """Whether another home's checkpoint is the same snapshot."""
    roots = {path.parent for path in home.root.parent.glob(f"*/{SOURCE_FILE}")} - {home.root}
    others = [read_source(root) for root in roots]
    return any(
        each.get("is_started") is True and each.get("snapshot") == str(found.folder)
        for each in others
    )


def _is_ours(home: ModelHome, found: HubCheckpoint) -> bool:
    source, revision = read_source(home.root), found.revision
    is_same = (source.get("is_started"), source.get("commit")) == (True, found.commit)
    is_same = is_same and source.get("is_dropped") is not True  # What is there now came later.
    if is_same or revision is None:
        return is_same and source.get("is_ours") is True
    return cached_bytes(revision, revision.weight_files(found.folder / INDEX_FILE)) == 0


def doubt(home: ModelHome) -> bool:
    """Writes down that a download has to be checked again. Returns whether it was one of ours.

    Raises:
        PrepareError: The file cannot be written.
    """
    source = read_source(home.root)
    if source.get("is_complete") is not True:
        return False
    write_json(home.root / SOURCE_FILE, source | {"is_complete": False})
    return True


def _write(
    home: ModelHome, found: HubCheckpoint, source: dict[str, object], **states: bool
) -> None:
    fields = {
        "repo": home.repo_id,
        "revision": home.revision,
        "commit": found.commit,
        "snapshot": str(found.folder),
        "license": found.license,
        "is_ours": source.get("is_ours") is True,
    }
    write_json(home.root / SOURCE_FILE, fields | states)
