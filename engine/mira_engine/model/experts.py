"""The registered experts function: how transformers' modules reach our executor.

Any family whose experts use transformers' `ExpertsInterface` calls the function that is
registered here under the name "mira". The interface passes no layer number, so each
experts module is stamped with one, and with the executor it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.integrations.moe import ExpertsInterface

from ..checkpoint.experts import expert_modules_of

EXPERTS_IMPLEMENTATION = "mira"

ExpertsFunction = Callable[
    [torch.nn.Module, int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""`(module, layer, hidden [T, C], top_k_index [T, k], top_k_weights [T, k]) -> [T, C]`."""


def _experts_forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    stamp = module.__dict__["_mira"]
    return stamp[0](module, stamp[1], hidden_states, top_k_index, top_k_weights)


def register() -> None:
    """Makes "mira" a valid value of transformers' `experts_implementation`."""
    ExpertsInterface.register(EXPERTS_IMPLEMENTATION, _experts_forward)


def stamp(model: torch.nn.Module, run: ExpertsFunction) -> int:
    """Connects every experts module of the model to `run`. Returns how many there are."""
    modules = expert_modules_of(model)
    for layer, (_, module) in enumerate(modules):
        module.__dict__["_mira"] = (run, layer)
    return len(modules)


@contextmanager
def only_rows(modules: Sequence[torch.nn.Module], rows: torch.Tensor | None) -> Iterator[None]:
    """Leaves padding out of the experts inside: it loads none and counts for nothing.

    Args:
        modules: Stamped experts modules.
        rows: Tokens that are routed, int64 places in `[T]`; `None` for all. The others'
            experts give 0.
    """
    if rows is None:
        yield
        return
    stamps = [module.__dict__["_mira"] for module in modules]

    def restricted(run: ExpertsFunction) -> ExpertsFunction:
        def run_rows(
            module: torch.nn.Module,
            layer: int,
            hidden: torch.Tensor,
            top_k_index: torch.Tensor,
            top_k_weights: torch.Tensor,
        ) -> torch.Tensor:
            result = torch.zeros_like(hidden)
            result[rows] = run(module, layer, hidden[rows], top_k_index[rows], top_k_weights[rows])
            return result

        return run_rows

    for module, (run, layer) in zip(modules, stamps, strict=True):
        module.__dict__["_mira"] = (restricted(run), layer)
    try:
        yield
    finally:
        for module, before in zip(modules, stamps, strict=True):
            module.__dict__["_mira"] = before
