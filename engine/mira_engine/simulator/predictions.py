"""What is expected of layers that the pass has not reached, by whom.

Stand-ins for systems whose own predictors need hidden states: each sees routing only. A
predictor is told a layer's choices as the pass gets there and answers with what to fetch.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np

from .executor import Prediction
from .workload import Demand, Ids, TokenTrace, blurred, demand_of


class Predictor(Protocol):
    """Says which experts later layers of this pass will want."""

    def start_reply(self) -> None:
        """A new text begins."""

    def predict(self, layer: int, target: Ids) -> Prediction:
        """Answers for a pass that has just routed `layer`.

        Args:
            layer: MoE layer.
            target: Choices of the whole pass; only a stand-in for a guess made with hidden
                states may look behind `layer`.
        """
        ...


class NextLayerGuess:
    """The next layer's router applied one layer early, as Mixtral-Offloading does.

    Args:
        fidelity: Share of the next layer's experts that the guess finds.
        num_experts: Routed experts of a layer.
        seed: The same seed gives the same guesses.
    """

    def __init__(self, *, fidelity: float, num_experts: int, seed: int = 0) -> None:
        self._fidelity = fidelity
        self._num_experts = num_experts
        self._rng = np.random.default_rng(seed)

    def start_reply(self) -> None:
        """Nothing is kept between texts."""

    def predict(self, layer: int, target: Ids) -> Prediction:
        """Guesses the next layer."""
        if layer + 1 == len(target):
            return {}
        rows = np.asarray(target[layer + 1])
        guess = blurred(self._rng, rows, self._fidelity, self._num_experts)
        return {layer + 1: demand_of(guess.tolist())}


class CountTable:
    """How often experts of layer i went with experts of layer i + 2; Mira's lead, no network.

    Args:
        trained_on: Routing that is counted.
        num_fetched: Experts named for a token; `None` for top-k.
    """

    def __init__(self, trained_on: TokenTrace, *, num_fetched: int | None = None) -> None:
        ids = trained_on.ids.astype(np.int64)
        _, num_layers, top_k = ids.shape
        size = trained_on.num_experts
        self._num_fetched = num_fetched or top_k
        self._tables = np.zeros((max(0, num_layers - 2), size, size))
        for layer, table in enumerate(self._tables):
            for i in range(top_k):
                for j in range(top_k):
                    np.add.at(table, (ids[:, layer, i], ids[:, layer + 2, j]), 1)

    def start_reply(self) -> None:
        """Nothing is kept between texts."""

    def predict(self, layer: int, target: Ids) -> Prediction:
        """Names layer i + 2's likeliest experts for each token, ties by expert id."""
        if layer >= len(self._tables):
            return {}
        chosen = [
            np.argsort(-self._tables[layer][list(row)].sum(axis=0), kind="stable")
            for row in target[layer]
        ]
        rows = [order[: self._num_fetched].tolist() for order in chosen]
        return {layer + 2: demand_of(rows)}


class ActivationTraces:
    """Texts seen before, matched by how this text has used experts so far.

    The next layer's experts are those that the most similar text used there most.

    Source: MoE-Infinity, sequence-level activation tracing; its clusters of traces are
    whole texts here, and priorities of layers further ahead are left out.

    Args:
        trained_on: Texts to match with.
        num_fetched: Experts named for a layer; `None` for top-k.
    """

    def __init__(self, trained_on: TokenTrace, *, num_fetched: int | None = None) -> None:
        _, num_layers, top_k = trained_on.ids.shape
        self._num_fetched = num_fetched or top_k
        self._shape = (num_layers, trained_on.num_experts)
        starts = np.cumsum([0, *trained_on.lengths])
        texts = [
            self._usage(trained_on.ids[start:end]) for start, end in itertools.pairwise(starts)
        ]
        self._texts = np.stack(texts)
        flat = self._texts.reshape(len(texts), -1)
        self._directions = flat / np.linalg.norm(flat, axis=1, keepdims=True)
        self._now = np.zeros(self._shape)
        self._order = self._orders(0)

    def _usage(self, ids: np.ndarray) -> np.ndarray:
        usage = np.zeros(self._shape)
        for layer in range(self._shape[0]):
            np.add.at(usage[layer], ids[:, layer].reshape(-1), 1)
        return usage

    def _orders(self, text: int) -> list[Demand]:
        """Returns by layer what the text used most, with a descending weight."""
        best = np.argsort(-self._texts[text], axis=1, kind="stable")[:, : self._num_fetched]
        size = best.shape[1]
        return [
            sorted((expert, size - rank) for rank, expert in enumerate(row))
            for row in best.tolist()
        ]

    def start_reply(self) -> None:
        """Forgets how the text before used experts."""
        self._now[:] = 0

    def predict(self, layer: int, target: Ids) -> Prediction:
        """Names the next layer's experts; matches anew at the first layer of a pass."""
        if layer == 0:
            self._order = self._orders(int(np.argmax(self._directions @ self._now.reshape(-1))))
        for row in target[layer]:
            self._now[layer, list(row)] += 1
        return {layer + 1: self._order[layer + 1]} if layer + 1 < len(target) else {}
