"""Which tensors of a checkpoint make one expert, and the family's own way to put them together.

Takes keys that were led through transformers' mapping, and gives one expert's part of a
parameter by running the family's conversion on that expert's tensors alone. Who reads the
tensors, and what they hold (values, or codes, or scales), is left to the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
)

from ..errors import CheckpointError, UnsupportedModelError
from .shards import TensorLocation

_PER_EXPERT_OPS = (MergeModulelist, Concatenate, Transpose, Interleave)
"""Conversions that treat experts one by one, so that one expert can pass through alone."""
_DAMAGED = "Download the checkpoint again."


class ReadTensor(Protocol):
    """Reads a tensor by its key, or with `row` only `tensor[row : row + 1]`."""

    def __call__(self, key: str, row: int | None = None) -> torch.Tensor:
        """Reads it."""
        ...


@dataclass(slots=True)
class _Source:
    """Checkpoint keys of one expert parameter, by the pattern of the family's mapping."""

    converter: WeightConverter | None
    keys: dict[str, list[str]]


class ExpertSources:
    """The sources of every parameter of the routed experts.

    Args:
        model: The model on the meta device.
        params: Names of all parameters of routed experts, with their shapes `[E, ...]`.
        mapped: Keys of experts' tensors as `map_keys` gives them: key, parameter, pattern.
        tensors: Where each tensor is, and its shape.
        folder: The checkpoint, for messages.

    Raises:
        CheckpointError: An expert's tensors are missing, not clear, or of another shape than
            the model's.
        UnsupportedModelError: The family mixes experts with one another when it loads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        params: Mapping[str, tuple[int, ...]],
        mapped: Iterable[tuple[str, str, str | None]],
        tensors: Mapping[str, TensorLocation],
        folder: Path,
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._folder = folder
        self._shapes = params
        self._sources: dict[str, _Source] = {}
        self._collect(mapped)
        for target, shape in params.items():
            self._check_source(target, shape[0])
            self._check_shapes(target)

    def __contains__(self, target: str) -> bool:
        return target in self._sources

    def first_key(self, target: str) -> str:
        """Returns the first tensor that a parameter is made of."""
        return next(iter(self._sources[target].keys.values()))[0]

    def keys_of(self, target: str, expert: int) -> list[str]:
        """Returns the tensors that hold one expert's part of a parameter."""
        source = self._sources[target]
        return [
            keys[expert] if "*" in pattern else keys[0] for pattern, keys in source.keys.items()
        ]

    def read(
        self, target: str, expert: int, read: ReadTensor, expected: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Runs the family's own conversion on one expert's tensors.

        Args:
            target: Name of the parameter.
            expert: Which expert.
            read: Gives the tensors.
            expected: Shape of the result, `[a, b]` or `[n]`; `None` is the parameter's own.

        Raises:
            CheckpointError: A tensor cannot be read, or has another shape than the model's.
        """
        source = self._sources[target]
        expected = self._shapes[target][1:] if expected is None else expected
        if source.converter is None:
            value = read(self.first_key(target), expert)
        else:
            converter = deepcopy(source.converter)
            for pattern, keys in source.keys.items():
                if "*" in pattern:
                    key, tensor = keys[expert], read(keys[expert])
                else:
                    key, tensor = keys[0], read(keys[0], expert)
                converter.add_tensor(target, key, pattern, tensor)
            value = self._convert(converter, target, expert)
        if tuple(value.shape) != (1, *expected):
            raise self._unfit(target, expert, f"give {tuple(value.shape[1:])}, not {expected},")
        return value[0]

    def _convert(self, converter: WeightConverter, target: str, expert: int) -> torch.Tensor:
        try:
            made = converter.convert(target, model=self._model, config=self._model.config)
        except RuntimeError as error:  # torch, of shapes that cannot be stacked or joined
            raise self._unfit(target, expert, "cannot be joined") from error
        return made[target]

    def _unfit(self, target: str, expert: int, what: str) -> CheckpointError:
        keys = self.keys_of(target, expert)
        shapes = ", ".join(f"{key} of shape {self._tensors[key].shape}" for key in keys)
        return CheckpointError(
            f"{self._tensors[keys[0]].path} holds {shapes}, which {what} for {target}.",
            hint=_DAMAGED,
        )

    def _collect(self, mapped: Iterable[tuple[str, str, str | None]]) -> None:
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        for key, target, pattern in mapped:
            converter = by_pattern[pattern] if pattern is not None else None
            source = self._sources.setdefault(target, _Source(converter=converter, keys={}))
            source.keys.setdefault(pattern or key, []).append(key)
        for source in self._sources.values():
            for pattern, keys in source.keys.items():
                if "*" in pattern:
                    source.keys[pattern] = _by_expert(pattern, keys, renamings)

    def _check_source(self, target: str, num_experts: int) -> None:
        source = self._sources.get(target)
        if source is None:
            raise CheckpointError(f"{self._folder} has no tensors for {target}.", hint=_DAMAGED)
        if source.converter is not None:
            self._check_converter(source, target)
        for pattern, keys in source.keys.items():
            if source.converter is not None and "*" in pattern:
                if len(keys) != num_experts:
                    raise CheckpointError(
                        f"{self._folder} has {len(keys)} experts for {target}, "
                        f"{num_experts} expected.",
                        hint=_DAMAGED,
                    )
            elif len(keys) != 1 or self._tensors[keys[0]].shape[:1] != (num_experts,):
                raise CheckpointError(
                    f"{self._tensors[keys[0]].path} holds no tensor of {num_experts} experts "
                    f"for {target}.",
                    hint=_DAMAGED,
                )

    def _check_shapes(self, target: str) -> None:
        """Runs the conversion without values, and compares all experts with the first."""

        def without_values(key: str, row: int | None = None) -> torch.Tensor:
            shape = self._tensors[key].shape
            return torch.empty(shape if row is None else (1, *shape[1:]), device="meta")

        self.read(target, 0, without_values)
        for keys in self._sources[target].keys.values():
            expected = self._tensors[keys[0]].shape
            for expert, key in enumerate(keys):
                if self._tensors[key].shape != expected:
                    raise self._unfit(target, expert, f"differ from {keys[0]} of {expected}")

    def _check_converter(self, source: _Source, target: str) -> None:
        converter = source.converter
        assert converter is not None
        if not all(isinstance(op, _PER_EXPERT_OPS) for op in converter.operations):
            raise UnsupportedModelError(
                f"The family {self._model.config.model_type} mixes experts with one another when "
                "it loads, so they cannot be read one by one.",
                hint="Pick a model of another family.",
            )
        missing = [name for name in converter.source_patterns if name not in source.keys]
        if missing:
            raise CheckpointError(
                f"{self._folder} has no {missing[0]} for {target}.", hint=_DAMAGED
            )
        # A transposition that looks at the whole parameter's shape is decided here, once,
        # because a single expert's slice never equals it.
        if any(isinstance(op, Transpose) and op.check_dims for op in converter.operations):
            (keys,) = source.keys.values()
            if self._tensors[keys[0]].shape == tuple(self._model.get_parameter(target).shape):
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
                hint=_DAMAGED,
            )
    return [numbered[index] for index in sorted(numbered)]
