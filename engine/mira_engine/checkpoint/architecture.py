"""Which of transformers' model classes a checkpoint's configuration asks for.

Decides from `config.json` alone what is refused: remote code, unknown families, weights
in a form that is not read. Opens no weight file and runs no code of the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..errors import CheckpointError, UnknownModelError, UnsupportedModelError
from .quantisation import Quantisation, quantisation_of, refusal_of
from .refused import check_family


def load_config(folder: Path, *, is_quantised_read: bool = False) -> PreTrainedConfig:
    """Reads a checkpoint's configuration and refuses what the engine cannot run.

    No weight file is opened. Repositories that ship code beside a family which
    transformers has itself are read with transformers' own classes. What is returned
    describes the float model, however its weights are stored.

    Args:
        folder: Where `config.json` is.
        is_quantised_read: Whether to read the configuration of weights in a form that is
            refused as well: for sizes, or for a draft.

    Raises:
        UnknownModelError: The folder has no `config.json`.
        CheckpointError: `config.json` cannot be read.
        UnsupportedModelError: Remote code is needed, the family is refused, or the weights
            are in a form that is not read.
    """
    path = folder / "config.json"
    fields = _read_fields(folder)
    family = str(fields.get("model_type", ""))
    has_code = bool(fields.get("auto_map"))
    if family not in CONFIG_MAPPING:
        if has_code:
            raise UnsupportedModelError(
                f"The model family {family or 'of this folder'!r} needs code from its own "
                "repository, which is never run here.",
                hint="Pick a family that transformers has itself.",
            )
        raise UnsupportedModelError(
            f"The model family {family!r} is unknown to transformers {transformers.__version__}.",
            hint="Pick another model.",
        )
    check_family(family)
    quantisation = quantisation_of(fields)
    if quantisation is not None and not quantisation.form.is_float and not is_quantised_read:
        raise refusal_of(quantisation, family, folder, fields)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (
        StrictDataclassError,
        AttributeError,
        KeyError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"transformers cannot read {path}: {error}", hint="Download it again."
        ) from error
    if has_code and _native_class(config) is None:
        raise UnsupportedModelError(
            f"This {family} checkpoint needs code from its own repository, which is never run "
            "here.",
            hint="Pick a family that transformers has itself.",
        )
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def load_quantisation(folder: Path) -> Quantisation | None:
    """Returns how the checkpoint's weights are stored, `None` where they are float.

    Raises:
        UnknownModelError: The folder has no `config.json`.
        CheckpointError: `config.json` cannot be read.
    """
    return quantisation_of(_read_fields(folder))


def _read_fields(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise UnknownModelError(f"{folder} has no config.json.", hint="Give a model's folder.")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is no model configuration.", hint="Download that file again."
        ) from error
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{path} is no model configuration.", hint="Download that file again."
        )
    return fields


def _native_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            # A checkpoint cut down to its text part may still name the class of the whole.
            whole = found.config_class
            if isinstance(whole, type) and not isinstance(config, whole):
                continue
            return found
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns transformers' class for `config.architectures`, else its causal model.

    Raises:
        UnsupportedModelError: transformers has no class for it, or one that writes no text.
    """
    found = _native_class(config)
    if found is not None and not found.can_generate():
        raise UnsupportedModelError(
            f"This {config.model_type} checkpoint holds {found.__name__}, which writes no text.",
            hint="Pick a model that chats.",
        )
    if found is None:
        raise UnsupportedModelError(
            f"transformers has no model class for the family {config.model_type}.",
            hint="Pick another model.",
        )
    return found


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Builds the model without weights: bfloat16 parameters on the meta device.

    Raises:
        UnsupportedModelError: transformers has no class for it, or cannot build it from
            this configuration.
    """
    try:
        with torch.device("meta"):
            return model_class(config)._from_config(config, dtype=torch.bfloat16)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"transformers cannot build this {config.model_type} model from its config.json: "
            f"{error}",
            hint="Download config.json again, or pick another model.",
        ) from error
