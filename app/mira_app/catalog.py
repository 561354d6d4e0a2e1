"""Which models one can pick, and which of them are ready. Torch-free; reads folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mira_engine.api import Precision

if TYPE_CHECKING:
    from mira_engine.api import ModelHome

BUILTIN = "builtin"
"""What `--model` calls the built-in model."""

_ABOUT_BUILTIN = "a 135M model upcycled to MoE; poor facts, good for seeing the engine work"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model as a menu shows it.

    Attributes:
        model: What `--model` and the engine call it.
        title: Its name for people.
        about: One line on what it is or where it lies.
        is_ready: Whether it can be loaded without preparation, in the precision asked for.
    """

    model: str
    title: str
    about: str
    is_ready: bool


class Catalog(Protocol):
    """What a menu and the command line need of a catalog."""

    def entries(self, precision: Precision) -> Sequence[CatalogEntry]:
        """Returns the models to choose from, the built-in one first."""
        ...

    def find(self, model: str, precision: Precision) -> CatalogEntry:
        """Returns one model; raises `UnknownModelError` for a name that is none."""
        ...


class LibraryCatalog:
    """The catalog of the model library under a data directory."""

    def __init__(self, data_dir: Path) -> None:
        from mira_engine.api import ModelLibrary

        self._library = ModelLibrary(data_dir)

    def entries(self, precision: Precision) -> tuple[CatalogEntry, ...]:
        """Returns the built-in model, then the installed ones in the library's order."""
        builtin = self._library.resolve(BUILTIN)
        others = (home for home in self._library.installed() if not home.is_builtin)
        return tuple(_entry(home, precision) for home in (builtin, *others))

    def find(self, model: str, precision: Precision) -> CatalogEntry:
        """Returns one model.

        Raises:
            UnknownModelError: No such model or folder.
        """
        return _entry(self._library.resolve(model), precision)


def _entry(home: ModelHome, precision: Precision) -> CatalogEntry:
    is_ready = all(home.is_ready(needed) for needed in home.needed_precisions(precision))
    return CatalogEntry(
        model=BUILTIN if home.is_builtin else str(home.checkpoint_dir),
        title=home.title,
        about=_ABOUT_BUILTIN if home.is_builtin else str(home.checkpoint_dir),
        is_ready=is_ready,
    )
