"""Whether a hub model's preparation fits the disk, its files kept or deleted, and in words.

The hub client's cache and the model's home may lie on one disk, which then has to hold the
sum, or on two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import format_bytes
from ..library import ModelHome
from ..types import Precision
from . import hub_home
from .hub_download import MOVE_CACHE, cached_bytes
from .hub_home import HubCheckpoint
from .preflight import SPARE_BYTES, Preflight
from .schedule import SpaceNeed
from .shards import INDEX_FILE
from .writing import free_bytes, has_space, is_one_disk, require_space


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSpace:
    """The room for one preparation.

    Attributes:
        home: The model; its folder exists.
        found: Its checkpoint, complete or not.
        stores: What is made of it.
    """

    home: ModelHome
    found: HubCheckpoint
    stores: Sequence[Precision]

    @property
    def _is_one_disk(self) -> bool:
        return is_one_disk(self.found.folder, self.home.root)

    def need_of_keeping(self, figures: Preflight) -> SpaceNeed:
        """Returns what a preparation takes that downloads everything first and keeps it."""
        revision = self.found.revision
        assert revision is not None
        files = revision.weight_files(self.found.folder / INDEX_FILE)
        weights = sum(file.num_bytes for file in files) - cached_bytes(revision, files)
        missing = [each for each in self.stores if not self.home.is_store_finished(each)]
        made = sum(figures.store_bytes(each) for each in missing)
        made += figures.backbone_bytes if not self.home.ready_precisions else 0
        return SpaceNeed(weights_bytes=weights, made_bytes=made, whole_bytes=weights + made)

    def has_room(self, need: SpaceNeed) -> bool:
        """Whether it fits what is free."""
        if self._is_one_disk:
            return has_space(self.home.root, need.whole_bytes + SPARE_BYTES)
        return has_space(self.home.root, need.made_bytes + SPARE_BYTES) and has_space(
            self.found.folder, need.weights_bytes
        )

    def require(self, need: SpaceNeed, *, is_deleting: bool) -> None:
        """Refuses a preparation that does not fit.

        Raises:
            DiskSpaceError: It does not; says the bytes needed, free and missing.
        """
        what = f"{self.home.repo_id} with what is made of it"
        what += ", even with --delete-download," if is_deleting else ""
        path, num_bytes = self.home.root, need.whole_bytes + SPARE_BYTES
        if not self._is_one_disk:
            require_space(path, need.made_bytes + SPARE_BYTES, f"Preparing {self.home.title}")
            path, num_bytes = self.found.folder, need.weights_bytes
        require_space(path, num_bytes, what, elsewhere=MOVE_CACHE)

    def refuse_early(self, figures: Preflight) -> None:
        """Refuses what cannot fit with files deleted either, before any of them is opened.

        Only where nothing is made yet; else the exact need has to be worked out first.

        Raises:
            DiskSpaceError: As `require` says.
        """
        peak, revision = figures.peak_deleting_bytes(self.stores), self.found.revision
        if peak is None or revision is None or (self.home.root / "stores").exists():
            return
        here = cached_bytes(revision, revision.weight_files(self.found.folder / INDEX_FILE))
        made = figures.backbone_bytes + sum(figures.store_bytes(each) for each in self.stores)
        whole = peak - SPARE_BYTES - here
        need = SpaceNeed(weights_bytes=max(0, whole - made), made_bytes=made, whole_bytes=whole)
        self.require(need, is_deleting=True)

    def ways_out(self, figures: Preflight) -> str:
        """Returns what else than room would do where the download is to be kept."""
        peak = figures.peak_deleting_bytes(self.stores)
        if peak is None or not hub_home.may_delete(self.home, self.found):
            return MOVE_CACHE
        return f"give --delete-download, which needs {format_bytes(peak)}, or {MOVE_CACHE}"

    def words(self, need: SpaceNeed, *, is_deleting: bool) -> str:
        """Returns one sentence on what the disk will take, for people."""
        folders = [self.home.root] + ([] if self._is_one_disk else [self.found.folder])
        free = " and ".join(f"{format_bytes(free_bytes(each))} free at {each}" for each in folders)
        how = "each downloaded file is deleted as soon as it is converted"
        return (
            f"space: {how if is_deleting else 'the download is kept'}; at most "
            f"{format_bytes(need.whole_bytes)} more of the disk at once, "
            f"{format_bytes(need.made_bytes)} for the prepared model; {free}."
        )
