"""PredictorBank: for every MoE layer what predicts best there, as one file and a manifest.

The manifest is written last, by rename, and names the weights that the traces came from:
a bank of other weights, of another version or damaged is no bank. A bank in use is read
by the engine thread only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from mira_kernels import native
from safetensors import safe_open
from safetensors.torch import load_file

from ..checkpoint.writing import TensorFileWriter, disk_errors, file_sha256, write_json
from ..errors import ConfigError
from .baselines import Predictor, PredictorKind, baseline_from
from .far import FarHead
from .features import pass_features
from .heads import FoldedHead
from .train import LayerChoice

BANK_VERSION = 2
TENSORS_FILE = "predictors.safetensors"
MANIFEST_FILE = "predictors.json"

_FAR = "far."

MAX_TOKENS_APART = 8
"""Most tokens of a pass that are asked one by one, by the native kernel; their shares' mean is
the pass's. Up to here that takes fewer calls of torch than the heads' pooled form (41 a layer),
and it picks better. Measured 2026-11-30 on the built-in model: of what batches of 2, 4 and 8
route, its 4 picks of a layer cover .894, .764 and .717, those of the pooled form .853, .722 and
.684."""

_PICKS_PER_EXPERT = 2
"""Predicted experts for each that a token uses, where nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BankFacts:
    """What a bank was made from and for.

    Attributes:
        revision: Fingerprint of the model's weights.
        recipe: Fingerprint of prompts and settings.
        num_layers: MoE layers of the model.
        num_experts: Experts in each.
        top_k: Experts of a token.
        offset: How many layers ahead is predicted.
    """

    revision: str
    recipe: str
    num_layers: int
    num_experts: int
    top_k: int
    offset: int


