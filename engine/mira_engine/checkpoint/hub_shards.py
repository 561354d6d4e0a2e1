"""A hub model's shards in the client's cache: brought when they are needed, deleted after."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..errors import CheckpointError
from ..types import Precision
from . import hub, hub_cache
from .hub import Patience
from .hub_download import Whole, cached_bytes, download
from .hub_home import HubCheckpoint
from .outline import check_shard, forget_outline, take_outline
from .progress import Progress
from .shards import INDEX_FILE, CheckpointShards
from .writing import disk_errors


class HubShards:
    """The shards of one commit; see `shard_stream.ShardSource`.

    Args:
        root: The model's home; its lock is held.
        found: The checkpoint, complete or not.
        precision: What the model is prepared for.
        shard_bytes: Name and length of every shard.
        progress: Reports step `check` in files while headers are read.
        patience: How long one bears with a hub that fails.

    Raises:
        MiraError: As `take_outline` and `hub.read_range` say.
    """

    def __init__(
        self,
        root: Path,
        found: HubCheckpoint,
        precision: Precision,
        shard_bytes: Mapping[str, int],
        *,
        progress: Progress,
        patience: Patience,
    ) -> None:
        self._root = root
        self._folder = found.folder
        self._revision = revision = found.revision
        self._patience = patience
        self._checked: set[str] = set()
        self._files = {}
        if revision is not None:
            weights = revision.weight_files(found.folder / INDEX_FILE)
            self._files = {file.name: file for file in weights}

        def read_range(name: str, start: int, num_bytes: int) -> bytes:
            if revision is None:
                raise CheckpointError(
                    f"{found.folder / name} is missing.",
                    hint="Run it again: it is downloaded anew.",
                )
            return hub.read_range(revision, name, start, num_bytes, progress, patience)

        self._outline = take_outline(
            root,
            found.folder,
            found.commit,
            precision,
            shard_bytes=shard_bytes,
            read_range=read_range,
            progress=progress,
        )

    @property
    def shard_bytes(self) -> Mapping[str, int]:
        """Name and length of every shard."""
        return {name: shard.num_bytes for name, shard in self._outline.shards.items()}

    def tensors(self) -> CheckpointShards:
        """Returns the checkpoint's tensors, those of absent shards included.

        Raises:
            CheckpointError: A header or the index is damaged.
        """
        return CheckpointShards(
            self._folder,
            headers=self._outline.headers(self._folder),
            fingerprint=self._outline.fingerprint,
        )

    def here_bytes(self, name: str) -> int:
        """Returns how much of a shard is on the disk, unfinished downloads included."""
        if self._revision is not None:
            return cached_bytes(self._revision, (self._files[name],))
        path = self._folder / name
        return path.stat().st_size if path.is_file() else 0

    def bring(self, names: Sequence[str], left: Collection[str], progress: Progress) -> None:
        """Has shards on the disk, checked against the hub's hash and the outline.

        Args:
            names: Which.
            left: These and all that are needed later.
            progress: Reports step `download` in bytes of all shards.

        Raises:
            CheckpointError: A shard is missing or another than it was.
            HubError: The hub refuses, is out of order or cannot be reached.
            DiskSpaceError: The disk is full; what is there is kept.
            CancelledError: Somebody asked to stop; what is there is kept.
        """
        new = [name for name in names if name not in self._checked]
        if new and self._revision is not None:
            sizes = self.shard_bytes
            waiting = [name for name in left if name not in self._checked]
            whole = Whole(
                num_files=len(sizes),
                num_bytes=sum(sizes.values()),
                num_files_before=len(sizes) - len(waiting),
                num_bytes_before=sum(sizes.values()) - sum(sizes[name] for name in waiting),
            )
            files = [self._files[name] for name in new]
            download(self._revision, progress, patience=self._patience, files=files, whole=whole)
        for name in new:
            try:
                check_shard(self._outline, self._folder, name)
            except CheckpointError:
                forget_outline(self._root)
                raise
            self._checked.add(name)

    def drop(self, name: str) -> None:
        """Deletes a shard; one that is not here is no mistake.

        Raises:
            PrepareError: The file cannot be deleted.
        """
        path = self._folder / name
        if path.is_symlink() or path.exists():
            with disk_errors(path):
                hub_cache.drop_file(self._folder, name)
        self._checked.discard(name)
