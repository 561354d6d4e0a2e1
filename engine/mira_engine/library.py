"""Where models live on the disk, and which of them are ready.

Torch-free, so the app may look without loading the engine. Looks at names and markers
only; whether a checkpoint can be run is decided by `prepare`. Asks no network: what is
known of a hub model is what `checkpoint.hub_home` wrote down.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from .checkpoint.files import BACKBONE_MARKER, LOCK_FILE, MANIFEST_FILE
from .errors import PrepareError, UnknownModelError
from .types import Precision

BUILTIN = "builtin"
BUILTIN_TITLE = "SmolLM2 135M, upcycled to 16 experts (built-in)"
SOURCE_FILE = "source.json"
"""In the home of a folder model or a hub model: where the checkpoint is."""

_REPO = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)

_DEVICE = re.compile(r"con|prn|aux|nul|(com|lpt)[0-9]", re.IGNORECASE)
"""Names that are no files on Windows, with whatever suffix."""

_NEEDED = {
    Precision.NESTED: (Precision.NESTED,),
    Precision.INT4: (Precision.INT4,),
    Precision.INT8: (Precision.INT8, Precision.INT4),
    Precision.BF16: (Precision.BF16, Precision.INT4),
    Precision.FLOAT32: (Precision.FLOAT32, Precision.INT4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHome:
    """One model's places on the disk.

    Attributes:
        name: What `ModelLibrary.resolve` takes: `builtin`, the checkpoint's folder, or
            `owner/name[@revision]` of the hub.
        title: For people.
        root: Everything that is made for the model.
        checkpoint_dir: The full weights; for a folder model the user's own folder, for a hub
            model its snapshot in the hub's cache.
        is_builtin: Whether the engine makes the checkpoint itself.
        repo_id: `owner/name` of a hub model, else an empty string.
        revision: Branch, tag or commit that was asked for; `None` is the main one.
        note: What a person should know about the name, or an empty string.
    """

    name: str
    title: str
    root: Path
    checkpoint_dir: Path
    is_builtin: bool = False
    repo_id: str = ""
    revision: str | None = None
    note: str = ""

    @property
    def is_hub(self) -> bool:
        """Whether the model is of the hub."""
        return bool(self.repo_id)

    @property
    def backbone_dir(self) -> Path:
        """Configuration, tokenizer and non-expert weights."""
        return self.root / "backbone"

    @property
    def download_dir(self) -> Path:
        """Files that preparation fetched and has not used up yet."""
        return self.root / "download"

    @property
    def predictors_dir(self) -> Path:
        """What predicts the experts of later layers; not needed to load the model."""
        return self.root / "predictors"

    @property
    def draft_dir(self) -> Path:
        """What a GPTQ draft is made from, while it is made."""
        return self.root / "draft"

    def store_dir(self, precision: Precision) -> Path:
        """Returns the folder of the expert store in that precision.

        That is the one with codes chosen by GPTQ where it is finished.
        """
        chosen = self.gptq_store_dir(precision)
        if (chosen / MANIFEST_FILE).exists():
            return chosen
        return self.nearest_store_dir(precision)

    def nearest_store_dir(self, precision: Precision) -> Path:
        """Returns the folder of the store whose codes are rounded to nearest."""
        return self.root / "stores" / precision.value

    def gptq_store_dir(self, precision: Precision) -> Path:
        """Returns the folder of the store whose draft's codes GPTQ has chosen."""
        return self.root / "stores" / f"{precision.value}.gptq"

    def draft_precision(self, precision: Precision) -> Precision:
        """Returns the precision of the store that holds the draft of a target."""
        return _NEEDED[precision][-1]

    def needed_precisions(self, precision: Precision) -> tuple[Precision, ...]:
        """Returns the stores that running in `precision` takes: the target's, and a draft's
        where the target holds none.
        """
        return _NEEDED[precision]

    def is_store_finished(self, precision: Precision) -> bool:
        """Whether the experts are converted into that precision."""
        return (self.store_dir(precision) / MANIFEST_FILE).exists()

    def is_ready(self, precision: Precision) -> bool:
        """Whether the backbone and every needed store are finished."""
        return (self.backbone_dir / BACKBONE_MARKER).exists() and all(
            map(self.is_store_finished, self.needed_precisions(precision))
        )

    @property
    def ready_precisions(self) -> tuple[Precision, ...]:
        """Every precision that could be loaded now."""
        return tuple(precision for precision in Precision if self.is_ready(precision))