class PredictorBank:
    """Predicts the experts of a later layer.

    Args:
        facts: What it was made for.
        choices: The winner of each layer that has one.
        far_heads: Far heads by layer.
        max_picks: Most experts that `predict` returns; `None` for twice the top-k.
    """

    def __init__(
        self,
        facts: BankFacts,
        choices: Mapping[int, LayerChoice],
        far_heads: Mapping[int, FarHead] | None = None,
        *,
        max_picks: int | None = None,
    ) -> None:
        if max_picks is not None and max_picks < 1:
            raise ConfigError.for_field("picks", max_picks, "Give at least 1.")
        self.facts = facts
        self.choices = dict(choices)
        self.far_heads = dict(far_heads or {})
        self.max_picks = min(max_picks or _PICKS_PER_EXPERT * facts.top_k, facts.num_experts)
        self._native_parts: dict[int, tuple[torch.Tensor | None, ...] | None] = {}
        self._predictors: dict[int, Predictor] = {
            layer: choice.predictor for layer, choice in self.choices.items()
        }

    @torch.inference_mode()
    def predict(
        self,
        layer: int,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        *,
        max_picks: int | None = None,
    ) -> list[tuple[int, float]]:
        """Ranks the experts of layer `layer + offset`.

        Args:
            layer: The MoE layer that runs now.
            hidden: `[T, C]`, its experts' input.
            top_k_index: `[T, k]` int64, its experts.
            max_picks: Most experts to return, `None` for the bank's.

        Returns:
            Pairs of expert and expected share of the routed tokens, likeliest first, ties
            by expert id, at most `max_picks`. Empty where the layer has no predictor.
        """
        predictor = self._predictors.get(layer)
        if predictor is None:
            return []
        if hidden.shape[0] <= MAX_TOKENS_APART and hidden.dtype is torch.bfloat16:
            shares = self._native_shares(layer, predictor, hidden, top_k_index)
            if shares is not None:
                ranked = sorted(enumerate(shares), key=lambda pick: -pick[1])
                return ranked[: max_picks or self.max_picks]
        states = hidden if hidden.dtype == torch.float32 else hidden.float()
        if top_k_index.shape[0] == 1:
            logits = predictor.token_logits(states, top_k_index)
        else:
            features = pass_features(states, None, top_k_index, self.facts.num_experts)
            logits = predictor.logits(features)[0]
        shares, experts = torch.sort(torch.softmax(logits, 0), descending=True, stable=True)
        picks = max_picks or self.max_picks
        return list(zip(experts[:picks].tolist(), shares[:picks].tolist(), strict=True))

    @torch.inference_mode()
    def predict_far(
        self, layer: int, hidden: torch.Tensor, min_probability: float
    ) -> list[tuple[int, int, float]]:
        """Returns what all later layers are likely to use, as `FarHead.expect` does.

        Args:
            layer: The MoE layer that runs now.
            hidden: `[T, C]`, its experts' input.
            min_probability: Of a use, below which an expert is left out.

        Returns:
            `(layer, expert, probability)`; empty where the layer has no far head.
        """
        head = self.far_heads.get(layer)
        return [] if head is None else head.expect(hidden, min_probability)

    def _native_shares(
        self, layer: int, predictor: Predictor, hidden: torch.Tensor, top_k_index: torch.Tensor
    ) -> list[float] | None:
        """The tokens' mean shares by the native kernel; `None` where it is not there."""
        if not native.is_loaded():
            return None
        if layer not in self._native_parts:
            make = getattr(predictor, "native_parts", None)
            self._native_parts[layer] = make(top_k_index.shape[1]) if make else None
        parts = self._native_parts[layer]
        if parts is None:
            return None
        predict, num_experts = torch.ops.mira.predict_experts, self.facts.num_experts
        if len(hidden) == 1:
            return predict(hidden, top_k_index, *parts, num_experts).tolist()
        tokens = zip(hidden.split(1), top_k_index.split(1), strict=True)
        shares = [predict(state, experts, *parts, num_experts) for state, experts in tokens]
        return torch.stack(shares).mean(dim=0).tolist()

    # -- on the disk -----------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Writes the tensors, then the manifest.

        Raises:
            DiskSpaceError: The disk is full.
            PrepareError: A file cannot be written.
        """
        tensors = {
            f"{layer:04d}.{name}": tensor
            for layer, choice in sorted(self.choices.items())
            for name, tensor in choice.predictor.tensors().items()
        } | {
            f"{_FAR}{layer:04d}.{name}": tensor
            for layer, head in sorted(self.far_heads.items())
            for name, tensor in head.tensors().items()
        }
        with disk_errors(folder):
            (folder / MANIFEST_FILE).unlink(missing_ok=True)
        sha256 = write_tensors(folder / TENSORS_FILE, tensors, {})
        layers = {
            str(layer): {
                "kind": choice.predictor.kind.value,
                "reason": choice.reason,
                "scores": choice.scores,
            }
            for layer, choice in sorted(self.choices.items())
        }
        write_json(
            folder / MANIFEST_FILE,
            {"version": BANK_VERSION, "sha256": sha256, "facts": asdict(self.facts)}
            | {"layers": layers},
        )

    @classmethod
    def load(
        cls, folder: Path, revision: str, *, max_picks: int | None = None
    ) -> PredictorBank | None:
        """Opens a bank.

        Args:
            folder: Where it was saved.
            revision: Fingerprint of the weights it has to be of.
            max_picks: Most experts that `predict` returns; `None` for twice the top-k.

        Returns:
            `None` where there is none, or it is of other weights or damaged: make it anew.
        """
        try:
            manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
            if manifest["version"] != BANK_VERSION or manifest["facts"]["revision"] != revision:
                return None
            if file_sha256(folder / TENSORS_FILE) != manifest["sha256"]:
                return None
            facts = BankFacts(**manifest["facts"])
            choices = _read_choices(folder / TENSORS_FILE, manifest["layers"])
            far_heads = _read_far_heads(folder / TENSORS_FILE, facts.top_k)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(facts, choices, far_heads, max_picks=max_picks)


def predictors_bytes(folder: Path) -> int:
    """Returns the memory that a folder's predictors take, 0 where there are none.

    What native kernels read of them is made besides: never more than the file has.
    """
    try:
        return 2 * (folder / TENSORS_FILE).stat().st_size
    except OSError:
        return 0


def _read_choices(path: Path, layers: Mapping[str, Mapping[str, object]]) -> dict[int, LayerChoice]:
    tensors: dict[int, dict[str, torch.Tensor]] = {int(layer): {} for layer in layers}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - the file is no mapping
            if key.startswith(_FAR):
                continue
            layer, _, name = key.partition(".")
            # A copy: aligned, so that results are the same as before it was saved, to the bit.
            tensors[int(layer)][name] = file.get_tensor(key).clone()
    return {
        int(layer): LayerChoice(
            predictor=predictor_from(PredictorKind(entry["kind"]), tensors[int(layer)]),
            reason=str(entry["reason"]),
            scores=dict(entry["scores"]),  # type: ignore[call-overload]
        )
        for layer, entry in layers.items()
    }


def _read_far_heads(path: Path, top_k: int) -> dict[int, FarHead]:
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - the file is no mapping
            if key.startswith(_FAR):
                layer, _, name = key.removeprefix(_FAR).partition(".")
                tensors.setdefault(int(layer), {})[name] = file.get_tensor(key).clone()
    return {layer: FarHead(parts, top_k) for layer, parts in tensors.items()}


def predictor_from(kind: PredictorKind, tensors: Mapping[str, torch.Tensor]) -> Predictor:
    """Rebuilds a predictor from what its `tensors` returned."""
    return FoldedHead(tensors) if kind is PredictorKind.HEAD else baseline_from(kind, tensors)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> str:
    """Writes a safetensors file by rename. Returns its SHA-256."""
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorFileWriter(path, specs, metadata={"format": "pt"} | dict(metadata)) as writer:
        for tensor in tensors.values():
            writer.append(tensor)
    return writer.sha256


def save_choice(path: Path, choice: LayerChoice) -> None:
    """Writes one layer's winner: what training has finished when it is stopped."""
    metadata = {
        "kind": choice.predictor.kind.value,
        "reason": choice.reason,
        "scores": json.dumps(choice.scores),
    }
    write_tensors(path, choice.predictor.tensors(), metadata)


def save_far_head(path: Path, head: FarHead | None) -> None:
    """Writes one layer's far head, or that it has none."""
    write_tensors(path, {} if head is None else head.tensors(), {})


def load_far_head(path: Path, top_k: int) -> FarHead | None:
    """Reads what `save_far_head` wrote."""
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    return FarHead(tensors, top_k) if tensors else None


def load_choice(path: Path) -> LayerChoice:
    """Reads what `save_choice` wrote."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        # Copies: a file that is mapped into memory cannot be deleted on Windows.
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    return LayerChoice(
        predictor=predictor_from(PredictorKind(metadata["kind"]), tensors),
        reason=metadata["reason"],
        scores=json.loads(metadata["scores"]),
    )
