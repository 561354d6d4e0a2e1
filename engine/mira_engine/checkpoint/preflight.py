"""What a model is and how much room it takes, before any of its weights is here.

Reads `config.json` and, where there is one, the weights' index; the names of tensors may
also come from headers read by range. Says for every tensor whether it is an expert's,
belongs to the rest of the model, or is skipped, and computes sizes from the formats' own
record sizes. Opens no weight file, asks no network.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import CheckpointError, FormatError, MiraError, UnsupportedModelError
from ..types import ExpertShape, Precision
from .architecture import load_config, load_quantisation, meta_model
from .experts import (
    ExpertModule,
    expert_modules_of,
    expert_param_names,
    find_expert_modules,
    map_keys,
    missing_weights,
)
from .formats import make_format
from .quantisation import Quantisation, StoredForm
from .schedule import shard_steps, space_need
from .store import StoreManifest

SPARE_BYTES = 16 << 20
"""Room kept beyond the files themselves: headers, manifests, the file system's own."""

_QUANTISED = (
    (re.compile(r"_(blocks|scales)$"), ""),
    (re.compile(r"(?<=\.)(activation|input)_scale$"), "weight"),
    (re.compile(r"(?<=\.weight)_scale$|_scale_inv$"), ""),
    (re.compile(r"(?<=\.)(qweight|qzeros|scales|g_idx)$"), "weight"),
)
"""Names that stored quantisations add, and the tensor that they belong to."""

_SKIPPED = re.compile(
    r"(^|\.)(mtp|visual|vision_tower|vision_model|vision_encoder|vision_embed_tokens|embed_vision"
    r"|audio_tower|audio_model|embed_audio|multi_modal_projector|mm_projector)(\.|$)"
    r"|rotary_emb\.inv_freq$"
)
"""Parts beside the text model: heads for several tokens ahead, towers for images and sound."""

