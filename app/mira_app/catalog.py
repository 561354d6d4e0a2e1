"""Which models one can pick, and which of them are ready. Torch-free; reads folders."""

from __future__ import annotations

import enum
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mira_assets.models import CatalogModel, load_models
from mira_engine.api import ConfigError, Precision, PrepareError, UnknownModelError

from .model_sizes import expected_prepared_bytes
from .paths import home_expanded
from .state_files import read_json, write_json

if TYPE_CHECKING:
    from mira_engine.api import ModelHome, ModelLibrary

BUILTIN = "builtin"
"""What `--model` calls the built-in model."""

ADDED_FILE = "added_models.json"
"""In the data directory: repositories and folders that the person put into the menu."""

_ABOUT_BUILTIN = "a 135M model upcycled to MoE; poor facts, good for seeing the engine work"
_ABOUT_UNSEEN = "added by you; known once it is downloaded"
_WHOLE_SHARE = 0.98
"""Of a published size, which is rounded: what counts as a whole download."""

_REPO = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)


class ModelState(enum.StrEnum):
    """What of a model is on the disk, as far as folders tell."""

    AVAILABLE = "available"
    DOWNLOADED = "downloaded"
    PREPARED = "prepared"
    """In another precision than the one asked for."""
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model as a menu shows it.

    Attributes:
        model: What `--model` and the engine call it.
        title: Its name for people.
        about: One line on what it is or where it lies.
        is_ready: Whether it can be loaded without preparation, in the precision asked for.
        state: What of it is on the disk.
        facts: What is known of its shape, `None` for models that are not in the catalog.
        prepared_bytes: What it takes once prepared, `None` where that is unknown.
        is_size_measured: Whether that was measured on the disk, not worked out.
        is_removable: Whether there is something to remove: files, or a line of the menu.
        ready_precisions: Every precision that it could be loaded in now.
        is_remote: Whether a server elsewhere runs it.
    """

    model: str
    title: str
    about: str
    is_ready: bool
    state: ModelState = ModelState.AVAILABLE
    facts: CatalogModel | None = None
    prepared_bytes: int | None = None
    is_size_measured: bool = False
    is_removable: bool = False
    ready_precisions: tuple[Precision, ...] = ()
    is_remote: bool = False


class Catalog(Protocol):
    """What a menu and the command line need of a catalog."""

    def entries(self, precision: Precision) -> Sequence[CatalogEntry]:
        """Returns the models to choose from, the built-in one first."""
        ...

    def find(self, model: str, precision: Precision) -> CatalogEntry:
        """Returns one model; raises `UnknownModelError` for a name that is none."""
        ...


class Shelf(Catalog, Protocol):
    """A catalog in which models can be added and removed."""

    def add(self, name: str) -> str:
        """Puts a repository or a folder into the menu; returns what the engine calls it."""
        ...

    def disk_bytes(self, model: str) -> int:
        """Returns the bytes that removing a model would free."""
        ...

    def remove(self, model: str) -> int:
        """Removes what was downloaded and prepared; returns the bytes freed."""
        ...

    def free_bytes(self) -> int:
        """Returns the free bytes of the disk that models are kept on."""
        ...


class LibraryCatalog:
    """The catalog of the model library under a data directory.

    Args:
        data_dir: Where models are kept; need not exist.
        library: For tests; by default the engine's own.
    """

    def __init__(self, data_dir: Path, library: ModelLibrary | None = None) -> None:
        if library is None:
            from mira_engine.api import ModelLibrary

            library = ModelLibrary(data_dir)
        self._library = library
        self._data_dir = data_dir
        self._sizes: dict[tuple[str, tuple[Precision, ...]], int] = {}

    def entries(self, precision: Precision) -> tuple[CatalogEntry, ...]:
        """Returns the built-in model, those that something was made for, what was added, then
        the catalog.
        """
        listed = {_key(home.name): self._entry(home, precision) for home in self._library.homes()}
        for name in (*self._added(), *load_models()):
            if _key(name) not in listed:
                listed[_key(name)] = self._unprepared(name, precision)
        return tuple(listed.values())

    def find(self, model: str, precision: Precision) -> CatalogEntry:
        """Returns one model; a folder of the menu also where it is gone.

        Raises:
            UnknownModelError: No such model or folder, and no name of a repository.
        """
        try:
            return self._entry(self._library.resolve(model), precision)
        except UnknownModelError:
            if self._is_added(model):
                return self._unprepared(model, precision)
            raise

    # -- adding and removing

    def add(self, name: str) -> str:
        """Puts a repository of the hub or a folder into the menu.

        Returns:
            What the engine calls the model.

        Raises:
            ConfigError: It is neither.
            UnknownModelError: The folder holds no model.
            PrepareError: The list cannot be written.
        """
        model = model_name(name)
        if not is_repo_name(model):
            model = self._library.resolve(model).name
        added = self._added()
        is_listed = _key(model) in {_key(each) for each in (*added, *load_models())}
        if not is_listed and not write_json(self._data_dir / ADDED_FILE, [*added, model]):
            raise PrepareError(
                f"The list of added models under {self._data_dir} cannot be written.",
                hint="Make room on that disk, or let this account write there.",
            )
        return model

    def disk_bytes(self, model: str) -> int:
        """Returns the bytes that removing a model would free; the user's folder not counted."""
        try:
            return self._library.disk_bytes(model)
        except UnknownModelError:
            return 0

    def remove(self, model: str) -> int:
        """Removes what was downloaded and prepared, and the menu's line where it was added.

        Returns:
            Bytes freed.

        Raises:
            MiraError: The files cannot be removed, or are in use.
        """
        try:
            freed = self._library.remove(model)
        except UnknownModelError:
            freed = 0
        added = self._added()
        kept = [each for each in added if _key(each) != _key(model)]
        if kept != added:
            write_json(self._data_dir / ADDED_FILE, kept)
        self._sizes.clear()
        return freed

    def free_bytes(self) -> int:
        """Returns the free bytes of the disk that models are kept on."""
        folder = self._data_dir.absolute()
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _added(self) -> list[str]:
        names = read_json(self._data_dir / ADDED_FILE)
        return [each for each in names if isinstance(each, str)] if isinstance(names, list) else []

    # -- entries

    def _unprepared(self, name: str, precision: Precision) -> CatalogEntry:
        """An entry for what is not installed: a repository, or a folder not prepared yet."""
        try:
            home = self._library.resolve(name)
        except UnknownModelError:
            return _hub_entry(name, precision, is_removable=self._is_added(name))
        return self._entry(home, precision)

    def _is_added(self, name: str) -> bool:
        return _key(name) in map(_key, self._added())

    def _entry(self, home: ModelHome, precision: Precision) -> CatalogEntry:
        model = BUILTIN if home.is_builtin else home.name
        facts = _facts(model)
        ready = home.ready_precisions
        is_ready = all(home.is_ready(needed) for needed in home.needed_precisions(precision))
        if is_ready:
            state = ModelState.READY
        elif ready:
            state = ModelState.PREPARED
        elif self._is_downloaded(home, facts):
            state = ModelState.DOWNLOADED
        else:
            state = ModelState.AVAILABLE
        prepared = self._size(home, ready) if ready else None
        if prepared is None and facts is not None:
            prepared = expected_prepared_bytes(facts, precision)
        is_unseen = facts is None and is_repo_name(model) and not ready
        about = _ABOUT_UNSEEN if is_unseen else str(home.checkpoint_dir)
        about = facts.about if facts is not None else about
        return CatalogEntry(
            model=model,
            title=facts.title if facts is not None else home.title,
            about=_ABOUT_BUILTIN if home.is_builtin else about,
            is_ready=is_ready,
            state=state,
            facts=facts,
            prepared_bytes=prepared,
            is_size_measured=bool(ready),
            is_removable=home.root.exists() or self._is_added(model),
            ready_precisions=ready,
        )

    def _is_downloaded(self, home: ModelHome, facts: CatalogModel | None) -> bool:
        """Whether all weights seem to be here; whether they are whole is `prepare`'s to say."""
        if not (home.checkpoint_dir / "config.json").is_file():
            return False
        if not is_repo_name(home.name):
            return True
        if facts is None:
            return False
        return self.disk_bytes(home.name) >= _WHOLE_SHARE * facts.download_bytes

    def _size(self, home: ModelHome, ready: tuple[Precision, ...]) -> int:
        """Bytes of what is prepared; walks the folders once for each set of precisions."""
        key = (home.name, ready)
        if key not in self._sizes:
            folders = [home.backbone_dir, home.predictors_dir, home.root / "stores"]
            self._sizes[key] = sum(map(_folder_bytes, folders))
        return self._sizes[key]


