"""Captured steps: passes recorded once on a card, then launched as a whole.

Owns the recordings of one loaded model: a draft's pass is one, a target's one for each piece
between routers (`mira_engine.runtime.captured_target`). There is one for each number of tokens
in use and each bucket of the context, made when it is first needed. What cannot be recorded
runs module by module, and a line says so. Stands where `mira_engine.runtime.capture` stands on
a processor. Engine thread only.

Source: Specter, Overlap-Oriented Parallelism Optimizer (graph capture).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from ..config import format_bytes
from ..errors import MiraError, check_cancelled
from ..model.bucketed import bucket_of
from ..model.kv import StateManager
from ..policy.launching import LaunchAhead
from ..types import Phase
from .captured_model import RecordableModel, StepInputs
from .captured_target import TargetStep
from .executor import ExpertExecutor
from .gpu_device import GpuDevice, GpuHandle
from .gpu_experts import GpuExperts
from .graphs import Cut
from .shortage import is_out_of_memory

MAX_STEPS = 24
"""Most recordings held, whole passes: three depths of draft in eight buckets. Beyond them the
one that was not used for longest goes."""

MAX_BYTES = 96 << 20
"""Device memory of all recordings beyond which no more are made: the plan's workspace has
112 MiB for compiled steps (`mira_engine.model.facts`), and the last one comes on top."""

_RECORDING_ERRORS = (MiraError, RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What ends a recording: a family's own code runs in there, on inputs that it does not expect."""

Tell = Callable[[str, str], None]


class DraftStep:
    """A draft's pass of one token within one bucket: embedding to logits.

    Args:
        model: Gives the work.
        experts: Computes with the draft's experts, and counts what is routed.
        handle: The card; it has graphs.
        bucket: Places of the context that are looked at.
        tokens: The first pass's, on which the work is tried.
        num_cached: Tokens before them.
    """

    def __init__(
        self,
        *,
        model: RecordableModel,
        experts: GpuExperts,
        handle: GpuHandle,
        bucket: int,
        tokens: Sequence[int],
        num_cached: int,
    ) -> None:
        assert handle.graphs is not None
        self._experts = experts
        self._inputs = StepInputs(len(tokens), model.device)
        self._inputs.fill(tokens, num_cached)

        def work(cut: Cut) -> None:
            del cut
            self._logits = model.run(self._inputs, bucket, experts.record_draft)

        counts = experts.keep_counts()
        try:
            [self._recording] = handle.graphs.capture(work)
        finally:
            experts.put_counts_back(counts)

    def run(self, tokens: Sequence[int], num_cached: int) -> Tensor:
        """Runs `tokens` behind `num_cached` others. Returns logits `[T, V]` on the device."""
        self._inputs.fill(tokens, num_cached)
        self._recording.replay()
        self._experts.release_draft()
        return self._logits


