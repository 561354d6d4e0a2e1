"""Which modules of a model are routed experts, and which bytes of a checkpoint are which.

Owns the knowledge of transformers' experts interface (the flags its decorator puts on a
module) and of its checkpoint key mapping. `find_expert_modules` looks at a model on the
meta device, `CheckpointExperts` reads one expert at a time from disk. Both build on
transformers internals (`core_model_loading`, `conversion_mapping`) that have a contract
test. Runs in any thread; holds no open file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from ..errors import CheckpointError, UnsupportedModelError
from ..types import ExpertShape
from .architecture import load_config, meta_model
from .formats import ExpertTensors
from .shards import CheckpointShards

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
_NUM_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_EXPERT_OPS = (MergeModulelist, Concatenate, Transpose, Interleave)
"""Conversions that treat experts one by one, so that one expert can pass through alone."""


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
    """Returns the names of all parameters of routed experts."""
    return {
        f"{name}.{param}"
        for name, module in expert_modules_of(model)
        for param, _ in module.named_parameters()
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
    names = {name for name, _ in module.named_parameters()}
    if names != expected or getattr(module, "has_post_expert_norm", False):
        raise UnsupportedModelError(
            f"The experts of the family {family} have parameters without a form here: "
            f"{', '.join(sorted(names - expected)) or 'a norm'}.",
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


@dataclass(slots=True)
class _Source:
    """Checkpoint keys of one expert parameter, by the pattern of the family's mapping."""

    converter: WeightConverter | None
    keys: dict[str, list[str]]


