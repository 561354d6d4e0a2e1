"""transformers with accelerate's offload, at the same shape and in the same memory.

The whole model in bfloat16 is divided by accelerate itself, on the meta device, where it says
which layers stay on the card and which wait in host memory. A model of few layers is made and
timed layer by layer; the whole is added up from it, and is labelled so.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from gpu.card import DEVICE, HAS_CARD, limit_memory, synchronize
from gpu.decoding import BUDGETS
from gpu.sections import Deadline
from gpu.shapes import Shape, make_whole
from mira_engine.checkpoint.architecture import meta_model
from torch import nn
from transformers import DynamicCache, PreTrainedModel

MIN_SPEEDUP = 10.0
NUM_RESIDENT, NUM_OFFLOADED = 1, 2
"""MoE layers that are made: on the card, and waiting for it."""

NUM_TOKENS = 6 if HAS_CARD else 3
ON_DEVICE: int | str = 0 if HAS_CARD else "cpu"
WAITING = "cpu" if HAS_CARD else "disk"
_MUCH = 1 << 50


def time_offloaded(results: dict[str, Any], deadline: Deadline, *, shape: Shape) -> None:
    """Divides the whole model, times a part of it, and adds up."""
    if find_spec("accelerate") is None:
        deadline.left_out.append("everything: accelerate is not installed")
        return
    budget = BUDGETS[0]
    whole = meta_model(shape.config())
    layer_bytes = max(_num_bytes(layer) for layer in _layers(whole))
    # Where there is no card: a little less than everything.
    room = budget.memory_bytes or _num_bytes(whole) - layer_bytes // 2
    num_resident, num_waiting = divide(whole, room)
    results |= {
        "budget": budget.name,
        "num_resident": num_resident,
        "num_offloaded": num_waiting,
        "measured": f"{NUM_RESIDENT + NUM_OFFLOADED} layers of {shape.num_layers}, added up",
        "ms_per_token": None,
    }
    if deadline.is_over:
        deadline.left_out.append("timing")
        return
    model = make_whole(shape.config(NUM_RESIDENT + NUM_OFFLOADED), DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        _dispatch(model, folder)
        if budget.memory_bytes is not None:
            limit_memory(budget.memory_bytes)
        rest_s, by_layer = time_layers(model, NUM_TOKENS)
    limit_memory(None)
    if not HAS_CARD:
        return
    resident, waiting = by_layer[-NUM_OFFLOADED - 1], statistics.mean(by_layer[-NUM_OFFLOADED:])
    dense = sum(by_layer[: -NUM_OFFLOADED - NUM_RESIDENT])
    num_moe_resident = max(0, num_resident - shape.num_dense_layers)
    total_s = rest_s + dense + num_moe_resident * resident + num_waiting * waiting
    results |= {
        "resident_layer_ms": 1e3 * resident,
        "offloaded_layer_ms": 1e3 * waiting,
        "ms_per_token": 1e3 * total_s,
    }


def divide(model: PreTrainedModel, num_bytes: int) -> tuple[int, int]:
    """Returns how many layers accelerate keeps on a device of this size, and how many not.

    Args:
        model: The whole model on the meta device.
        num_bytes: Of the device.
    """
    from accelerate import infer_auto_device_map

    placed = infer_auto_device_map(
        model,
        max_memory={ON_DEVICE: num_bytes, WAITING: _MUCH},
        no_split_module_classes=sorted(model._no_split_modules),
        dtype=torch.bfloat16,
    )
    num_layers = len(_layers(model))
    num_resident = 0
    for index in range(num_layers):
        name = f"{model.base_model_prefix}.layers.{index}"
        while name not in placed:  # Modules whose parts all go to one place stand for them.
            name = name.rpartition(".")[0]
        num_resident += placed[name] == ON_DEVICE
    return num_resident, num_layers - num_resident


def _dispatch(model: PreTrainedModel, folder: str) -> None:
    """Puts a model's last layers where they wait, and hooks on what brings them."""
    from accelerate import dispatch_model

    prefix, layers = model.base_model_prefix, _layers(model)
    first_waiting = len(layers) - NUM_OFFLOADED
    places: dict[str, int | str] = {
        f"{prefix}.layers.{index}": WAITING if index >= first_waiting else ON_DEVICE
        for index in range(len(layers))
    }
    others = {f"{prefix}.{name}" for name, _ in model.get_submodule(prefix).named_children()}
    others |= {name for name, _ in model.named_children()}
    places |= dict.fromkeys(sorted(others - {prefix, f"{prefix}.layers"}), ON_DEVICE)
    for layer in layers[first_waiting:]:
        layer.to("cpu")
    dispatch_model(model, places, offload_dir=folder)


@torch.inference_mode()
def time_layers(model: PreTrainedModel, num_tokens: int) -> tuple[float, list[float]]:
    """Decodes one token after another.

    Returns:
        Seconds a token of everything but the layers, and of each layer; medians, without the
        first token.
    """
    begun: dict[int, float] = {}
    times: dict[int, list[float]] = defaultdict(list)

    def before(index: int) -> Any:
        def hook(module: nn.Module, inputs: object) -> None:
            synchronize()
            begun[index] = time.perf_counter()

        return hook

    def after(index: int) -> Any:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            synchronize()
            times[index].append(time.perf_counter() - begun[index])

        return hook

    layers = _layers(model)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(before(index))
        layer.register_forward_hook(after(index))
    cache = DynamicCache(config=model.config)
    token, totals = 1, []
    for _ in range(num_tokens):
        synchronize()
        started = time.perf_counter()
        ids = torch.tensor([[token]], device=DEVICE)
        logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
        token = int(logits[0, -1].argmax())
        totals.append(time.perf_counter() - started)
    by_layer = [statistics.median(times[index][1:]) for index in range(len(layers))]
    return max(0.0, statistics.median(totals[1:]) - sum(by_layer)), by_layer


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    return model.get_decoder().layers


def _num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def describe_offloaded(results: dict[str, Any]) -> Iterable[str]:
    """Lines for people."""
    if "num_resident" not in results:
        return
    yield (
        "  {budget}: accelerate keeps {num_resident} layers on the card, {num_offloaded} wait; "
        "{measured}"
    ).format(**results)
    if results["ms_per_token"] is not None:
        yield (
            "  {ms_per_token:.0f} ms a token: {resident_layer_ms:.1f} ms a layer on the card, "
            "{offloaded_layer_ms:.1f} ms one that waits; bfloat16"
        ).format(**results)