class ModelLibrary:
    """The models under one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir

    @property
    def models_dir(self) -> Path:
        """Parent of every model's home."""
        return self.data_dir / "models"

    def resolve(self, model: str) -> ModelHome:
        """Finds a model by name.

        Args:
            model: `builtin`, the path of a folder with a checkpoint, or `owner/name` or
                `owner/name@revision` of the hub. A prepared folder model is found even when
                its checkpoint is gone. Where `owner/name` is a folder here as well the hub's
                is meant, and the home's `note` says so; a path that begins with `./` or `/`
                is always a folder.

        Raises:
            UnknownModelError: It is none of these. Whether the hub has the repository is
                found out when it is described or prepared.
        """
        if model == BUILTIN:
            root = self.models_dir / BUILTIN
            return ModelHome(
                name=BUILTIN,
                title=BUILTIN_TITLE,
                root=root,
                checkpoint_dir=root / "checkpoint",
                is_builtin=True,
            )
        if not model.strip():
            raise UnknownModelError(
                "No model was named.", hint="Give builtin, a model's folder, or owner/name."
            )
        if (match := _REPO.fullmatch(model)) and not model.startswith("."):
            return self._hub_home(match["repo"], match["revision"])
        # `Path.expanduser` raises where nobody has the home that is named.
        folder = Path(os.path.expanduser(model)).resolve()
        home = self._folder_home(folder)
        if (folder / "config.json").is_file() or home.ready_precisions:
            return home
        if folder.is_dir():
            raise UnknownModelError(
                f"{folder} holds no model: it has no config.json.",
                hint="Give the folder of a downloaded checkpoint.",
            )
        if folder.is_file():
            raise UnknownModelError(
                f"{folder} is a file.", hint="Give the folder with config.json in it."
            )
        if model.startswith((".", "~", "/")) or Path(model).is_absolute():
            raise UnknownModelError(
                f"The folder {folder} does not exist.",
                hint="Give the folder of a downloaded checkpoint, or builtin.",
            )
        raise UnknownModelError(
            f"There is no model {model!r}.",
            hint="Give builtin, the folder of a checkpoint, or owner/name of a repository on "
            "the hub.",
        )

    def _hub_home(self, repo_id: str, revision: str | None) -> ModelHome:
        folder, note = _folder_name(repo_id.replace("/", "--")), ""
        if revision is not None:
            folder += f"--{hashlib.sha256(revision.encode()).hexdigest()[:8]}"
        root = self.models_dir / folder
        with contextlib.suppress(OSError):
            if (Path(repo_id) / "config.json").is_file():
                note = f"{repo_id} is also a folder here; write ./{repo_id} for that one."
        snapshot = read_source(root).get("snapshot")
        return ModelHome(
            name=repo_id if revision is None else f"{repo_id}@{revision}",
            title=repo_id.partition("/")[2],
            root=root,
            checkpoint_dir=Path(snapshot) if isinstance(snapshot, str) else root / "download",
            repo_id=repo_id,
            revision=revision,
            note=note,
        )

    def _folder_home(self, folder: Path) -> ModelHome:
        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
        return ModelHome(
            name=str(folder),
            title=folder.name,
            root=self.models_dir / _folder_name(f"{folder.name}-{digest}"),
            checkpoint_dir=folder,
        )

    def installed(self) -> list[ModelHome]:
        """Returns the models that can be loaded in some precision, the built-in one first."""
        return [home for home in self.homes() if home.ready_precisions]

    def homes(self) -> list[ModelHome]:
        """Returns every model that something was made for, and the built-in one."""
        homes = [self.resolve(BUILTIN)]
        for path in sorted(self.models_dir.glob(f"*/{SOURCE_FILE}")):
            source = read_source(path.parent)
            repo, folder, revision = (source.get(key) for key in ("repo", "folder", "revision"))
            if isinstance(repo, str) and _REPO.fullmatch(repo):
                home = self._hub_home(repo, revision if isinstance(revision, str) else None)
            elif isinstance(folder, str):
                home = self._folder_home(Path(folder))
            else:
                continue  # A home that another program or a fault wrote: not a model of ours.
            if home.root == path.parent:
                homes.append(home)
        return homes

    def disk_bytes(self, name: str) -> int:
        """Returns the bytes that `remove` would free.

        Raises:
            UnknownModelError: There is no such model.
        """
        home = self.resolve(name)
        return _bytes_below(home.root) + self._cached_bytes(home)

    def drop_download(self, name: str) -> int:
        """Deletes the downloaded weights of a hub model that is ready without them.

        Another precision then takes another download.

        Returns:
            The bytes freed: 0 where there is nothing that was downloaded here, or no
            precision is ready.

        Raises:
            UnknownModelError: There is no such model.
            PrepareError: It is being prepared, or files cannot be deleted.
        """
        home = self.resolve(name)
        if not home.ready_precisions:
            return 0
        with _held(home):
            return self._drop_cached(home)

    def remove(self, name: str) -> int:
        """Deletes all that was made for a model: backbone, stores, predictors, its download.

        What stands in the hub's cache goes only if it was downloaded here, and only files
        that no other revision uses. A folder model's own checkpoint is never touched.

        Returns:
            The bytes freed.

        Raises:
            UnknownModelError: There is no such model.
            PrepareError: It is being prepared, or files cannot be deleted.
        """
        home = self.resolve(name)
        if not home.root.exists():
            return 0
        with _held(home):
            freed = _bytes_below(home.root) + self._drop_cached(home)
            _empty(home.root)
        shutil.rmtree(home.root, ignore_errors=True)
        return freed

    def _cached_bytes(self, home: ModelHome) -> int:
        if not _owns_download(home):
            return 0
        from .checkpoint import hub_cache

        return hub_cache.revision_bytes(home.checkpoint_dir)

    def _drop_cached(self, home: ModelHome) -> int:
        if not _owns_download(home):
            return 0
        from .checkpoint import hub_cache

        others = {
            other.checkpoint_dir
            for other in self.homes()
            if other.is_hub and other.root != home.root
        }
        if home.checkpoint_dir in others:
            return 0
        return hub_cache.drop_revision(home.checkpoint_dir)


