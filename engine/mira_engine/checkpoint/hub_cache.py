"""What the hub client's cache holds, and how one revision of it goes away again.

Knows the cache's layout as the client documents it: `blobs/<hash>`,
`snapshots/<commit>/<name>` as links to them, `refs/<branch>`. Torch-free; no network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

PARTIAL_SUFFIX = ".mira-partial"
"""Ends the name of a blob that is not whole yet."""

_FileId = tuple[int, int]
"""What all names of one file have in common: its disk and its number there."""


def revision_bytes(snapshot: Path) -> int:
    """Returns the bytes that `drop_revision` would free."""
    repo = snapshot.parent.parent
    return sum(path.stat().st_size for path in (*_own_blobs(snapshot), *_partials(repo)))


def drop_revision(snapshot: Path) -> int:
    """Deletes a snapshot, the blobs that only it uses, and what cancelled downloads left.

    Returns:
        The bytes freed.

    Raises:
        OSError: A file cannot be deleted.
    """
    repo, freed = snapshot.parent.parent, 0
    if snapshot.parent.name != "snapshots" or not repo.is_dir():
        return 0
    for path in (*_own_blobs(snapshot), *_partials(repo)):
        freed += path.stat().st_size
        path.unlink()
    shutil.rmtree(snapshot, ignore_errors=True)
    for ref in (repo / "refs").rglob("*"):
        if ref.is_file() and ref.read_text(encoding="utf-8").strip() == snapshot.name:
            ref.unlink()
    if not any((repo / "snapshots").glob("*/*")):
        shutil.rmtree(repo, ignore_errors=True)
    return freed


def drop_file(snapshot: Path, name: str) -> int:
    """Deletes one file of a snapshot, and its blob unless it has another name as well.

    The blob goes first: a name that leads nowhere is a file that is not there, while a blob
    without a name would be found by nobody.

    Returns:
        The bytes freed.

    Raises:
        OSError: A file cannot be deleted.
    """
    pointer, freed = snapshot / name, 0
    blobs = _blobs(snapshot)
    blob, repo = _blob_of(pointer, blobs), snapshot.parent.parent.resolve()
    others = (path for path in snapshot.parent.rglob("*") if path != pointer and path.is_file())
    if (
        blob.is_file()
        and repo in blob.parents
        and all(_blob_of(each, blobs) != blob for each in others)
    ):
        freed = blob.stat().st_size
        blob.unlink()
    pointer.unlink(missing_ok=True)
    return freed


def link(blob: Path, pointer: Path) -> None:
    """Gives a blob its name in the snapshot, as the client does; a copy where links fail.

    Called under the client's lock of the blob. What a killed process left half-way is replaced:
    as a second name it would keep the blob from being deleted.
    """
    if pointer.exists() and pointer.samefile(blob):
        return
    pointer.parent.mkdir(parents=True, exist_ok=True)
    made = pointer.with_name(f"{pointer.name}.link")
    made.unlink(missing_ok=True)
    try:
        made.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        try:
            made.hardlink_to(blob)
        except OSError:
            shutil.copyfile(blob, made)
    made.replace(pointer)


def _own_blobs(snapshot: Path) -> list[Path]:
    """Files of a snapshot, links followed, that no other snapshot of the repository has."""
    blobs = _blobs(snapshot)
    used = {each: _files_of(each, blobs) for each in snapshot.parent.glob("*")}
    mine = used.pop(snapshot, set())
    repo = snapshot.parent.parent.resolve()
    # A blob may itself be a link to a store that all repositories share: that one stays.
    return sorted(path for path in mine.difference(*used.values()) if repo in path.parents)


def _files_of(snapshot: Path, blobs: Mapping[_FileId, Path]) -> set[Path]:
    found = set()
    for path in snapshot.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                found.add(_blob_of(path, blobs))
    return found


def _blobs(snapshot: Path) -> dict[_FileId, Path]:
    """The repository's blobs by what identifies them."""
    found = {}
    for path in (snapshot.parent.parent / "blobs").resolve().glob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                status = path.stat()
                found[status.st_dev, status.st_ino] = path.resolve()
    return {key: path for key, path in found.items() if key[1]}  # FAT numbers nothing.


def _blob_of(pointer: Path, blobs: Mapping[_FileId, Path]) -> Path:
    """The file that a name of a snapshot stands for.

    Where the system has no links for everybody (Windows) it is a second name of a blob.
    """
    found = pointer.resolve()
    with contextlib.suppress(OSError):
        status = found.stat()
        return blobs.get((status.st_dev, status.st_ino), found)
    return found


def _partials(repo: Path) -> list[Path]:
    return sorted((repo / "blobs").glob(f"*{PARTIAL_SUFFIX}"))