class CapturedSteps:
    """Makes the steps of one loaded model, and runs them.

    Args:
        model: The loaded backbone, on the card.
        executor: Asks the driver.
        state: Its keys and values are held where they are from the first recording on.
        device: The card, and what computes experts there.
        tell: Told code and text of every fallback.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        executor: ExpertExecutor,
        state: StateManager,
        device: GpuDevice,
        tell: Tell,
    ) -> None:
        self._model = RecordableModel(model, executor, state)
        self._executor = executor
        self._state = state
        self._device = device
        self._tell = tell
        self._ahead = LaunchAhead()
        self._steps: OrderedDict[tuple[bool, int, int], DraftStep | TargetStep] = OrderedDict()
        self._lengths: frozenset[int] = frozenset()
        self._is_off = False
        self._is_short = False
        """Whether a shortage of memory is why nothing is recorded."""
        self._is_full = False
        self._is_new = False
        executor.is_drafted_kept = True

    def use_depths(self, depths: Collection[int]) -> None:
        """Sets the numbers of draft tokens whose verifications are captured. Between replies."""
        self._lengths = frozenset((1, *(depth + 1 for depth in depths)))

    def forget(self) -> None:
        """Gives all recordings up; they are made anew when they are needed. Between replies."""
        self._steps.clear()
        graphs = self._device.handle.graphs
        assert graphs is not None
        graphs.renew()
        self._is_off = self._is_off and not self._is_short
        self._is_full = self._is_short = False

    def take_new(self) -> bool:
        """Whether a step was recorded since the last call: what was timed had that in it."""
        is_new, self._is_new = self._is_new, False
        return is_new

    @property
    def steps(self) -> Sequence[DraftStep | TargetStep]:
        """Those that there are, those used last at the end."""
        return tuple(self._steps.values())

    def run(self, tokens: Sequence[int], phase: Phase) -> Tensor | None:
        """Runs `tokens` after what is cached, where that is captured.

        Returns:
            Logits `[T, V]` on the host; `None` where the pass has to run module by module,
            of which nothing has happened then.

        Raises:
            CancelledError: The cancel flag was raised.
            StoreError: A record could not be read.
        """
        check_cancelled(self._executor.is_cancelled)
        if not self._takes(len(tokens), phase):
            return None
        step = self._step(tokens, is_draft=phase is Phase.DRAFT)
        if step is None:
            return None
        num_cached = self._state.num_cached
        for layer in self._state.cache.layers:
            layer.extend(len(tokens))
        return step.run(tokens, num_cached).cpu()

    def _takes(self, num_tokens: int, phase: Phase) -> bool:
        if self._is_off or phase is Phase.PREFILL or num_tokens not in self._lengths:
            return False
        executor = self._executor
        # A driver that listens, and a trace, take each layer's choice on the host.
        is_heard = executor.driver.is_listening or executor.recorder is not None
        if phase is Phase.DRAFT and (num_tokens > 1 or is_heard):
            return False
        has_room = self._state.num_cached + num_tokens <= self._state.capacity
        return has_room and all(layer.is_initialized for layer in self._state.cache.layers)

    def _step(self, tokens: Sequence[int], *, is_draft: bool) -> DraftStep | TargetStep | None:
        """Returns the step for a pass, made now if there is none."""
        stop = self._state.num_cached + len(tokens)
        key = is_draft, len(tokens), bucket_of(stop, self._state.capacity)
        step = self._steps.get(key)
        if step is None:
            step = self._capture(tokens, is_draft=is_draft, bucket=key[2])
            if step is None:
                return None
            self._is_new = True
            self._steps[key] = step
            if len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return step

    def _capture(
        self, tokens: Sequence[int], *, is_draft: bool, bucket: int
    ) -> DraftStep | TargetStep | None:
        graphs = self._device.handle.graphs
        assert graphs is not None
        if graphs.num_bytes > MAX_BYTES:
            self._tell_full(graphs.num_bytes)
            return None
        self._state.hold_room()
        common = {
            "model": self._model,
            "experts": self._device.experts,
            "handle": self._device.handle,
            "bucket": bucket,
            "tokens": tokens,
            "num_cached": self._state.num_cached,
        }
        try:
            if is_draft:
                return DraftStep(**common)
            return TargetStep(executor=self._executor, ahead=self._ahead, **common)
        except _RECORDING_ERRORS as error:
            self._is_short = is_out_of_memory(error)
            self._give_up(error.message if isinstance(error, MiraError) else str(error))
            return None
        finally:
            self._device.transfer.release_all()  # The trial's launches read slots.

    def _tell_full(self, num_bytes: int) -> None:
        if not self._is_full:
            self._is_full = True
            self._tell(
                "captured-memory",
                f"Recorded steps hold {format_bytes(num_bytes)}, all that the plan has for them: "
                "passes of other lengths run module by module, more slowly.",
            )

    def _give_up(self, reason: str) -> None:
        """Records nothing and uses no recording any more: all passes run alike."""
        self._is_off = True
        self._steps.clear()
        lines = reason.strip().splitlines() or ["no reason was given"]
        self._tell("uncaptured", f"Steps run module by module, more slowly: {lines[0]}.")


def captured_steps(
    model: PreTrainedModel,
    executor: ExpertExecutor,
    state: StateManager,
    device: GpuDevice,
    tell: Tell,
) -> CapturedSteps | None:
    """Returns the steps of a model on a card; `None`, with a line said, where it has none."""
    if device.handle.graphs is None:
        return None
    if not state.is_static:
        tell(
            "uncaptured",
            f"Steps run module by module, more slowly: {model.config.model_type} models keep "
            "sliding windows or running states.",
        )
        return None
    return CapturedSteps(model, executor, state, device, tell)
