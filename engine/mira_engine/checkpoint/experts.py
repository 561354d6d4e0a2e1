"""Which modules of a model are routed experts, and which bytes of a checkpoint are which.

Owns the knowledge of transformers' experts interface (the flags its decorator puts on a
module) and of its checkpoint key mapping. `find_expert_modules` looks at a model on the
meta device, `CheckpointExperts` reads one expert at a time from disk, whatever form its
weights are stored in. Both build on transformers internals (`core_model_loading`,
`conversion_mapping`) that have a contract test. Runs in any thread; holds no open file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..errors import CheckpointError, UnsupportedModelError
from ..types import ExpertShape
from .architecture import load_config, load_quantisation, meta_model
from .expert_sources import ExpertSources
from .float_shards import as_float
from .formats import ExpertTensors
from .shards import CheckpointShards

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
_NUM_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertModule:
    """One layer's routed experts.

    Attributes:
        layer: Ordinal among the MoE layers, from 0.
        name: Dotted name of the module in the model.
        num_experts: Experts in the layer.
        shape: Dimensions of each.
    """

    layer: int
    name: str
    num_experts: int
    shape: ExpertShape


def expert_modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Finds the modules that carry the experts interface's flags, in module order.

    Works with and without parameters, so also on a model whose experts were removed.
    """
    return [
        (name, module)
        for name, module in model.named_modules()
        if all(hasattr(module, flag) for flag in _FLAGS)
        and (hasattr(module, "gate_up_proj") or hasattr(module, "up_proj"))
    ]


def find_expert_modules(model: PreTrainedModel) -> tuple[ExpertModule, ...]:
    """Describes each layer's routed experts; a model without parameters is rebuilt on meta.

    Raises:
        UnsupportedModelError: There are none (a dense model, or a family whose experts do
            not go through transformers' experts interface), or the engine has no form for
            them. Names the family.
    """
    found = expert_modules_of(model)
    family = model.config.model_type
    if not found:
        raise _no_experts(model.config)
    if any(module.down_proj is None for _, module in found):
        found = expert_modules_of(meta_model(model.config))
    modules = tuple(
        ExpertModule(
            layer=layer,
            name=name,
            num_experts=int(module.num_experts),
            shape=_shape_of(module, family),
        )
        for layer, (name, module) in enumerate(found)
    )
    if len({(module.num_experts, module.shape) for module in modules}) > 1:
        raise UnsupportedModelError(
            f"The layers of this {family} model have experts of different number or shape.",
            hint="Pick another model.",
        )
    return modules


def expert_param_names(model: nn.Module) -> set[str]:
    """Returns the names of all parameters of routed experts.

    A norm behind the experts is one for all of them and no expert's: it stays in the model.
    """
    return {
        f"{name}.{param}"
        for name, module in expert_modules_of(model)
        for param, _ in module.named_parameters(recurse=False)
    }


