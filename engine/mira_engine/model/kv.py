"""State Manager: the authoritative tokens and the KV state that belongs to them.

Draft and target share one transformers cache. Drafting extends it as a scratch, which
`rollback` removes; verification extends it with the candidates, of which `rollback`
removes the rejected ones. The corrected or bonus token is the first uncached input of
the next pass, so `num_cached` is always a target-consistent prefix between passes.

Source: Specter, State Manager.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..errors import GenerationError

RESTARTING_FAMILIES = frozenset({"jamba"})
"""Families whose recurrent layers, in transformers 5.24, begin from an empty state in
every pass of more than one token (their scan takes no initial state)."""


class ReservedLayer(DynamicLayer):
    """A full-attention layer whose keys and values are written in place.

    transformers' own layer joins old and new tensors at every pass: each token copies the
    whole state, and the freed blocks fragment the heap until long prompts hold more than
    was planned. Here room for the whole context is reserved once (the system gives pages
    as they are written) and `keys` and `values` are views of the part in use, so that the
    inherited `crop` only shortens the views.

    Args:
        capacity: Most tokens.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends `[B, H, T, D]` keys and values. Returns all, `[B, H, N, D]` each.

        Raises:
            GenerationError: The context is full.
        """
        if self._room is None:
            self.lazy_initialization(key_states, value_states)
            self._room = (self._reserve(key_states), self._reserve(value_states))
        start = self.keys.shape[-2] if self.keys.numel() else 0
        stop = start + key_states.shape[-2]
        if stop > self._capacity:
            raise GenerationError(
                f"The context of {self._capacity} tokens is full.", hint="Start a new chat."
            )
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:stop] = new
        self.keys, self.values = (room[:, :, :stop] for room in self._room)
        return self.keys, self.values

    def _reserve(self, states: torch.Tensor) -> torch.Tensor:
        batch, num_heads, _, width = states.shape
        return states.new_empty((batch, num_heads, self._capacity, width))


class StateManager:
    """KV state of one conversation on one model.

    Args:
        model: The loaded model; its config decides the cache's layer types.
        capacity: Most tokens of the conversation.
        is_rollback_wanted: Whether caches with bounded state (windows, convolutions)
            keep what a rollback needs.
    """

    def __init__(self, model: PreTrainedModel, *, capacity: int, is_rollback_wanted: bool) -> None:
        self._config = model.config
        self._capacity = capacity
        self._is_recording = is_rollback_wanted
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.cache = DynamicCache(config=self._config)
        self.cache.layers = [
            ReservedLayer(self._capacity) if type(layer) is DynamicLayer else layer
            for layer in self.cache.layers
        ]
        if self._is_recording:
            self.cache.activate_past_recording()
        self.tokens: list[int] = []
        """Tokens whose KV state is in the cache, in order."""

    @property
    def num_cached(self) -> int:
        """Tokens in the cache."""
        return len(self.tokens)

    @property
    def can_roll_back(self) -> bool:
        """Whether `rollback` leaves no trace; known after the first forward pass."""
        return self._is_recording and bool(self.cache.is_croppable)

    @property
    def can_shorten(self) -> bool:
        """Whether any number of tokens can be taken from the end (full attention only)."""
        return all(type(layer) is ReservedLayer for layer in self.cache.layers)

    def max_pass_tokens(self, chunk_tokens: int) -> int:
        """Returns how many prompt tokens the next pass may take, `chunk_tokens` at most."""
        if self.tokens and self._config.model_type in RESTARTING_FAMILIES:
            return 1
        return chunk_tokens

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens were run through the model: their state is in the cache now."""
        self.tokens.extend(tokens)

    def rollback(self, num_tokens: int) -> None:
        """Removes the last `num_tokens` tokens' state, and trims recorded state.

        Called after every pass while recording, with 0 where nothing is rejected.
        """
        if not self._is_recording:
            if num_tokens:
                raise RuntimeError("rollback without recording")
            return
        if not self.cache.is_croppable:
            if num_tokens:
                raise RuntimeError("this cache cannot be rolled back")
            self._stop_recording()
            return
        self.cache.crop(-num_tokens)
        if num_tokens:
            del self.tokens[-num_tokens:]

    def _stop_recording(self) -> None:
        """Stops keeping what a rollback would need, on a cache that has none.

        Recorded convolution states would grow with every token otherwise.
        """
        self.cache.crop(0)
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False
        self._is_recording = False

    def reuse_prefix(self, prompt: Sequence[int]) -> int:
        """Keeps the longest common prefix of cache and prompt, at most all but one token.

        Returns:
            How many of the prompt's tokens are in the cache.
        """
        limit = min(len(self.tokens), len(prompt) - 1)
        common = 0
        while common < limit and self.tokens[common] == prompt[common]:
            common += 1
        surplus = len(self.tokens) - common
        if surplus and not self.can_shorten:
            self.reset()
            return 0
        if surplus:
            self.cache.crop(-surplus)
            del self.tokens[-surplus:]
        return common

    def recover(self, num_tokens: int) -> None:
        """Makes the cache whole after a reply was broken off inside a pass or a draft.

        Layers that had already run hold more tokens than the others, and a draft's tokens
        have the draft's state: all layers are cut back to `num_tokens`, the target's own
        prefix. Where that is not possible the state is dropped, and the next reply reads
        the chat again.
        """
        del self.tokens[num_tokens:]
        if not self.can_shorten:
            self.reset()
            return
        for layer in self.cache.layers:
            surplus = layer.get_seq_length() - len(self.tokens)
            if surplus > 0:
                layer.crop(-surplus)

    def num_bytes(self) -> int:
        """Bytes of the tensors held now."""
        total = 0
        for layer in self.cache.layers:
            for value in vars(layer).values():
                if isinstance(value, torch.Tensor):
                    total += value.numel() * value.element_size()
        return total
