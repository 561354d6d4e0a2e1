"""Recorded routing: what predictors are trained on, in memory and as files.

A part is one safetensors file with the tokens of a few prompts, written by rename, so a
recording that was stopped goes on behind its last part. The hidden states, which are
most of it, are read one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from ..checkpoint.writing import TensorFileWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """The routing of N tokens in L MoE layers.

    Attributes:
        ids: `[N, L, k]` int16, selected experts.
        weights: `[N, L, k]` float16, their gate weights.
        sequence: `[N]` int32, the prompt that a token belongs to.
        is_reply: `[N]` bool, whether the token was generated.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    sequence: torch.Tensor
    is_reply: torch.Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return self.ids.shape[1]

    @classmethod
    def concatenate(cls, parts: Sequence[RoutingTrace]) -> RoutingTrace:
        """Joins parts in order."""
        return cls(
            ids=torch.cat([part.ids for part in parts]),
            weights=torch.cat([part.weights for part in parts]),
            sequence=torch.cat([part.sequence for part in parts]),
            is_reply=torch.cat([part.is_reply for part in parts]),
        )


class TraceFolder:
    """The parts of one recording.

    Args:
        folder: Where they are; made when the first part is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has_part(self, part: int) -> bool:
        """Whether a part is whole."""
        return self._path(part).exists()

    def write_part(self, part: int, trace: RoutingTrace, hidden: Sequence[torch.Tensor]) -> None:
        """Writes a part.

        Args:
            part: Its number.
            trace: Its tokens' routing.
            hidden: For each layer `[N, C]` float16, the experts' input.

        Raises:
            DiskSpaceError: The disk is full.
            PrepareError: The file cannot be written.
        """
        tensors = {
            "ids": trace.ids,
            "weights": trace.weights,
            "sequence": trace.sequence,
            "is_reply": trace.is_reply,
        } | {_hidden_name(layer): states for layer, states in enumerate(hidden)}
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        with TensorFileWriter(self._path(part), specs) as writer:
            for tensor in tensors.values():
                writer.append(tensor)

    def routing(self) -> RoutingTrace:
        """Returns the routing of all parts."""
        parts = []
        for path in self._paths():
            with safe_open(path, framework="pt") as file:
                parts.append(
                    RoutingTrace(
                        ids=file.get_tensor("ids"),
                        weights=file.get_tensor("weights"),
                        sequence=file.get_tensor("sequence"),
                        is_reply=file.get_tensor("is_reply"),
                    )
                )
        return RoutingTrace.concatenate(parts)

    def hidden(self, layer: int) -> torch.Tensor:
        """Returns one layer's hidden states of all parts: `[N, C]` float32."""
        pieces = []
        for path in self._paths():
            with safe_open(path, framework="pt") as file:
                pieces.append(file.get_tensor(_hidden_name(layer)).float())
        return torch.cat(pieces)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("trace-*.safetensors"))

    def _path(self, part: int) -> Path:
        return self.folder / f"trace-{part:03d}.safetensors"


def _hidden_name(layer: int) -> str:
    return f"hidden.{layer:04d}"
