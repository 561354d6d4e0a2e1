"""From cards, memories and a model to the cases of a simulation: the engine plans each.

What a simulation on a card has to know (slots, bytes of an expert, link, times of steps) is
what `mira-chat plan` says of it; nothing here works any of that out again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mira_engine.api import (
    BudgetError,
    EngineConfig,
    MachineRates,
    PlanMade,
    format_bytes,
    planned_case,
)

from .catalog import Catalog
from .catalog_configs import find_entry, plannable_name
from .engine_client import EngineClient
from .machines import find_machine
from .planning import ask_plan
from .settings import Settings

if TYPE_CHECKING:
    from mira_engine.api import SimulationCase

SETTING_NAMES = ("model", "precision", "context", "k")
"""Settings that hold for every plan."""

PLANNING_FLAGS = ("card", "memory", "budget", "model", "precision", "context")
"""Flags that ask for plans; without any of them only numbers are simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCases:
    """What there is to simulate.

    Attributes:
        cases: Card by card, memory by memory.
        notes: What the plans assumed, and which of them fit nothing.
    """

    cases: tuple[SimulationCase, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Notes:
    """What plans say, and for which machines."""

    machines: dict[str, None] = field(default_factory=dict)
    _said: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, machine: str, texts: Iterable[str]) -> None:
        self.machines[machine] = None
        for text in texts:
            self._said.setdefault(text, {})[machine] = None

    def lines(self) -> Iterator[str]:
        """Yields each sentence once, with its machines where it is not true of all."""
        for text, machines in self._said.items():
            is_of_all = len(machines) == len(self.machines)
            yield text if is_of_all else f"{', '.join(machines)}: {text}"


class CasePlanner:
    """Plans a model for every card and memory that was named.

    Args:
        read_settings: Reads what the person chose, with these flags on top.
        make_client: Makes the client; no process is started before the rest is valid.
        catalog: Where models are looked up.
        cache_dir: Configurations of models that are not here are written there.
    """

    def __init__(
        self,
        read_settings: Callable[[Mapping[str, object]], Settings],
        make_client: Callable[[], EngineClient],
        catalog: Catalog,
        cache_dir: Path,
    ) -> None:
        self._read_settings = read_settings
        self._make_client = make_client
        self._catalog = catalog
        self._cache_dir = cache_dir

    def plan(self, flags: Mapping[str, object]) -> PlannedCases:
        """Returns the cases of every card with every memory and budget.

        Raises:
            ConfigError: A flag cannot be used, or there is no such card.
            UnknownModelError: There is no such model.
            BudgetError: Nothing fits anywhere.
            MiraError: The engine has no plan for the model.
        """
        cards = _given(flags, "card")
        machines = [None if card is None else find_machine(card) for card in cards]
        configs = [
            self._settings(flags, memory, budget)
            for memory in _given(flags, "memory")
            for budget in _given(flags, "budget")
        ]
        chosen = configs[0]
        entry = find_entry(chosen.model, self._catalog, chosen.engine.precision)
        name = plannable_name(entry, self._cache_dir) or entry.model
        with self._make_client() as client:
            plans = [
                (config.engine, ask_plan(client, name, config.engine, machine))
                for machine, config in itertools.product(_told_apart(machines), configs)
            ]
        return _cases_of(plans, entry.title)

    def _settings(
        self, flags: Mapping[str, object], memory: str | None, budget: str | None
    ) -> Settings:
        chosen = {name: flags.get(name) for name in SETTING_NAMES}
        return self._read_settings({**chosen, "memory": memory, "budget": budget})


def _given(flags: Mapping[str, object], name: str) -> list[str | None]:
    """Returns each value of a flag that can be repeated once; `None` where it was not given."""
    values = flags.get(name) or [None]
    return list(dict.fromkeys(values))  # type: ignore[call-overload]


def _told_apart(machines: Sequence[MachineRates | None]) -> list[MachineRates | None]:
    """Returns each machine once; those after the first of a name get a number behind it."""
    told: list[MachineRates | None] = []
    names: dict[str, int] = {}
    for machine in dict.fromkeys(machines):
        if machine is not None:
            number = names[machine.name] = names.get(machine.name, 0) + 1
            if number > 1:
                machine = dataclasses.replace(machine, name=f"{machine.name} ({number})")
        told.append(machine)
    return told


def _cases_of(plans: Sequence[tuple[EngineConfig, PlanMade]], model: str) -> PlannedCases:
    cases: dict[tuple[str, str], SimulationCase] = {}
    notes, refused = _Notes(), []
    for (_, made), memory in zip(plans, _memory_texts(plans), strict=True):
        case = planned_case(made, model=model, memory=memory)
        notes.add(made.machine.name, made.notes)
        if case is None:
            refused.append(f"{made.machine.name}, {memory}: {made.refusal or 'nothing fits.'}")
            continue
        cases.setdefault((case.machine, case.memory), case)
    if not cases:
        raise BudgetError(refused[0], hint=plans[0][1].hint)
    return PlannedCases(cases=tuple(cases.values()), notes=(*notes.lines(), *refused))


def _memory_texts(plans: Sequence[tuple[EngineConfig, PlanMade]]) -> list[str]:
    """Returns the memory of each plan for people, exactly where it would be two plans' else."""
    texts = [_memory_text(config, made, format_bytes) for config, made in plans]
    amounts: dict[tuple[str, str], set[object]] = {}
    for (config, made), text in zip(plans, texts, strict=True):
        told = amounts.setdefault((made.machine.name, text), set())
        told.add((made.memory_bytes, config.budget))
    return [
        _memory_text(config, made, _exact_text)
        if len(amounts[made.machine.name, text]) > 1
        else text
        for (config, made), text in zip(plans, texts, strict=True)
    ]


def _memory_text(config: EngineConfig, made: PlanMade, text_of: Callable[[float], str]) -> str:
    parts = []
    if config.budget is None or config.memory_bytes is not None:
        parts.append(f"{text_of(made.memory_bytes)} of memory")
    if config.budget is not None:
        num_bytes = config.budget.num_bytes
        amount = str(config.budget) if num_bytes is None else text_of(num_bytes)
        parts.append(f"{amount} for experts")
    return ", ".join(parts)


def _exact_text(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.15g} MiB"
