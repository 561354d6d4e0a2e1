"""Running state: what convolutions and scans keep of all tokens together.

Attention keeps keys and values by position, so tokens are taken back by counting down. A
convolution or a scan keeps one state that every token changes. Here that state is copied
where a draft begins and put back when the draft is done. Of a verification whose candidates
are not all accepted, convolution and scan alone run again over the accepted ones, on what
the layer's input projections gave in the verification; no weight matrix is read for that.

transformers takes several tokens at once through another form of the scan than one token:
rounded otherwise, padded to whole chunks, in some families begun from an empty state. A
verification therefore scans token by token, as decoding does, between projections that take
all candidates at once.

Knows mixers (the modules around one convolution and one scan) by their parts, not by family.
Runs in the engine thread.

Source: Specter, State Manager (rollback to the accepted prefix); running state is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

RESTARTING_FAMILIES = frozenset({"jamba"})
"""Families whose scan, in transformers 5.24, begins from an empty state in every pass of more
than one token."""

_INPUT_PROJECTIONS = frozenset(
    {"q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "g_a_proj", "forget_gate"}
)
"""What takes a mixer's input, where it is not named `in_proj` or `in_proj_...`."""

_OUTPUT_PROJECTIONS = ("out_proj", "o_proj")


def mixers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Finds the modules with a running state, by decoder layer."""
    return {module.layer_idx: module for module in model.modules() if _is_mixer(module)}


def running_state_bytes(model: nn.Module, dtype: torch.dtype, num_draft_tokens: int) -> int:
    """Returns the most bytes that running state takes, without loading a weight.

    Args:
        model: May be on the meta device.
        dtype: Of the arithmetic; scans keep float32.
        num_draft_tokens: K at most. Above 0, the copy of the states and what the input
            projections give for K+1 tokens count, too.
    """
    states = rows = largest = 0
    for mixer in mixers_of(model).values():
        convolution = _convolution(mixer)
        scan_bytes = 4 * _scan_numbers(mixer)
        states += convolution.in_channels * convolution.kernel_size[0] * dtype.itemsize
        states += scan_bytes
        largest = max(largest, scan_bytes)
        rows += 4 * sum(_width(getattr(mixer, name)) for name in _input_names(mixer))
    # A step of the scan has its factors and the next state beside the present one.
    total = states + 3 * largest
    return total + states + rows * (num_draft_tokens + 1) if num_draft_tokens else total


def _is_mixer(module: nn.Module) -> bool:
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and any(isinstance(child, nn.Conv1d) for child in module.children())
        and any(hasattr(module, name) for name in _OUTPUT_PROJECTIONS)
        and bool(_input_names(module))
    )


def _convolution(mixer: nn.Module) -> nn.Conv1d:
    return next(child for child in mixer.children() if isinstance(child, nn.Conv1d))


def _input_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(
        name
        for name, _ in module.named_children()
        if name.startswith("in_proj") or name in _INPUT_PROJECTIONS
    )


def _width(projection: nn.Module) -> int:
    """Features that a projection, or a short chain of them, gives."""
    chain = [module for module in projection.modules() if isinstance(module, nn.Linear)]
    return chain[-1].out_features if chain else 0


def _scan_numbers(mixer: nn.Module) -> int:
    """Numbers in a scan's state: 0 for convolutions alone."""
    if hasattr(mixer, "ssm_state_size"):  # Mamba, both forms
        return mixer.intermediate_size * mixer.ssm_state_size
    if hasattr(mixer, "head_v_dim"):  # gated delta rule
        return mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim
    if hasattr(mixer, "qkv_dim"):  # the same, with a decay for each channel
        return mixer.qkv_dim * mixer.head_dim
    return 0


class _Given(nn.Module):
    """Stands in for a projection whose results are known.

    Args:
        rows: `[B, T, ...]`, handed out in their order.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self._rows = rows
        self._next = 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the next rows, as many as `[B, t, C]` has tokens."""
        start, self._next = self._next, self._next + hidden_states.shape[1]
        return self._rows[:, start : self._next]


