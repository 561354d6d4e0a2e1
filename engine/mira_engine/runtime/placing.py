"""Places a model's experts on the device that its configuration names.

Chooses which kind of device it is. Runs in the engine thread while a model
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mira_kernels import native
from transformers import PreTrainedModel

from ..checkpoint.experts import expert_modules_of
from ..checkpoint.store import ExpertStore
from ..config import EngineConfig
from ..events import MemoryPlan
from ..types import ComputeDtype
from . import gpu_device
from .device import ExpertDevice, make_device
from .gpu_device import GpuDevice
from .host_records import Tell


def place_experts(
    model: PreTrainedModel,
    plan: MemoryPlan,
    config: EngineConfig,
    target: ExpertStore,
    draft_source: ExpertStore,
    *,
    cache_dir: Path | None,
    is_cancelled: Callable[[], bool],
    tell: Tell,
) -> ExpertDevice | GpuDevice:
    """Builds slots, draft and link; on a card, moves the backbone there first.

    Args:
        model: The backbone, whose experts modules say what lies between the matrices.
        plan: Slots and draft.
        config: Names the device.
        target: The target's experts.
        draft_source: Where the draft's are.
        cache_dir: Where native kernels are kept, `None` for none.
        is_cancelled: Asked between layers.
        tell: Told code and text of every fallback.

    Raises:
        CancelledError: `is_cancelled` said so.
        ConfigError: There is no such card, or it has no kernels for this model.
        StoreError: A record cannot be read.
    """
    if config.gpu is None:
        return make_device(plan, config, target, draft_source, is_cancelled=is_cancelled)
    modules = [module for _, module in expert_modules_of(model)]
    form = gpu_device.form_of(modules, model.config.model_type, config.precision)
    handle = gpu_device.open_card(config.gpu)
    if cache_dir is not None and config.arithmetic is ComputeDtype.BFLOAT16:
        native.load(cache_dir)  # Where they are built: for what the processor computes.
    model.to(handle.device)
    return gpu_device.make_gpu_device(
        handle,
        plan,
        config,
        target,
        draft_source,
        form,
        modules[0],
        is_cancelled=is_cancelled,
        tell=tell,
    )