_Mapped = tuple[str, str, str | None]
"""A tensor, the parameter it goes to and the mapping's pattern, as of `map_keys`."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class KeyKind(enum.StrEnum):
    """What a checkpoint's tensor is to the engine."""

    EXPERT = "expert"
    BACKBONE = "backbone"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A model's figures.

    Attributes:
        config: Its configuration.
        modules: Its MoE layers; empty where the engine finds none.
        num_parameters: All of them, tied ones once.
        num_expert_parameters: Those of the routed experts.
        weights_bytes: Of all weight files.
        kinds: Number of tensors of each kind; empty where their names are not known.
        problem: Why the engine cannot run the model, `None` where it can.
        layer_shards: For each MoE layer the shards with its experts; empty without names.
        shard_bytes: Of each weight file; empty where not known.
        is_quantised: Whether weights are stored in another form than float.
        shard_parameters: Of each weight file those that are not experts'; files that hold
            none of them, and files without names of tensors, are left out.
    """

    config: PreTrainedConfig
    modules: tuple[ExpertModule, ...]
    num_parameters: int
    num_expert_parameters: int
    weights_bytes: int
    kinds: Mapping[KeyKind, int]
    problem: MiraError | None
    layer_shards: tuple[frozenset[str], ...] = ()
    shard_bytes: Mapping[str, int]
    shard_parameters: Mapping[str, int]
    is_quantised: bool = False

    @property
    def shape(self) -> ExpertShape | None:
        """Dimensions of every expert."""
        return self.modules[0].shape if self.modules else None

    @property
    def num_experts(self) -> int:
        """Experts in each MoE layer."""
        return self.modules[0].num_experts if self.modules else 0

    @property
    def backbone_bytes(self) -> int:
        """Of everything but the experts, as it is kept: in the checkpoint's own float type.

        Quantised weights are kept in bfloat16.
        """
        return (self.num_parameters - self.num_expert_parameters) * self._parameter_bytes

    @property
    def _parameter_bytes(self) -> int:
        if self.is_quantised or not self.num_parameters:
            return 2
        mean = self.weights_bytes / self.num_parameters
        return min((1, 2, 4, 8), key=lambda width: abs(width - mean))

    def store_bytes(self, precision: Precision) -> int:
        """Returns the bytes of one expert store.

        Raises:
            FormatError: The format cannot hold these experts.
        """
        return len(self.modules) * self._layer_bytes(precision)

    def draft_bytes(self, precision: Precision) -> int:
        """Returns the bytes of all draft experts beside a target of `precision`.

        Raises:
            FormatError: No draft format can hold these experts.
        """
        assert self.shape is not None
        has_own = precision in (Precision.NESTED, Precision.INT4)
        fmt = make_format(precision if has_own else Precision.INT4, self.shape)
        assert fmt.draft_plane is not None
        return len(self.modules) * self.num_experts * fmt.record_bytes(fmt.draft_plane)

    def peak_bytes(self, stores: Iterable[Precision]) -> int:
        """Returns the most disk space that download and preparation hold: all is kept."""
        made = sum(self.store_bytes(store) for store in stores)
        return self.weights_bytes + self.backbone_bytes + made + SPARE_BYTES

    def peak_deleting_bytes(self, stores: Iterable[Precision]) -> int | None:
        """Returns the peak if shards come one after another and go once they are used up.

        As preparation does where it deletes what it downloads; see `schedule`. `None` where it
        is not known which shard holds what.
        """
        if not self.layer_shards or not self.shard_bytes:
            return None
        layer_bytes = sum(self._layer_bytes(store) for store in stores)
        need = space_need(
            shard_steps(self.layer_shards, self.shard_parameters),
            shard_bytes=self.shard_bytes,
            backbone_bytes={
                name: number * self._parameter_bytes
                for name, number in self.shard_parameters.items()
            },
            layer_bytes=dict.fromkeys(range(len(self.modules)), layer_bytes),
            here_bytes={},
        )
        return need.whole_bytes + SPARE_BYTES

    def _layer_bytes(self, precision: Precision) -> int:
        assert self.shape is not None
        manifest = StoreManifest.of_format(
            make_format(precision, self.shape),
            num_layers=1,
            num_experts=self.num_experts,
            source="",
            revision="",
        )
        return manifest.total_bytes


def examine(
    folder: Path,
    *,
    keys: Mapping[str, str] | None = None,
    shard_bytes: Mapping[str, int] | None = None,
    weights_bytes: int | None = None,
) -> Preflight:
    """Works out the figures of the model whose `config.json` is in a folder.

    A form that the engine refuses is described as far as it can be, with the reason as
    `problem`; what cannot be described at all is raised.

    Args:
        folder: Holds `config.json`.
        keys: Name of every tensor and of the file that holds it.
        shard_bytes: Length of every weight file.
        weights_bytes: Of all weights, where only their sum is known.

    Raises:
        UnknownModelError: There is no `config.json`.
        CheckpointError: `config.json` cannot be read.
        UnsupportedModelError: The family is unknown, dense, needs code of its own, or keeps
            its experts where the engine does not find them.
    """
    figures = figures_of(
        load_config(folder, is_quantised_read=True),
        quantisation=load_quantisation(folder),
        keys=keys,
        shard_bytes=shard_bytes,
        weights_bytes=weights_bytes,
    )
    try:
        load_config(folder)
    except UnsupportedModelError as error:
        return replace(figures, problem=error)
    return figures


def figures_of(
    config: PreTrainedConfig,
    *,
    quantisation: Quantisation | None = None,
    keys: Mapping[str, str] | None = None,
    shard_bytes: Mapping[str, int] | None = None,
    weights_bytes: int | None = None,
) -> Preflight:
    """As `examine`, from a configuration that was read before.

    Raises:
        UnsupportedModelError: As `examine` says.
    """
    model = meta_model(config)
    modules = find_expert_modules(model)
    sizes = dict(shard_bytes or {})
    routed = {id(p) for _, module in expert_modules_of(model) for p in module.parameters()}
    parameters = {id(p): p.numel() for p in model.parameters()}
    num_parameters = sum(parameters.values())
    num_routed = sum(n for key, n in parameters.items() if key in routed)
    mapped = tuple(_mapped(model, keys or ()))
    kinds = Counter(kind for _, kind in _classified(model, mapped))
    whole = weights_bytes if weights_bytes is not None else sum(sizes.values())
    return Preflight(
        config=config,
        modules=modules,
        num_parameters=num_parameters,
        num_expert_parameters=num_routed,
        weights_bytes=whole or _usual_bytes(model, quantisation, num_parameters, num_routed),
        kinds=kinds,
        problem=_unfit_shape(modules[0].shape) or (_gaps(model, mapped) if keys else None),
        layer_shards=_layer_shards(modules, mapped, keys or {}),
        shard_bytes=sizes,
        is_quantised=quantisation is not None,
        shard_parameters=_shard_parameters(model, mapped, keys or {}),
    )


def classify_keys(model: PreTrainedModel, keys: Iterable[str]) -> Iterator[tuple[str, KeyKind]]:
    """Says what each tensor of a checkpoint is.

    Args:
        model: The model on the meta device.
        keys: Tensor names as the checkpoint has them.

    Yields:
        The key as it is in the checkpoint, and its kind.
    """
    yield from _classified(model, _mapped(model, keys))


def _classified(model: PreTrainedModel, mapped: Iterable[_Mapped]) -> Iterator[tuple[str, KeyKind]]:
    experts, state = expert_param_names(model), set(model.state_dict())
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for key, target, _ in mapped:
        layer = _LAYER.search(key)
        if target in experts:
            yield key, KeyKind.EXPERT
        elif target in state:
            yield key, KeyKind.BACKBONE
        elif (
            _SKIPPED.search(key)
            or any(each.search(key) for each in ignored)
            or (num_layers is not None and layer is not None and int(layer[1]) >= num_layers)
            or (key == "lm_head.weight" and model.config.tie_word_embeddings)
        ):
            yield key, KeyKind.SKIPPED
        else:
            yield key, KeyKind.UNKNOWN


def _mapped(model: PreTrainedModel, keys: Iterable[str]) -> Iterator[_Mapped]:
    """As `map_keys`, for keys of stored quantisations as well."""
    plain: dict[str, list[str]] = {}
    for key in keys:
        plain.setdefault(_plain_name(key), []).append(key)
    for name, target, pattern in map_keys(model, plain):
        for key in plain[name]:
            yield key, target, pattern


def _plain_name(key: str) -> str:
    """Returns the name that a tensor, or the one that it belongs to, has in float checkpoints."""
    for pattern, replacement in _QUANTISED:
        key = pattern.sub(replacement, key)
    return key


def _usual_bytes(
    model: PreTrainedModel, quantisation: Quantisation | None, num_parameters: int, num_routed: int
) -> int:
    """Returns about what weight files take whose lengths are not known."""
    num_others = num_parameters - num_routed
    form = quantisation.form if quantisation is not None else None
    if form is StoredForm.MXFP4:
        return num_routed * 17 // 32 + num_others * 2  # 16 bytes and a scale for 32 weights.
    if form is StoredForm.FP8:
        ends = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
        weights = {id(end.weight): end.weight.numel() for end in ends}
        return num_parameters + sum(weights.values())  # The embeddings stay in two bytes.
    return num_parameters * 2


def _unfit_shape(shape: ExpertShape) -> FormatError | None:
    """Returns why no precision can hold the experts, `None` where one can.

    Every precision takes a draft in INT4 or is INT4 itself.
    """
    try:
        make_format(Precision.INT4, shape)
    except FormatError as error:
        return error
    return None


def _gaps(model: PreTrainedModel, mapped: tuple[_Mapped, ...]) -> MiraError | None:
    """Returns what an index lacks, `None` where it names all weights."""
    plain = {_plain_name(key): (target, pattern) for key, target, pattern in mapped}
    counts = Counter(plain.values())
    present = {target for target, _ in counts}
    for name, module in expert_modules_of(model):
        for param, _ in module.named_parameters(recurse=False):
            target = f"{name}.{param}"
            if target not in present:
                return _incomplete(f"no tensors for {target}")
            for (at, pattern), number in counts.items():
                if at == target and pattern and "*" in pattern and number != module.num_experts:
                    return _incomplete(
                        f"{number} experts for {target}, {module.num_experts} expected"
                    )
    missing = missing_weights(model, mapped)
    return _incomplete(f"no tensors for {missing[0]}") if missing else None


def _incomplete(what: str) -> CheckpointError:
    return CheckpointError(
        f"The weights are incomplete: there are {what}.", hint="Pick another model or revision."
    )


def _layer_shards(
    modules: tuple[ExpertModule, ...], mapped: Iterable[_Mapped], keys: Mapping[str, str]
) -> tuple[frozenset[str], ...]:
    layers = {module.name: module.layer for module in modules}
    shards: list[set[str]] = [set() for _ in modules]
    for key, target, _ in mapped:
        layer = layers.get(target.rpartition(".")[0])
        if layer is not None:
            shards[layer].add(keys[key])
    return tuple(frozenset(each) for each in shards) if keys else ()


def _shard_parameters(
    model: PreTrainedModel, mapped: tuple[_Mapped, ...], keys: Mapping[str, str]
) -> dict[str, int]:
    """Returns how many parameters of the backbone each shard holds."""
    state, experts = model.state_dict(), expert_param_names(model)
    targets = {
        key: target for key, target, _ in mapped if target in state and target not in experts
    }
    parts = Counter(targets.values())
    found: Counter[str] = Counter()
    for key, target in targets.items():
        found[keys[key]] += state[target].numel() // parts[target]
    return dict(found)