@contextmanager
def _standing_in(module: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Puts others in the place of children of `module`."""
    children = module._modules
    kept = {name: children[name] for name in others}
    children.update(others)
    try:
        yield
    finally:
        children.update(kept)


def _is_padding(attention_mask: torch.Tensor | None) -> bool:
    """Whether a mask leaves anything out; some families make one that does not."""
    return attention_mask is not None and not bool(attention_mask.all())


class _Mixer:
    """Runs one mixer in the model's place.

    Args:
        module: Its `forward` is replaced.
        is_restarting: Whether its scan would begin anew in passes of several tokens.
    """

    def __init__(self, module: nn.Module, *, is_restarting: bool) -> None:
        self._module = module
        self._layer_index = module.layer_idx
        self._inputs = _input_names(module)
        self._output = next(name for name in _OUTPUT_PROJECTIONS if hasattr(module, name))
        self._is_restarting = is_restarting
        self._run = partial(type(module).forward, module)
        self._recorded_cache: Cache | None = None
        self._rows: dict[str, torch.Tensor] = {}
        module.forward = self._forward

    @property
    def num_recorded(self) -> int:
        """Tokens of the recorded pass."""
        return next(iter(self._rows.values())).shape[1] if self._rows else 0

    def record(self, cache: Cache) -> None:
        """Passes on `cache` are verifications from now on."""
        self._recorded_cache = cache

    def forget(self) -> None:
        """Ends what `record` began, and drops what was recorded."""
        self._recorded_cache = None
        self._rows = {}

    def replay(self, num_tokens: int, cache: Cache) -> None:
        """Takes the state over the first recorded tokens."""
        self._scan({name: rows[:, :num_tokens] for name, rows in self._rows.items()}, cache)

    def _forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """As the module's own, `[B, T, C]` to `[B, T, C]`.

        Passes with padding stay the library's: they are of batches, which have no rollback.
        """
        is_recording = cache is not None and cache is self._recorded_cache
        if (
            hidden_states.shape[1] == 1
            or _is_padding(attention_mask)
            or cache is None
            or not (is_recording or self._is_restarting)
            or not cache.has_previous_state(self._layer_index)
        ):
            return self._run(hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)
        rows = {name: getattr(self._module, name)(hidden_states) for name in self._inputs}
        if is_recording:
            self._rows = rows
        scanned = self._scan(rows, cache, **kwargs)
        return getattr(self._module, self._output)(scanned)

    def _scan(self, rows: dict[str, torch.Tensor], cache: Cache, **kwargs: object) -> torch.Tensor:
        """Runs what is between the projections. Returns what the output projection takes.

        A scan goes token by token; a convolution alone is the same for all tokens at once.
        """
        others: dict[str, nn.Module] = {name: _Given(given) for name, given in rows.items()}
        others[self._output] = nn.Identity()
        # The projections stand in for all that is done with the input but to count its tokens.
        stand_in = next(iter(rows.values()))
        num_tokens = stand_in.shape[1]
        has_scan = cache.layers[self._layer_index].recurrent_states[0] is not None
        step = 1 if has_scan else num_tokens
        with _standing_in(self._module, others):
            parts = [
                self._run(stand_in[:, start : start + step], cache=cache, **kwargs)
                for start in range(0, num_tokens, step)
            ]
        return torch.cat(parts, dim=1)


class RunningState:
    """The running state of all layers of one model's cache.

    Args:
        model: The loaded model; its mixers' `forward` is replaced where all are known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = mixers_of(model)
        family = model.config.get_text_config().model_type
        self._is_restarting = family in RESTARTING_FAMILIES
        self._mixers: dict[int, _Mixer] = {}
        self._cache: Cache | None = None
        self._layers: dict[int, LinearAttentionLayer] = {}
        self._copies: dict[tuple[int, str], torch.Tensor] = {}
        self._is_copy_empty = True

    def attach(self, cache: Cache) -> frozenset[int]:
        """Goes over to a new, empty cache. What was marked and recorded is forgotten.

        Returns:
            The layers of the cache that are taken care of here: none where not all mixers
            are known.
        """
        running = {
            index: layer
            for index, layer in enumerate(cache.layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        }
        is_known = running.keys() == self._modules.keys() and all(
            type(layer) is LinearAttentionLayer and layer.number_of_states == 1
            for layer in running.values()
        )
        self._cache = cache
        self._layers = running if is_known else {}
        if is_known and not self._mixers:
            self._mixers = {
                index: _Mixer(module, is_restarting=self._is_restarting)
                for index, module in self._modules.items()
            }
        self._is_copy_empty = True
        self.forget()
        return frozenset(self._layers)

    @torch.inference_mode()
    def mark(self) -> None:
        """Copies the state, into the same room every time."""
        self._is_copy_empty = not all(
            layer.has_previous_state[0] for layer in self._layers.values()
        )
        if self._is_copy_empty:
            return
        for key, state in self._states():
            copy = self._copies.get(key)
            if copy is None or copy.shape != state.shape:
                self._copies[key] = state.clone()
            else:
                copy.copy_(state)

    def record(self) -> None:
        """The passes that follow, until `forget`, are verifications."""
        assert self._cache is not None
        for mixer in self._mixers.values():
            mixer.record(self._cache)

    def forget(self) -> None:
        """Drops what verifications have recorded."""
        for mixer in self._mixers.values():
            mixer.forget()

    @torch.inference_mode()
    def go_back(self, num_accepted: int, num_since: int) -> None:
        """Takes the state back to the mark, then over the first tokens of the verification.

        Args:
            num_accepted: Tokens after the mark that stay.
            num_since: Tokens after the mark now.

        Raises:
            RuntimeError: No mark lies at or before the tokens that stay, or what came after it
                is not one recorded verification.
        """
        if not self._layers:
            return
        is_recorded = all(m.num_recorded == num_since for m in self._mixers.values())
        if num_accepted < 0 or (num_accepted and not is_recorded):
            raise RuntimeError("running state was not marked where it is to go back to")
        if self._is_copy_empty:
            for layer in self._layers.values():
                layer.reset()
        else:
            for key, state in self._states():
                state.copy_(self._copies[key])
        if num_accepted:
            for mixer in self._mixers.values():
                mixer.replay(num_accepted, self._cache)

    def _states(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for index, layer in self._layers.items():
            yield (index, "convolution"), layer.conv_states[0]
            if layer.recurrent_states[0] is not None:
                yield (index, "scan"), layer.recurrent_states[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the states and of their copies."""
        states = [state for _, state in self._states() if state is not None]
        return sum(tensor.nbytes for tensor in (*states, *self._copies.values()))
