"""The native path of a loaded model: which kernels and steps it uses, and since when.

Owns the decision when what `mira_engine.runtime.capture` made is taken up: native kernels
at loading if they are built already, everything else between two replies, because results
are rounded otherwise afterwards. Called by the engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import torch
from mira_kernels import native
from mira_kernels.dispatch import measure_native_limit, use_native_limit
from transformers import PreTrainedModel

from ..checkpoint.experts import expert_modules_of
from ..checkpoint.store import ExpertStore
from ..config import EngineConfig
from ..events import MemoryPlan
from ..model.linear import DenseSwitch, arrange_dense, limit_draft_words
from ..model.loader import TORCH_DTYPES
from ..model.steps import StepSpec
from ..types import CompileMode, ComputeDtype, DraftDense, ExpertId
from .capture import UNCOMPILED, OnNotice, StepCapture
from .executor import ExpertExecutor
from .fused import FusedExperts, is_fusable
from .passes import ModelPasses
from .probe import MachineProfile
from .slots import SlotArena, SlotBinder, SlotDraft

_OTHER_DEPTHS = (1, 2)
"""Depths below the plan's K whose verifications have steps of their own. In the step of K = 4
a verification of two tokens takes 5 ms more (built-in model, one thread, 2026-11-30)."""


class NativePath:
    """Takes up native kernels and compiled steps.

    Args:
        model: The loaded backbone.
        folder: Its configuration.
        config: Arithmetic, compile mode and draft words.
        plan: K and what the draft multiplies with.
        cache_dir: Where kernels and steps are kept.
        passes: Gets the steps.
        executor: Gets the fused experts.
        switch: Of the model's dense layers.
        target: Store of the target's experts.
        draft_source: Store of the draft's.
        slots: The arena.
        bind: Gives the weights of an expert in a slot.
        draft_depths: Depths that a governor chooses among; empty where K is fixed.
        on_notice: Told code and text of every fallback, from any thread.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        folder: Path,
        config: EngineConfig,
        plan: MemoryPlan,
        cache_dir: Path,
        passes: ModelPasses,
        executor: ExpertExecutor,
        switch: DenseSwitch,
        target: ExpertStore,
        draft_source: ExpertStore,
        slots: SlotArena,
        bind: SlotBinder,
        draft_depths: Collection[int],
        on_notice: OnNotice,
    ) -> None:
        self._model = model
        self._folder = folder
        self._config = config
        self._plan = plan
        self._cache_dir = cache_dir
        self._passes = passes
        self._executor = executor
        self._switch = switch
        self._stores = target, draft_source
        self._slots = slots
        self._bind = bind
        self._draft_depths = draft_depths
        self._notify = on_notice
        self._census: dict[str, int] = {}
        self._is_off = False
        self.is_native = False
        """Whether native kernels are in use."""
        self.capture = StepCapture(model, folder, cache_dir, on_notice)

    def start(self, is_cancelled: Callable[[], bool]) -> None:
        """Takes up native kernels that are there, and has the rest made in the background.

        With `CompileMode.WAIT` it waits until all is made or somebody asks to stop. What was
        made at an earlier start is always waited for: that takes seconds, and the first
        reply has it.
        """
        if native.is_built(self._cache_dir) and not self._use_native():
            return
        dtype = TORCH_DTYPES[self._config.arithmetic]
        self.capture.start(self.wanted_steps(), dtype, self._census)
        if self._config.compile_mode is CompileMode.WAIT or self.capture.are_all_kept():
            self.capture.wait(is_cancelled)
            self.take()

    def take(self) -> bool:
        """Takes up what the background has made since. Between replies only.

        Returns:
            Whether that changed anything.
        """
        was_native = self.is_native
        if not self.is_native and self.capture.is_native_ready:
            self._use_native()
        steps = self.capture.take_ready() if self.is_native else {}
        self._passes.add_steps(steps)
        return bool(steps) or self.is_native != was_native

    def deepen(self, plan: MemoryPlan, draft_depths: Collection[int]) -> None:
        """Has the steps of a larger K made in the background; those in use stay meanwhile.

        Between replies only.
        """
        if self._is_off:
            return
        self.take()
        self.capture.close()
        self._plan, self._draft_depths = plan, draft_depths
        self.capture = StepCapture(self._model, self._folder, self._cache_dir, self._notify)
        self.capture.start(self.wanted_steps(), TORCH_DTYPES[self._config.arithmetic], self._census)

    def close(self) -> None:
        """Stops what is still being made."""
        self.capture.close()

    def wanted_steps(self) -> list[StepSpec]:
        """Returns the steps of the loop: decoding, or drafting and verifying K tokens."""
        if not self._passes.state.is_static:
            self._notify(
                "uncompiled",
                f"{UNCOMPILED} {self._model.config.model_type} models keep sliding windows or "
                "running states.",
            )
            return []
        k = self._plan.num_draft_tokens
        base = StepSpec(
            dtype=self._config.arithmetic,
            is_native=self._config.arithmetic is ComputeDtype.BFLOAT16,
            draft_dense=self._plan.draft_dense,
            draft_words=self._draft_words,
            is_draft=False,
            num_tokens=1,
        )
        if not k:
            return [base]
        # Depths between run as the next longer verification, its last places empty.
        depths = [k, *(d for d in _OTHER_DEPTHS if d in self._draft_depths and d != k)]
        verifications = [replace(base, num_tokens=depth + 1) for depth in depths]
        if self._plan.draft_dense is DraftDense.TARGET:
            return [base, *verifications]  # The draft's step is the plain one.
        return [replace(base, is_draft=True), verifications[0], base, *verifications[1:]]

    @property
    def _draft_words(self) -> int | None:
        """Tokens that a draft chooses among, `None` for all."""
        words = self._config.draft_words
        vocabulary = self._model.config.get_text_config().vocab_size
        if self._plan.draft_dense is DraftDense.TARGET or not words or words >= vocabulary:
            return None
        return words

    def _use_native(self) -> bool:
        """Switches dense layers, experts and the draft to the native kernels."""
        if self._is_off:
            return False
        status = native.load(self._cache_dir)
        if not status.is_available:
            self._is_off = True
            self._notify("no-native-kernels", f"{status.reason} {UNCOMPILED}")
            return False
        self.is_native = True
        self._census = arrange_dense(self._model, self._plan.draft_dense, self._switch)
        limit_draft_words(self._model, self._draft_words)
        if self._config.arithmetic is ComputeDtype.BFLOAT16:
            self._choose_kernels()
        target, draft_source = self._stores
        modules = [module for _, module in expert_modules_of(self._model)]
        if is_fusable(target.format, modules):
            is_in_slots = isinstance(self._executor.draft, SlotDraft)
            self._executor.use_fused(
                FusedExperts(
                    target.format,
                    self._slots,
                    self._bind,
                    target.manifest.num_experts,
                    self._executor.draft,
                    (target if is_in_slots else draft_source).format,
                    target.manifest.num_layers,
                )
            )
        return True

    def _choose_kernels(self) -> None:
        """Sets up to how many tokens an expert's products are native, as measured here once."""
        profile = MachineProfile(self._cache_dir / "machine.json")
        expert = self._bind(ExpertId(0, 0), 0)
        limits = []
        for weight in (expert.up, expert.down):
            rows, columns = weight.shape
            kind = type(weight).__name__
            library = native.library_path(self._cache_dir).stem
            name = f"{library} {kind} {rows}x{columns} rows, {torch.get_num_threads()} threads"
            limits.append(profile.get(name, lambda weight=weight: measure_native_limit(weight)))
        use_native_limit(type(expert.up), min(limits))