def map_keys(model: PreTrainedModel, keys: Iterable[str]) -> Iterator[tuple[str, str, str | None]]:
    """Leads every checkpoint key through transformers' mapping, as its loader does.

    Yields:
        The key, the parameter it goes to (which the model need not have), and the mapping's
        pattern, or `None`; keys in natural order.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], prefix, state)
        yield key, target, pattern


def missing_weights(
    model: PreTrainedModel, mapped: Iterable[tuple[str, str, str | None]]
) -> list[str]:
    """Returns what a model needs beside its experts and a checkpoint lacks, sorted.

    Args:
        model: The model on the meta device.
        mapped: The checkpoint's keys as `map_keys` gives them.
    """
    split = {
        pattern
        for entry in get_model_conversion_mapping(model)
        if isinstance(entry, WeightConverter) and len(entry.target_patterns) > 1
        for pattern in entry.source_patterns
    }
    present: set[str] = set()
    filled: set[str] = set()
    for _, target, pattern in mapped:
        present.add(target)
        if pattern in split:  # One tensor fills several parameters beside each other.
            filled.add(target.rpartition(".")[0].rpartition(".")[0] + ".")
    for copy, original in model.all_tied_weights_keys.items():
        if present & {copy, original}:
            present |= {copy, original}
    optional = [re.compile(each) for each in model._keys_to_ignore_on_load_missing or ()]
    return sorted(
        name
        for name in set(model.state_dict()) - expert_param_names(model) - present
        if not any(each.search(name) for each in optional) and not name.startswith(tuple(filled))
    )


def _no_experts(config: PreTrainedConfig) -> UnsupportedModelError:
    parts = [config, config.get_text_config(), getattr(config, "ffn_config", None)]
    counts = [getattr(part, field, None) for part in parts for field in _NUM_EXPERTS_FIELDS]
    family = config.model_type
    if any(count for count in counts if isinstance(count, list) or (count or 0) > 1):
        return UnsupportedModelError(
            f"The family {family} keeps its experts outside transformers' experts interface.",
            hint="Pick a Mixture-of-Experts model of another family.",
        )
    return UnsupportedModelError(
        f"This {family} model is dense: it has no routed experts.",
        hint="Pick a Mixture-of-Experts model.",
    )


def _shape_of(module: nn.Module, family: str) -> ExpertShape:
    expected = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    if module.has_bias:
        expected |= {f"{name}_bias" for name in expected}
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if names != expected:
        raise UnsupportedModelError(
            f"The experts of the family {family} have parameters without a form here: "
            f"{', '.join(sorted(names ^ expected))}.",
            hint="Pick a model of another family.",
        )
    down = module.down_proj.shape[1:]
    hidden_size, intermediate_size = reversed(down) if module.is_transposed else down
    return ExpertShape(
        hidden_size=int(hidden_size),
        intermediate_size=int(intermediate_size),
        has_gate=bool(module.has_gate),
        has_bias=bool(module.has_bias),
        is_interleaved=bool(module.has_gate and not module.is_concatenated),
    )


class CheckpointExperts:
    """The experts of a checkpoint folder, read one at a time.

    Args:
        folder: The checkpoint.
        shards: Its tensors as they are stored, where not all of its shards are in the folder.

    Attributes:
        folder: The checkpoint.
        config: Its configuration.
        modules: Its MoE layers.
        shards: Its tensors, float however they are stored.
        backbone_keys: Checkpoint keys of everything but the experts, in file order; keys
            that the model has no parameter for (other heads, say) are left out.
        tied_keys: Of these the ones that the configuration says are copies of another, each
            with that other.

    Raises:
        UnsupportedModelError: As `load_config` and `find_expert_modules` say; known from
            the configuration alone, before any weight file is opened.
        CheckpointError: A shard is damaged, or tensors are missing or of another shape.
    """

    def __init__(self, folder: Path, shards: CheckpointShards | None = None) -> None:
        self.folder = folder
        self.config = load_config(folder)
        self._model = meta_model(self.config)
        self.modules = find_expert_modules(self._model)
        self._modules_by_name = dict(expert_modules_of(self._model))
        stored = CheckpointShards(folder) if shards is None else shards
        self.shards = as_float(stored, load_quantisation(folder))
        params = {
            f"{module.name}.{name}": tuple(param.shape)
            for module in self.modules
            for name, param in self._raw(module).named_parameters(recurse=False)
        }
        mapped = tuple(map_keys(self._model, self.shards))
        experts = (each for each in mapped if each[1] in params)
        self._sources = ExpertSources(self._model, params, experts, self.shards, folder)
        self._check_backbone(mapped)
        state = self._model.state_dict()
        keys_of = {target: key for key, target, _ in mapped if target in state}
        backbone = {key for key, target, _ in mapped if target in state and target not in params}
        self.backbone_keys = [key for key in self.shards if key in backbone]
        self.tied_keys = {
            keys_of[copy]: keys_of[original]
            for copy, original in self._model.all_tied_weights_keys.items()
            if copy in keys_of and original in keys_of
        }

    @property
    def num_experts(self) -> int:
        """Experts in each layer."""
        return self.modules[0].num_experts

    @property
    def shape(self) -> ExpertShape:
        """Dimensions of every expert."""
        return self.modules[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the first expert's first matrix in the checkpoint."""
        target = f"{self.modules[0].name}.down_proj"
        return self.shards[self._sources.first_key(target)].dtype

    def load(self, layer: int, expert: int) -> ExpertTensors:
        """Reads one expert, `[out, in]`, in the checkpoint's dtype; nothing else is read.

        A stored form that is not float counts as bfloat16.

        Raises:
            CheckpointError: A shard cannot be read, or a stored scale is nan or infinity.
        """
        module = self.modules[layer]
        if not 0 <= expert < module.num_experts:
            raise IndexError(f"layer {layer} has experts 0 to {module.num_experts - 1}")
        first = "gate_up_proj" if module.shape.has_gate else "up_proj"
        return ExpertTensors(
            up=self._matrix(module, first, expert),
            down=self._matrix(module, "down_proj", expert),
            up_bias=self._bias(module, f"{first}_bias", expert),
            down_bias=self._bias(module, "down_proj_bias", expert),
        )

    def _matrix(self, module: ExpertModule, param: str, expert: int) -> torch.Tensor:
        matrix = self._load_param(module, param, expert)
        return matrix.t().contiguous() if self._raw(module).is_transposed else matrix.contiguous()

    def _bias(self, module: ExpertModule, param: str, expert: int) -> torch.Tensor | None:
        return (
            self._load_param(module, param, expert).contiguous() if module.shape.has_bias else None
        )

    def _raw(self, module: ExpertModule) -> Any:
        return self._modules_by_name[module.name]

    def _load_param(self, module: ExpertModule, param: str, expert: int) -> torch.Tensor:
        return self._sources.read(f"{module.name}.{param}", expert, self.shards.read)

    def _check_backbone(self, mapped: Iterable[tuple[str, str, str | None]]) -> None:
        """Refuses a checkpoint that lacks a weight, or has one of another shape."""
        missing = missing_weights(self._model, mapped)
        if missing:
            raise CheckpointError(
                f"{self.folder} has no tensor for {missing[0]}"
                + (f" and {len(missing) - 1} more weights." if len(missing) > 1 else "."),
                hint="Download the checkpoint again, or pick another one of this model.",
            )
        state = self._model.state_dict()
        for key, target, pattern in mapped:
            found = self.shards[key]
            is_copied = pattern is None and target in state and target not in self._sources
            if is_copied and found.shape != tuple(state[target].shape):
                raise CheckpointError(
                    f"{found.path} holds {key} of shape {found.shape}, the model needs "
                    f"{tuple(state[target].shape)}.",
                    hint="Download this file again, or the whole checkpoint.",
                )
