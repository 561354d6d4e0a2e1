"""Another configuration for a loaded model: in place where that suffices, else by a reload.

In place go K and the prefetch switch, as long as the device has the draft that they need:
slots, experts and the conversation stay. All else (budget and memory, precision, arithmetic,
context, a draft where there was none) changes what lies on the device, whose one arena is
divided once: the model is loaded anew, the conversation is read again, and the experts that
were worth most come back from the store. Two engines never exist at once, as their memory
together was never planned; when a reload fails, the former configuration is loaded again.

Runs in the engine thread, between replies.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

from .config import LIVE_FIELDS, EngineConfig
from .engine import Engine
from .errors import MemoryShortageError, MiraError
from .events import Notice
from .library import ModelHome
from .load_plan import LoadPlan
from .policy.budget import DEFAULT_NUM_DRAFT_TOKENS
from .types import DraftExperts, ExpertId

_NUM_KEPT_FREE = 2
"""Slots that a refill leaves to the first misses."""

_EXPERTS_AT_ONCE = 32
"""Experts between two looks at the cancel flag."""

_GOES_ON = " The model goes on with its former settings."
_GOES_ON_WITH_LESS = " The model goes on with its former settings, but with less memory."

_DRAFTS = {DraftExperts.ALL: "all experts", DraftExperts.CACHED: "the cached experts"}

OnNotice = Callable[[Notice], None]
IsCancelled = Callable[[], bool]
LoadEngine = Callable[[ModelHome, EngineConfig, IsCancelled], Engine]


def change_in_place(engine: Engine, config: EngineConfig, on_notice: OnNotice) -> bool:
    """Goes over to a configuration if nothing on the device needs to change for it.

    Args:
        engine: Between replies.
        config: What is wanted.
        on_notice: Told where a fresh load would draft otherwise.

    Returns:
        Whether it did. Where not, the configuration has a plan that fits.

    Raises:
        BudgetError: It does not fit; nothing has changed.
        ConfigError: A field is beyond what this model can do; as above.
        StoreError: The model is not prepared in that precision; as above.
    """
    changed = engine.config.changed_fields(config)
    if not changed:
        return True
    planned = engine.plan_for(config)
    if not changed <= LIVE_FIELDS:
        return False
    adapted = _on_same_slots(engine, config, planned)
    if adapted is None:
        return False
    kind = engine.plan.draft_experts
    if planned.memory.num_draft_tokens and planned.memory.draft_experts is not kind:
        text = (
            f"The draft goes on with {_DRAFTS[kind]}, as it was loaded; loaded anew for this K "
            f"it would compute with {_DRAFTS[planned.memory.draft_experts]}."
        )
        on_notice(Notice(code="draft-kept", text=text))
    engine.adopt(config, adapted)
    return True


def _on_same_slots(engine: Engine, config: EngineConfig, planned: LoadPlan) -> LoadPlan | None:
    """Returns the plan with the slots that are there; `None` where it takes others."""
    memory, wanted = engine.plan, planned.memory
    has_draft = engine.executor.draft is not None
    k = wanted.num_draft_tokens
    if config.num_draft_tokens is None and has_draft:
        k = k or DEFAULT_NUM_DRAFT_TOKENS  # The governor may try it; the draft is there anyway.
    if k and not has_draft:
        return None
    memory = replace(memory, num_draft_tokens=k, workspace_bytes=wanted.workspace_bytes)
    if config.memory_bytes is not None and memory.total_bytes > config.memory_bytes:
        return None
    return replace(planned, memory=memory)


def unchanged(error: MiraError) -> MiraError:
    """Returns the error with the word that the model goes on as before.

    A new one: the traceback of the first would keep what failed to load in memory.
    """
    return type(error)(error.message + _GOES_ON, hint=error.hint)


def what_goes_on(failure: MiraError) -> str:
    """Returns the sentence of a failed change that says how the model goes on, if it does."""
    endings = (_GOES_ON, _GOES_ON_WITH_LESS)
    return next((each for each in endings if failure.message.endswith(each)), "")


class Reloading:
    """Loads a model anew, and puts back what was worth most on the device.

    Made before the engine is closed, and keeps no hold on it.

    Args:
        engine: The one that will be given up.
        load: Loads another one, and makes it the one in use.
        on_notice: Told what came back.
        is_cancelled: Asked between the steps of loading.
        is_ending: As above, while the former configuration is loaded again.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        load: LoadEngine,
        on_notice: OnNotice,
        is_cancelled: IsCancelled,
        is_ending: IsCancelled,
    ) -> None:
        self._home = engine.home
        self._config = engine.config
        self._experts = engine.executor.driver.residency.by_worth()
        self._load = load
        self._notify = on_notice
        self._is_cancelled = is_cancelled
        self._is_ending = is_ending

    def run(self, choose: Callable[[], EngineConfig]) -> None:
        """Loads the model anew, or where that fails with the former configuration.

        Args:
            choose: Gives the configuration, now that the memory is free.

        Raises:
            CancelledError: Somebody asked to stop; the former configuration is in force.
            MiraError: As `Engine.load`; the former configuration is in force, or the message
                says that no model is loaded any more.
        """
        failure: MiraError | None = None
        try:
            engine = self._load(self._home, choose(), self._is_cancelled)
        except MiraError as error:
            failure = unchanged(error)
        except MemoryError:
            text = "The machine's memory does not suffice for that."
            failure = unchanged(MiraError(text, hint="Give a smaller --budget."))
        if failure is None:
            self._refill(engine, self._is_cancelled)
            return
        gc.collect()  # What was loaded by then; both at once would not fit.
        raise self._go_back(failure)

    def _go_back(self, failure: MiraError) -> MiraError:
        """Loads with the former configuration. Returns what to raise."""
        try:
            engine = self._load(self._home, self._config, self._is_ending)
        except MiraError as error:
            is_memory = isinstance(failure, MemoryShortageError)
            kind = MemoryShortageError if is_memory else MiraError
            raise kind(
                f"{failure.message.removesuffix(_GOES_ON)} No model is loaded any more: "
                f"{error.message}",
                hint=error.hint,
            ) from error
        self._refill(engine, self._is_ending)
        if not engine.config.changed_fields(self._config):
            return failure
        told = failure.message.removesuffix(_GOES_ON) + _GOES_ON_WITH_LESS
        return type(failure)(told, hint=failure.hint)

    def _refill(self, engine: Engine, is_cancelled: IsCancelled) -> None:
        num_back = refill(engine, self._experts, is_cancelled)
        if self._experts:
            text = (
                f"The model was loaded anew; {num_back} of the {len(self._experts)} experts that "
                "were on the device are there again, those worth most."
            )
            self._notify(Notice(code="reloaded", text=text))


def refill(engine: Engine, experts: Sequence[ExpertId], is_cancelled: IsCancelled) -> int:
    """Loads experts into an engine's free slots, in this order, but for a few.

    Returns:
        How many are there.
    """
    residency = engine.executor.driver.residency
    wanted = experts[: max(0, residency.num_slots - residency.num_used - _NUM_KEPT_FREE)]
    for start in range(0, len(wanted), _EXPERTS_AT_ONCE):
        if is_cancelled():
            break
        engine.fill_hot(wanted[start : start + _EXPERTS_AT_ONCE])
    return sum(map(residency.is_ready, experts))