def _folder_name(name: str) -> str:
    """Returns a name that every system takes: Windows keeps some for devices, up to a dot."""
    return f"_{name}" if _DEVICE.fullmatch(name.partition(".")[0]) else name


def read_source(root: Path) -> dict[str, object]:
    """Reads what a home says of its checkpoint; empty where it says nothing readable."""
    try:
        found = json.loads((root / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def _held(home: ModelHome) -> Iterator[None]:
    """Holds a home's lock while files are deleted, and says what hinders that."""
    try:
        with filelock.FileLock(home.root / LOCK_FILE, timeout=0):
            yield
    except filelock.Timeout as error:
        raise PrepareError(
            f"{home.title} is being prepared.", hint="Stop that first, then try again."
        ) from error
    except OSError as error:
        raise PrepareError(
            f"{home.root} could not be deleted: {error.strerror or error}.",
            hint="Close what uses the model, check the permissions, and try again.",
        ) from error


def _empty(root: Path) -> None:
    """Deletes a home's folders, markers first, so that no half of a model looks ready."""
    for marker in (BACKBONE_MARKER, MANIFEST_FILE):
        for path in sorted(root.rglob(marker)):
            path.unlink()
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def _owns_download(home: ModelHome) -> bool:
    return home.is_hub and read_source(home.root).get("is_ours") is True


def _bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
