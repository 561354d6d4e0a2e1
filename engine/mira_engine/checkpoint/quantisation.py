"""How a checkpoint stores its weights, as its `config.json` says.

Knows which stored forms are read as if they were float, which serve as a draft only, and
where the float form of any other may be found. Opens no weight file. Pure; any thread.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, UnsupportedModelError

_FIELD = "quantization_config"
_USUAL_BLOCK = (128, 128)
"""Of FP8 checkpoints that do not say; `null` says that a matrix has one scale."""
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_BASE_MODEL = re.compile(r"^base_model:\s*(?:\n\s*-\s*)?[\"']?([\w.-]+/[\w.-]+)", re.MULTILINE)
_FORM_IN_NAME = re.compile(
    r"[-_.](gptq|awq|bnb|int4|int8|4bit|8bit|w4a16|w8a8|w8a16|quantized|autoround|hqq|exl2|nvfp4"
    r"|fp8|mxfp4)\b.*$",
    re.IGNORECASE,
)
"""What publishers append to a model's name for a quantised form of it."""


class StoredForm(enum.Enum):
    """What the engine does with weights that are stored in a form other than float."""

    FP8 = enum.auto()
    """Read as float: FP8 values with one scale for each block of a matrix, or for all of it."""
    MXFP4 = enum.auto()
    """Read as float: FP4 values with a power of two for each 32 inputs."""
    GPTQ = enum.auto()
    """INT4 codes by groups: the source of a draft, never the model itself."""
    OTHER = enum.auto()
    """Refused."""

    @property
    def is_float(self) -> bool:
        """Whether a checkpoint in this form runs as it comes."""
        return self in (StoredForm.FP8, StoredForm.MXFP4)


_FORMS = {"fp8": StoredForm.FP8, "mxfp4": StoredForm.MXFP4, "gptq": StoredForm.GPTQ}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """The part of `config.json` about stored weights.

    Attributes:
        method: `quant_method`, in the publisher's word.
        form: What the engine does with it.
        fields: All of that part.
    """

    method: str
    form: StoredForm
    fields: Mapping[str, object]

    @property
    def block_size(self) -> tuple[int, int] | None:
        """Rows and columns that share an FP8 scale; `None` where a matrix has one scale.

        Raises:
            CheckpointError: It is no pair of positive numbers.
        """
        found = self.fields.get("weight_block_size", _USUAL_BLOCK)
        if found is None:
            return None
        is_pair = isinstance(found, (list, tuple)) and len(found) == 2
        if not is_pair or not all(isinstance(size, int) and size > 0 for size in found):
            raise CheckpointError(
                f"config.json has no usable weight_block_size: {found!r}.",
                hint="Download config.json again.",
            )
        return int(found[0]), int(found[1])


def quantisation_of(fields: Mapping[str, object]) -> Quantisation | None:
    """Returns what `config.json` says of stored weights, `None` where they are float."""
    text = fields.get("text_config")
    found = fields.get(_FIELD) or (text.get(_FIELD) if isinstance(text, dict) else None)
    if not found:
        return None
    if not isinstance(found, dict):
        return Quantisation(method="unknown", form=StoredForm.OTHER, fields={})
    method = str(found.get("quant_method", "unknown"))
    if method == "fp8" and found.get("expert_dtype") == "fp4":
        return Quantisation(method="fp8 and packed FP4", form=StoredForm.OTHER, fields=found)
    return Quantisation(method=method, form=_FORMS.get(method, StoredForm.OTHER), fields=found)


def without_quantisation(fields: Mapping[str, object]) -> dict[str, object]:
    """Returns `config.json` as the float form of the model has it."""
    return {
        name: without_quantisation(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name != _FIELD
    }


def refusal_of(
    quantisation: Quantisation, family: str, folder: Path, fields: Mapping[str, object]
) -> UnsupportedModelError:
    """Returns why weights of this form do not run, and what would."""
    base = float_repository(folder, fields)
    wanted = f"Take the model's float, FP8 or MXFP4 form{f', perhaps {base}' if base else ''}."
    if quantisation.form is StoredForm.GPTQ:
        return UnsupportedModelError(
            f"This {family} checkpoint holds gptq codes only, which make a draft but not the "
            "model itself.",
            hint=wanted,
        )
    return UnsupportedModelError(
        f"This {family} checkpoint is quantised with {quantisation.method}, which is not read "
        "here.",
        hint=wanted,
    )


def float_repository(folder: Path, fields: Mapping[str, object]) -> str | None:
    """Guesses the repository that a quantised one was made from, `None` without a clue.

    By its card, by the name that its configuration was saved under, or by its own name
    without what publishers append.
    """
    card = folder / "README.md"
    if card.is_file():
        named = _BASE_MODEL.search(card.read_text(encoding="utf-8", errors="replace"))
        if named:
            return named[1]
    saved = fields.get("_name_or_path")
    cached = [part for part in folder.parts if part.startswith("models--")]
    own = cached[-1].removeprefix("models--").replace("--", "/", 1) if cached else folder.name
    for name in (saved, own):
        shortened = _FORM_IN_NAME.sub("", name) if isinstance(name, str) else ""
        if shortened in ("", own):
            continue
        if name == own or _REPOSITORY.fullmatch(shortened):
            return shortened
    return None