def is_repo_name(name: str) -> bool:
    """Whether a name can only be a repository of the hub: `owner/name`, and no folder."""
    return bool(_REPO.fullmatch(name)) and not name.startswith(".")


def model_name(text: str) -> str:
    """Turns what a person types or pastes into a repository's name or an absolute folder.

    Raises:
        ConfigError: It is neither; the hint says what is.
    """
    name = text.strip().strip("\"'")
    if not name:
        raise ConfigError("Nothing was given.", hint="Type owner/name, or paste a folder's path.")
    folder = home_expanded(name)
    if folder.is_dir():
        return str(folder.resolve())
    if "://" in name:
        host, _, path = name.split("://", 1)[1].partition("/")
        parts = [part for part in path.split("/") if part]
        if not host or len(parts) < 2:
            raise ConfigError(f"{name!r} names no model.", hint="Paste the address of its page.")
        name = "/".join(parts[:2])
    if name.startswith(("/", "~", ".")):
        raise ConfigError(
            f"The folder {folder} does not exist.", hint="Give a folder with config.json in it."
        )
    if not is_repo_name(name):
        raise ConfigError(
            f"{name!r} is neither a repository nor a folder.",
            hint="A repository is written owner/name, with no spaces.",
        )
    return name


def _hub_entry(name: str, precision: Precision, *, is_removable: bool) -> CatalogEntry:
    facts = _facts(name)
    return CatalogEntry(
        model=facts.repo if facts is not None else name,
        title=facts.title if facts is not None else name,
        about=facts.about if facts is not None else _ABOUT_UNSEEN,
        is_ready=False,
        facts=facts,
        prepared_bytes=expected_prepared_bytes(facts, precision) if facts is not None else None,
        is_removable=is_removable,
    )


def _facts(model: str) -> CatalogModel | None:
    wanted = _key(model)
    return next((each for repo, each in load_models().items() if _key(repo) == wanted), None)


def _key(name: str) -> str:
    """One key for a model whatever the case and the revision its repository is named with."""
    return name.split("@")[0].casefold() if is_repo_name(name) else name


def _folder_bytes(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
