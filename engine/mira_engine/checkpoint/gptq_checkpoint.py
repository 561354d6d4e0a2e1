"""Experts of a checkpoint that was quantised by GPTQ, as codes and scales.

Such a checkpoint is the source of a draft beside the float model: its codes are kept as
they are. Reads one expert at a time, with the family's own key mapping and conversions,
which the codes and the scales go through alike. Runs in any thread; holds no open file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsupportedModelError
from ..types import ExpertShape
from .architecture import load_config, load_quantisation, meta_model
from .dequantise import unpack_gptq_codes, unpack_gptq_zeros
from .expert import ExpertTensors
from .expert_sources import ExpertSources
from .experts import ExpertModule, expert_modules_of, find_expert_modules, map_keys
from .quantisation import Quantisation, StoredForm
from .quantised_expert import QuantisedExpert
from .shards import CheckpointShards, TensorLocation

_BITS = 4
_CODES_PER_WORD = 32 // _BITS
_MIDDLE = 1 << (_BITS - 1)
"""The stored code that stands for 0 where quantisation is symmetric."""

_WEIGHT, _CODES, _SCALES, _ZEROS, _ORDER = ".weight", ".qweight", ".scales", ".qzeros", ".g_idx"
_DAMAGED = "Download the checkpoint again."
_OTHER_DRAFT = "Make the draft from the float weights instead."


class GptqExperts:
    """The experts of a GPTQ checkpoint folder, read one at a time.

    Attributes:
        folder: The checkpoint.
        modules: Its MoE layers.
        shards: Its tensors, as they are stored.
        group_size: Inputs that share a scale, as `load` gives them.

    Raises:
        UnknownModelError: The folder has no `config.json`.
        UnsupportedModelError: It is no GPTQ checkpoint, or of a kind whose codes have no form
            here: other than 4 bits, not symmetric, inputs in another order, or biases in the
            experts.
        CheckpointError: A shard is damaged, or an expert's tensors are missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = load_config(folder, is_quantised_read=True)
        quantisation = _checked(folder, load_quantisation(folder))
        self._zero = _stored_zero(quantisation)
        self._stored_group = _stored_group(folder, quantisation)
        self._model = meta_model(config)
        self.modules = find_expert_modules(self._model)
        self._raw_modules = dict(expert_modules_of(self._model))
        if self.shape.has_bias or any(raw.is_transposed for raw in self._raw_modules.values()):
            raise UnsupportedModelError(
                f"Experts of the family {config.model_type} are biased or transposed, which GPTQ "
                "checkpoints keep in no one form.",
                hint=_OTHER_DRAFT,
            )
        self.shards = CheckpointShards(folder)
        weights = self._weights()
        params = {
            f"{module.name}.{name}": tuple(param.shape)
            for module in self.modules
            for name, param in self._raw_modules[module.name].named_parameters(recurse=False)
        }
        mapped = (each for each in map_keys(self._model, weights) if each[1] in params)
        self._sources = ExpertSources(self._model, params, mapped, weights, folder)
        self.group_size = self._find_group()
        self.load(0, 0)

    @property
    def num_experts(self) -> int:
        """Experts in each layer."""
        return self.modules[0].num_experts

    @property
    def shape(self) -> ExpertShape:
        """Dimensions of every expert."""
        return self.modules[0].shape

    def load(self, layer: int, expert: int) -> QuantisedExpert:
        """Reads one expert's codes and scales; the codes are the checkpoint's own.

        Raises:
            CheckpointError: A tensor cannot be read or does not fit the others.
            UnsupportedModelError: This expert is not symmetric, or its inputs are in another
                order.
        """
        module = self.modules[layer]
        if not 0 <= expert < module.num_experts:
            raise IndexError(f"layer {layer} has experts 0 to {module.num_experts - 1}")
        up, down = self._param_names(module)
        return QuantisedExpert(
            up_codes=self._load_param(module, up, expert, self._read_codes, 1),
            up_scales=self._load_param(module, up, expert, self._read_scales, self.group_size),
            down_codes=self._load_param(module, down, expert, self._read_codes, 1),
            down_scales=self._load_param(module, down, expert, self._read_scales, self.group_size),
            group_size=self.group_size,
        )

    def load_float(self, layer: int, expert: int) -> ExpertTensors:
        """Reads one expert's values, float32 `[out, in]`.

        Raises:
            CheckpointError: As `load` says.
            UnsupportedModelError: As `load` says.
        """
        found = self.load(layer, expert)
        return ExpertTensors(
            up=_values(found.up_codes, found.up_scales, found.group_size),
            down=_values(found.down_codes, found.down_scales, found.group_size),
        )

    def _param_names(self, module: ExpertModule) -> tuple[str, str]:
        return ("gate_up_proj" if module.shape.has_gate else "up_proj"), "down_proj"

    def _load_param(
        self,
        module: ExpertModule,
        param: str,
        expert: int,
        read: Callable[[str], Tensor],
        inputs_together: int,
    ) -> Tensor:
        """Returns `[out, in / inputs_together]` of one expert's matrix."""
        rows, columns = getattr(self._raw_modules[module.name], param).shape[1:]
        expected = (rows, columns // inputs_together)

        def read_one(key: str, row: int | None = None) -> Tensor:
            return read(key)

        return self._sources.read(f"{module.name}.{param}", expert, read_one, expected).contiguous()

    def _weights(self) -> dict[str, TensorLocation]:
        """The matrices that are stored as codes, by the keys they would have as float ones."""
        found: dict[str, TensorLocation] = {}
        for key, where in self.shards.items():
            if not key.endswith(_CODES):
                continue
            if where.dtype is not torch.int32 or len(where.shape) != 2:
                raise UnsupportedModelError(
                    f"{where.path} holds {key} in another form than words of eight codes.",
                    hint=_OTHER_DRAFT,
                )
            words, num_outputs = where.shape
            shape = (num_outputs, words * _CODES_PER_WORD)
            found[key.removesuffix(_CODES) + _WEIGHT] = replace(where, shape=shape)
        return found

    def _find_group(self) -> int:
        """The stored group where it divides both matrices' inputs, else our own within it."""
        inputs = (self.shape.hidden_size, self.shape.intermediate_size)
        stored = self._stored_group
        if stored is not None and all(size % stored == 0 for size in inputs):
            return stored
        own = self.shape.int4_group_size
        if own is None or (stored is not None and stored % own):
            raise UnsupportedModelError(
                f"Codes by groups of {stored or 'whole rows'} have no form for experts with "
                f"{inputs[0]} and {inputs[1]} inputs.",
                hint=_OTHER_DRAFT,
            )
        return own

    def _read_codes(self, key: str) -> Tensor:
        """Reads a matrix's codes, int8 `[N, K]`, -8 to 7, and checks what they stand for."""
        name = key.removesuffix(_WEIGHT)
        codes = unpack_gptq_codes(self.shards.read(name + _CODES))
        self._check_zeros(name)
        self._check_order(name, codes.shape[1])
        return codes - _MIDDLE

    def _read_scales(self, key: str) -> Tensor:
        """Reads a matrix's scales, float32 `[N, K / group_size]`."""
        name = key.removesuffix(_WEIGHT)
        num_outputs, num_inputs = self._matrix_shape(name)
        stored = self._stored_group or num_inputs
        where = self._location(name + _SCALES)
        expected = (-(-num_inputs // stored), num_outputs)
        if where.shape != expected:
            raise CheckpointError(
                f"{where.path} holds {name}{_SCALES} of shape {where.shape}, {expected} expected.",
                hint=_DAMAGED,
            )
        scales = self.shards.read(name + _SCALES).to(torch.float32).t()
        if not bool(torch.isfinite(scales).all()):
            raise CheckpointError(
                f"{where.path} holds nan or infinity in the scales {name}{_SCALES}.", hint=_DAMAGED
            )
        starts = torch.arange(0, num_inputs, self.group_size)
        return scales[:, starts // stored]

    def _check_zeros(self, name: str) -> None:
        where = self.shards.get(name + _ZEROS)
        if where is None:
            return  # A symmetric checkpoint may leave them out.
        if where.dtype is not torch.int32 or len(where.shape) != 2:
            raise CheckpointError(
                f"{where.path} holds {name}{_ZEROS} of {where.dtype} {where.shape}, words of eight "
                "expected.",
                hint=_DAMAGED,
            )
        if bool((unpack_gptq_zeros(self.shards.read(name + _ZEROS)) != self._zero).any()):
            raise UnsupportedModelError(
                f"{where.path} holds {name} with zero points of its own, and only symmetric codes "
                "are read.",
                hint=_OTHER_DRAFT,
            )

    def _check_order(self, name: str, num_inputs: int) -> None:
        where = self.shards.get(name + _ORDER)
        if where is None:
            return
        stored = self._stored_group or num_inputs
        order = self.shards.read(name + _ORDER)
        if not torch.equal(order.long(), torch.arange(num_inputs) // stored):
            raise UnsupportedModelError(
                f"{where.path} holds {name} with its inputs in another order (desc_act), and only "
                "groups of neighbours are read.",
                hint=_OTHER_DRAFT,
            )

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        words, num_outputs = self._location(name + _CODES).shape
        return num_outputs, words * _CODES_PER_WORD

    def _location(self, key: str) -> TensorLocation:
        where = self.shards.get(key)
        if where is None:
            raise CheckpointError(f"{self.folder} has no tensor {key}.", hint=_DAMAGED)
        return where


def _checked(folder: Path, quantisation: Quantisation | None) -> Quantisation:
    """Refuses a checkpoint whose configuration says that its codes have no form here."""
    if quantisation is None or quantisation.form is not StoredForm.GPTQ:
        found = "float" if quantisation is None else f"quantised with {quantisation.method}"
        raise UnsupportedModelError(
            f"{folder} is {found}, and a draft is read from gptq checkpoints only.",
            hint=_OTHER_DRAFT,
        )
    bits, layout = quantisation.fields.get("bits"), _layout_of(quantisation)
    reason = None
    if bits != _BITS:
        reason = f"of {bits} bits, and only {_BITS} are read"
    elif quantisation.fields.get("sym") is False:
        reason = "with zero points of their own, and only symmetric ones are read"
    elif layout not in ("gptq", "gptq_v2"):
        reason = f"in the order of {layout}, and only GPTQ's own is read"
    if reason is not None:
        raise UnsupportedModelError(f"{folder} has GPTQ codes {reason}.", hint=_OTHER_DRAFT)
    return quantisation


def _layout_of(quantisation: Quantisation) -> str:
    return str(quantisation.fields.get("checkpoint_format") or "gptq")


def _stored_zero(quantisation: Quantisation) -> int:
    """Returns what is stored as the zero point of symmetric codes.

    The first version of the format stores one less than the zero point.
    """
    return _MIDDLE - 1 if _layout_of(quantisation) == "gptq" else _MIDDLE


def _stored_group(folder: Path, quantisation: Quantisation) -> int | None:
    """Returns the inputs that share a stored scale; `None` where a row has one scale."""
    group = quantisation.fields.get("group_size", -1)
    if not isinstance(group, int) or group == 0 or group < -1:
        raise CheckpointError(
            f"{folder / 'config.json'} has no usable group_size: {group!r}.", hint=_DAMAGED
        )
    return None if group == -1 else group


def _values(codes: Tensor, scales: Tensor, group_size: int) -> Tensor:
    return codes * scales.repeat_interleave(group_size, dim=1)
