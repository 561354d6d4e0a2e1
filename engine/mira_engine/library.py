"""Where models live on the disk, and which of them are ready.

Torch-free, so the app may look without loading the engine. Looks at names and markers
only; whether a checkpoint can be run is decided by `prepare`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from .checkpoint.files import BACKBONE_MARKER, MANIFEST_FILE
from .errors import UnknownModelError
from .types import Precision

BUILTIN = "builtin"
BUILTIN_TITLE = "SmolLM2 135M, upcycled to 16 experts (built-in)"
SOURCE_FILE = "source.json"
"""In the home of a folder model: where the checkpoint is."""

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
        name: What `ModelLibrary.resolve` takes: `builtin`, or the checkpoint's folder.
        title: For people.
        root: Everything that is made for the model.
        checkpoint_dir: The full weights; for a folder model the user's own folder.
        is_builtin: Whether the engine makes the checkpoint itself.
    """

    name: str
    title: str
    root: Path
    checkpoint_dir: Path
    is_builtin: bool = False

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

    def store_dir(self, precision: Precision) -> Path:
        """Returns the folder of the expert store in that precision."""
        return self.root / "stores" / precision.value

    def needed_precisions(self, precision: Precision) -> tuple[Precision, ...]:
        """Returns the stores that running in `precision` takes: the target's, and a draft's
        where the target holds none.
        """
        return _NEEDED[precision]

    def is_ready(self, precision: Precision) -> bool:
        """Whether the backbone and every needed store are finished."""
        return (self.backbone_dir / BACKBONE_MARKER).exists() and all(
            (self.store_dir(needed) / MANIFEST_FILE).exists()
            for needed in self.needed_precisions(precision)
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
            model: `builtin`, or the path of a folder with a checkpoint. A prepared folder
                model is found even when its checkpoint is gone.

        Raises:
            UnknownModelError: It is neither.
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
            raise UnknownModelError("No model was named.", hint="Give builtin or a model's folder.")
        folder = Path(model).expanduser().resolve()
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
        if model.startswith((".", "~", "/")):
            raise UnknownModelError(
                f"The folder {folder} does not exist.",
                hint="Give the folder of a downloaded checkpoint, or builtin.",
            )
        raise UnknownModelError(
            f"There is no model {model!r}.",
            hint="Downloading from the hub is not there yet: give builtin, or the folder of a "
            "checkpoint that you have downloaded.",
        )

    def _folder_home(self, folder: Path) -> ModelHome:
        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
        return ModelHome(
            name=str(folder),
            title=folder.name,
            root=self.models_dir / f"{folder.name}-{digest}",
            checkpoint_dir=folder,
        )

    def installed(self) -> list[ModelHome]:
        """Returns the models that can be loaded in some precision, the built-in one first."""
        homes = [self.resolve(BUILTIN)]
        for source in sorted(self.models_dir.glob(f"*/{SOURCE_FILE}")):
            try:
                folder = Path(json.loads(source.read_text(encoding="utf-8"))["folder"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # A home that another program or a fault wrote: not a model of ours.
            home = self._folder_home(folder)
            if home.root == source.parent:
                homes.append(home)
        return [home for home in homes if home.ready_precisions]
