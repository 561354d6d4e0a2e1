"""The catalog of chat models: what is known of each before it is downloaded."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogModel:
    """One model of `models.toml`.

    Attributes:
        repo: Its name on the hub, `owner/name`.
        title: For people.
        about: One line on what it is good for, or not.
        total_billions: Parameters, in 10^9.
        active_billions: Of those, used for one token.
        num_layers: Layers in all; `num_dense_layers` of them have no experts.
        num_experts: Routed experts of a layer, of which a token uses `top_k`.
        hidden_size: Width of the model, C.
        expert_width: Hidden units of a routed expert, R.
        num_shared_experts: Experts that every token uses.
        has_bias: Whether experts have biases.
        download_bytes: Weights as they are published.
        context_tokens: Tokens it was trained to read, `None` where that was not checked.
        licence: As others state it, `None` where that was not found.
        is_verified: Whether shape and context were compared with the published `config.json`
            of the model, or of the base it was tuned from.
        config: Fields of `config.json` that a plan needs; empty where they are not known.
    """

    repo: str
    title: str
    about: str
    total_billions: float
    active_billions: float
    num_layers: int
    num_dense_layers: int = 0
    num_experts: int
    top_k: int
    hidden_size: int
    expert_width: int
    num_shared_experts: int
    has_bias: bool = False
    download_bytes: int
    context_tokens: int | None = None
    licence: str | None = None
    is_verified: bool
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The model type that its configuration names; empty where it is not known."""
        return str(self.config.get("model_type", ""))

    @property
    def num_routed_experts(self) -> int:
        """Routed experts over all layers."""
        return (self.num_layers - self.num_dense_layers) * self.num_experts

    @property
    def expert_weights(self) -> int:
        """Parameters of one routed expert without biases: gate, up and down."""
        return 3 * self.hidden_size * self.expert_width

    @property
    def non_expert_weights(self) -> int:
        """Parameters beside the routed experts, as exact as `total_billions` is."""
        routed = self.num_routed_experts * self.expert_weights
        return max(0, round(self.total_billions * 1e9) - routed)


@functools.cache
def load_models() -> dict[str, CatalogModel]:
    """Reads the catalog, by name in its own order."""
    text = (importlib.resources.files("mira_assets") / "models.toml").read_text(encoding="utf-8")
    return {repo: CatalogModel(repo=repo, **fields) for repo, fields in tomllib.loads(text).items()}
