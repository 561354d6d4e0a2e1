"""State Manager: the authoritative tokens and the KV state that belongs to them.

Draft and target share one transformers cache. Drafting extends it as a scratch, which
`rollback` removes; verification extends it with the candidates, of which `rollback`
removes the rejected ones. The corrected or bonus token is the first uncached input of
the next pass, so `num_cached` is always a target-consistent prefix between passes.

Keys and values are cropped. What convolutions and scans keep is put back to where the round
began, and from there brought forward: `mira_engine.model.recurrent`.

Source: Specter, State Manager.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer

from ..errors import GenerationError
from .recurrent import RunningState

UNCROPPED_FAMILIES = frozenset({"deepseek_v4"})
"""Families whose layers hold, in transformers 5.24, compressed keys that `crop` leaves in."""


class ReservedLayer(DynamicLayer):
    """A full-attention layer whose keys and values are written in place.

    transformers' own layer joins old and new tensors at every pass: each token copies the
    whole state, and the freed blocks fragment the heap until long prompts hold more than
    was planned. Here room for the whole context is reserved once (the system gives pages
    as they are written); a counter says how much of it is in use, and `crop` only lowers
    the counter.

    Args:
        capacity: Most tokens.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._length = 0

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> int:
        """Writes `[B, H, T, D]` keys and values behind those in use. Returns the new length.

        Raises:
            GenerationError: The context is full.
        """
        if not self.is_initialized:
            self.device = key_states.device
            self.keys, self.values = self._reserve(key_states), self._reserve(value_states)
            self.is_initialized = True
        start, stop = self._length, self.extend(key_states.shape[-2])
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        return stop

    def extend(self, num_tokens: int) -> int:
        """Counts tokens that somebody else writes into the room. Returns the new length.

        Raises:
            GenerationError: The context is full.
        """
        stop = self._length + num_tokens
        if stop > self._capacity:
            raise GenerationError(
                f"The context of {self._capacity} tokens is full.", hint="Start a new chat."
            )
        self._length = stop
        return stop

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends. Returns all keys and values in use, `[B, H, N, D]` views."""
        length = self.append(key_states, value_states)
        return self.keys[:, :, :length], self.values[:, :, :length]

    def _reserve(self, states: torch.Tensor) -> torch.Tensor:
        batch, num_heads, _, width = states.shape
        return states.new_empty((batch, num_heads, self._capacity, width))

    def get_seq_length(self) -> int:
        """Returns the tokens in use."""
        return self._length

    def get_max_length(self) -> int:
        """Returns the most tokens."""
        return self._capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; transformers passes their number negated."""
        self._length -= min(self._length, abs(tokens_to_remove))

    def reset(self) -> None:
        """Forgets all tokens and keeps the room."""
        self._length = 0

    @torch.inference_mode()
    def make_finite(self) -> None:
        """Clears the values behind those in use, for whoever looks at the whole room.

        What is there before anything was written can be nan, and so can what a broken-off
        chat left; a masked key needs no care, a value with weight 0 does.
        """
        if self.is_initialized:
            self.values[:, :, self._length :] = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values in use."""
        if not self.is_initialized:
            return 0
        per_token = (self.keys.nbytes + self.values.nbytes) // self._capacity
        return self._length * per_token


class StateManager:
    """KV state of one conversation on one model.

    Args:
        model: The loaded model; its config decides the cache's layer types.
        capacity: Most tokens of the conversation.
        is_rollback_wanted: Whether caches with bounded state (windows, convolutions, scans)
            keep what a rollback needs.
    """

    def __init__(self, model: PreTrainedModel, *, capacity: int, is_rollback_wanted: bool) -> None:
        self._config = model.config
        self.capacity = capacity
        is_croppable = model.config.model_type not in UNCROPPED_FAMILIES
        self._is_recording = is_rollback_wanted and is_croppable
        self._running = RunningState(model)
        self._is_room_held = False
        self.reset()

    def _new_cache(self) -> DynamicCache:
        cache = DynamicCache(config=self._config)
        cache.layers = [
            ReservedLayer(self.capacity) if type(layer) is DynamicLayer else layer
            for layer in cache.layers
        ]
        return cache

    def hold_room(self) -> None:
        """Keeps the room where it is from now on, all of it finite: recorded steps point to it.

        Only where all state is in reserved room (`is_static`).
        """
        self._is_room_held = True
        for layer in self.cache.layers:
            layer.make_finite()

    def release_room(self) -> None:
        """Forgets everything and gives the room back: no recorded step points to it any more."""
        self._is_room_held = False
        self.reset()

    def reset(self) -> None:
        """Forgets everything. Gives the room back, unless it is held."""
        if self._is_room_held:
            for layer in self.cache.layers:
                layer.reset()
                layer.make_finite()
        else:
            self.cache = self._new_cache()
        running = self._running.attach(self.cache)
        self._by_position = [
            layer for index, layer in enumerate(self.cache.layers) if index not in running
        ]
        if self._is_recording:
            for layer in self._by_position:
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
        self.tokens: list[int] = []
        """Tokens whose state is in the cache, in order."""
        self._num_marked = 0

    @property
    def num_cached(self) -> int:
        """Tokens in the cache."""
        return len(self.tokens)

    @property
    def can_roll_back(self) -> bool:
        """Whether `rollback` leaves no trace; known after the first forward pass."""
        return self._is_recording and all(layer.is_croppable for layer in self._by_position)

    @property
    def is_static(self) -> bool:
        """Whether all state is keys and values in reserved room (full attention only).

        Then any number of tokens can be taken from the end, and steps can be compiled.
        """
        return all(type(layer) is ReservedLayer for layer in self.cache.layers)

    def mark(self) -> None:
        """Remembers the state here, between passes: rollbacks come back to it at most.

        Needed before a draft, and before what may be broken off and shall not be lost.
        """
        if self._is_recording:
            self._running.mark()
            self._num_marked = len(self.tokens)

    def begin_verification(self) -> None:
        """Says that the next pass is a verification, of which a rollback keeps a part."""
        if self._is_recording:
            self._running.record()

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens were run through the model: their state is in the cache now."""
        self.tokens.extend(tokens)

    def rollback(self, num_tokens: int) -> None:
        """Removes the last `num_tokens` tokens' state, and trims recorded state.

        Called after every pass while recording, with 0 where nothing is rejected.

        Raises:
            RuntimeError: Something shall be removed and nothing was kept for it: neither
                recorded nor, for running state, marked.
        """
        if not self.can_roll_back:
            if num_tokens:
                raise RuntimeError("this state cannot be rolled back")
            if self._is_recording:
                self._stop_recording()
            return
        if num_tokens:
            num_since = len(self.tokens) - self._num_marked
            self._running.go_back(num_since - num_tokens, num_since)
            del self.tokens[-num_tokens:]
        for layer in self._by_position:
            layer.crop(-num_tokens)
        self._running.forget()

    def _stop_recording(self) -> None:
        """Stops keeping what a rollback would need, on a cache that has none.

        Recorded convolution states would grow with every token otherwise.
        """
        for layer in self._by_position:
            layer.crop(0)
            if hasattr(layer, "record_past"):
                layer.record_past = False
        self._is_recording = False

    def reuse_prefix(self, prompt: Sequence[int]) -> int:
        """Keeps the longest common prefix of cache and prompt, at most all but one token.

        Where tokens cannot be taken from the end one by one, that is all of the cache, the
        part before the mark, or nothing.

        Returns:
            How many of the prompt's tokens are in the cache.
        """
        limit = min(len(self.tokens), len(prompt) - 1)
        common = 0
        while common < limit and self.tokens[common] == prompt[common]:
            common += 1
        if common < len(self.tokens):
            self._shorten(common)
        return len(self.tokens)

    def recover(self, num_tokens: int) -> None:
        """Makes the cache whole after a reply was broken off inside a pass or a draft.

        Layers that had already run hold more tokens than the others, and a draft's tokens
        have the draft's state: all layers are cut back to `num_tokens`, the target's own
        prefix, or to the mark before it. Where neither is possible the state is dropped, and
        the next reply reads the chat again.
        """
        del self.tokens[num_tokens:]
        self._shorten(num_tokens)

    def _shorten(self, num_tokens: int) -> None:
        """Cuts all layers, whatever each of them holds, back to `num_tokens` or less."""
        if not self.is_static:
            is_marked = 0 < self._num_marked <= num_tokens
            kinds = {type(layer) for layer in self._by_position}
            if not (self._is_recording and is_marked and kinds <= {ReservedLayer, DummyLayer}):
                self.reset()
                return
            num_tokens = self._num_marked
            self._running.go_back(0, 0)
            self._running.forget()
        del self.tokens[num_tokens:]
        for layer in self._by_position:
            surplus = layer.get_seq_length() - num_tokens if type(layer) is ReservedLayer else 0
            if surplus > 0:
                layer.crop(-surplus)

    def num_bytes(self) -> int:
        """Bytes of the state in use."""
        total = self._running.num_bytes
        for layer in self._by_position:
            if isinstance(layer, ReservedLayer):
                total += layer.num_bytes
                continue
            for value in vars(layer).values():
                if isinstance(value, torch.Tensor):
                    total += value.numel() * value.element_size()
        return total