class CheckpointExperts:
    """The experts of a checkpoint folder, read one at a time.

    Args:
        folder: The checkpoint.
        shards: Its tensors, where not all of its shards are in the folder.

    Attributes:
        folder: The checkpoint.
        config: Its configuration.
        modules: Its MoE layers.
        shards: Its tensors.
        backbone_keys: Checkpoint keys of everything but the experts, in file order; keys
            that the model has no parameter for (other heads, say) are left out.

    Raises:
        UnsupportedModelError: As `load_config` and `find_expert_modules` say; known from
            the configuration alone, before any weight file is opened.
        CheckpointError: A shard is damaged, or an expert's tensors are missing.
    """

    def __init__(self, folder: Path, shards: CheckpointShards | None = None) -> None:
        self.folder = folder
        self.config = load_config(folder)
        self._model = meta_model(self.config)
        self.modules = find_expert_modules(self._model)
        self._modules_by_name = dict(expert_modules_of(self._model))
        self.shards = CheckpointShards(folder) if shards is None else shards
        self._sources: dict[str, _Source] = {}
        self.backbone_keys = self._map_keys()
        for module in self.modules:
            for param in self._param_names(module):
                self._check_source(module, f"{module.name}.{param}")

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
        return self.shards[next(iter(self._sources[target].keys.values()))[0]].dtype

    def load(self, layer: int, expert: int) -> ExpertTensors:
        """Reads one expert, `[out, in]`, in the checkpoint's dtype; nothing else is read.

        Raises:
            CheckpointError: A shard cannot be read.
            UnsupportedModelError: The family's mapping gives another shape than the model's.
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

    def _param_names(self, module: ExpertModule) -> list[str]:
        return [name for name, _ in self._raw(module).named_parameters()]

    def _load_param(self, module: ExpertModule, param: str, expert: int) -> torch.Tensor:
        """Runs the family's own conversion on one expert's tensors: `[a, b]` or `[n]`."""
        target = f"{module.name}.{param}"
        source = self._sources[target]
        expected = tuple(getattr(self._raw(module), param).shape[1:])
        if source.converter is None:
            (key,) = next(iter(source.keys.values()))
            value = self.shards.read(key, row=expert)
        else:
            converter = deepcopy(source.converter)
            for pattern, keys in source.keys.items():
                if "*" in pattern:
                    key, tensor = keys[expert], self.shards.read(keys[expert])
                else:
                    key, tensor = keys[0], self.shards.read(keys[0], row=expert)
                converter.add_tensor(target, key, pattern, tensor)
            value = converter.convert(target, model=self._model, config=self.config)[target]
        if tuple(value.shape) != (1, *expected):
            raise UnsupportedModelError(
                f"Experts of this {self.config.model_type} checkpoint cannot be read one by one: "
                f"{target} gives {tuple(value.shape)}, expected {(1, *expected)}.",
                hint="Pick a model of another family.",
            )
        return value[0]

    def _map_keys(self) -> list[str]:
        """Sorts every checkpoint key into experts' sources and the backbone."""
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        state = self._model.state_dict()
        expert_params = expert_param_names(self._model)
        backbone = set()
        for key, target, pattern in map_keys(self._model, self.shards):
            if target in expert_params:
                converter = by_pattern[pattern] if pattern is not None else None
                source = self._sources.setdefault(target, _Source(converter=converter, keys={}))
                source.keys.setdefault(pattern or key, []).append(key)
            elif target in state:
                backbone.add(key)
        for source in self._sources.values():
            for pattern, keys in source.keys.items():
                if "*" in pattern:
                    source.keys[pattern] = _by_expert(pattern, keys, renamings)
        return [key for key in self.shards if key in backbone]

    def _check_source(self, module: ExpertModule, target: str) -> None:
        source = self._sources.get(target)
        if source is None:
            raise CheckpointError(
                f"{self.folder} has no tensors for {target}.", hint="Download the checkpoint again."
            )
        if source.converter is not None:
            self._check_converter(source, target)
        for pattern, keys in source.keys.items():
            if source.converter is not None and "*" in pattern:
                if len(keys) != module.num_experts:
                    raise CheckpointError(
                        f"{self.folder} has {len(keys)} experts for {target}, "
                        f"{module.num_experts} expected.",
                        hint="Download the checkpoint again.",
                    )
            elif len(keys) != 1 or self.shards[keys[0]].shape[:1] != (module.num_experts,):
                raise CheckpointError(
                    f"{self.shards[keys[0]].path} holds no tensor of {module.num_experts} experts "
                    f"for {target}.",
                    hint="Download the checkpoint again.",
                )

    def _check_converter(self, source: _Source, target: str) -> None:
        converter = source.converter
        assert converter is not None
        if not all(isinstance(op, _PER_EXPERT_OPS) for op in converter.operations):
            raise UnsupportedModelError(
                f"The family {self.config.model_type} mixes experts with one another when it "
                "loads, so they cannot be read one by one.",
                hint="Pick a model of another family.",
            )
        missing = [name for name in converter.source_patterns if name not in source.keys]
        if missing:
            raise CheckpointError(
                f"{self.folder} has no {missing[0]} for {target}.",
                hint="Download the checkpoint again.",
            )
        # A transposition that looks at the whole parameter's shape is decided here, once,
        # because a single expert's slice never equals it.
        if any(isinstance(op, Transpose) and op.check_dims for op in converter.operations):
            (keys,) = source.keys.values()
            if self.shards[keys[0]].shape == tuple(self._model.get_parameter(target).shape):
                source.converter = None


def _by_expert(pattern: str, keys: Iterable[str], renamings: list[WeightRenaming]) -> list[str]:
    """Orders per-expert keys by the index in them and asserts 0..E-1, each once."""
    expression = re.compile(pattern.replace("*.", r"(?P<expert>\d+)\."))
    numbered: dict[int, str] = {}
    for key in keys:
        match = expression.search(apply_renamings(key, renamings))
        if match is None or int(match["expert"]) in numbered:
            raise CheckpointError(f"The expert of the tensor {key} is not clear.")
        numbered[int(match["expert"])] = key
    for expected, found in enumerate(sorted(numbered)):
        if expected != found:
            raise CheckpointError(
                f"Expert {expected} is missing beside {numbered[found]}.",
                hint="Download the checkpoint again.",
            )
    return [numbered[index] for index in sorted(numbered)]
