"""Loading a model without its experts.

transformers builds and loads everything else: a subclass of the model's own class sets
the expert parameters to `None` right after construction (on the meta device), so
ordinary `from_pretrained` finds no place for expert tensors and reads none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoint.architecture import load_config, model_class
from ..checkpoint.experts import expert_modules_of
from ..errors import CheckpointError
from ..types import ComputeDtype
from . import experts
from .attention import use_short_query_attention

TORCH_DTYPES = {
    ComputeDtype.BFLOAT16: torch.bfloat16,
    ComputeDtype.FLOAT16: torch.float16,
    ComputeDtype.FLOAT32: torch.float32,
}


def without_experts(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns a subclass whose experts modules have no parameters."""

    def __init__(self: PreTrainedModel, config: object, *args: object, **kwargs: object) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        for _, module in expert_modules_of(self):
            for name in list(module._parameters):
                module._parameters[name] = None
            module._is_hf_initialized = True

    body = {"__init__": __init__, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), body)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hides its progress bar and what it says of the experts that are left out on purpose."""
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def load_backbone(
    folder: Path, dtype: ComputeDtype, *, attention: str | None = None
) -> PreTrainedModel:
    """Loads everything but the routed experts, in evaluation mode.

    Args:
        folder: Config and non-expert weights under their checkpoint names.
        dtype: Type of the weights and of the arithmetic.
        attention: transformers' attention implementation, `None` for its own choice.

    Raises:
        CheckpointError: A weight is missing from the folder.
        UnsupportedModelError: The architecture is not known.
    """
    experts.register()
    config = load_config(folder)
    stripped = without_experts(model_class(config))
    with _quiet_transformers():
        model, info = stripped.from_pretrained(
            folder,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            experts_implementation=experts.EXPERTS_IMPLEMENTATION,
            attn_implementation=attention,
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{len(missing)} weights are missing from {folder}, the first is {missing[0]}.",
            hint="Remove the model and prepare it again.",
        )
    if not chooses_keys(model):
        use_short_query_attention(model)
    return model.eval()


def chooses_keys(model: PreTrainedModel) -> bool:
    """Whether the model's attention chooses which tokens it looks at, by indexers.

    In transformers 5.24 such a family masks the others only where the attention has the name
    of one of transformers' own implementations; under another name it would see them all.
    """
    return any(getattr(module, "indexer", None) is not None for module in model.modules())
