"""`mira-chat plan`: asks the engine process for a plan and prints it."""

from __future__ import annotations

from collections.abc import Callable

from mira_engine.api import (
    BudgetError,
    EngineConfig,
    MachineRates,
    MiraError,
    PlanMade,
    PlanModel,
)

from .engine_client import EngineClient
from .machines import find_machine
from .plan_report import plan_json, plan_lines
from .sanitise import sanitise
from .settings import Settings


class PlanReporter:
    """One plan, as a table or as one JSON object.

    Args:
        machine: A card or a machine file, `None` for this machine.
        is_compact_allowed: Whether INT4 experts as the target may be chosen.
        is_json: Whether one JSON object is printed, also where there is no plan.
    """

    def __init__(self, machine: str | None, *, is_compact_allowed: bool, is_json: bool) -> None:
        self._machine = machine
        self._is_compact_allowed = is_compact_allowed
        self._is_json = is_json

    def report(
        self,
        load_settings: Callable[[], Settings],
        make_client: Callable[[], EngineClient],
        echo: Callable[[str], None],
    ) -> None:
        """Plans and prints.

        Args:
            load_settings: Reads what was asked for.
            make_client: Makes the client; no process is started before the rest is valid.
            echo: Takes lines of standard output.

        Raises:
            BudgetError: Nothing fits; the table has been printed.
            MiraError: There is no plan.
        """
        made: PlanMade | None = None
        failure: MiraError | None = None
        try:
            made = self._ask(load_settings(), make_client)
            if made.refusal:
                failure = BudgetError(made.refusal, hint=made.hint)
        except MiraError as error:
            failure = error
        if self._is_json:
            echo(plan_json(made, failure))
        elif made is not None:
            for line in plan_lines(made):
                echo(sanitise(line))
        if failure is not None:
            raise failure

    def _ask(self, settings: Settings, make_client: Callable[[], EngineClient]) -> PlanMade:
        machine = find_machine(self._machine) if self._machine is not None else None
        with make_client() as client:
            return ask_plan(
                client,
                settings.model,
                settings.engine,
                machine,
                is_compact_allowed=self._is_compact_allowed,
            )


def ask_plan(
    client: EngineClient,
    model: str,
    config: EngineConfig,
    machine: MachineRates | None,
    *,
    is_compact_allowed: bool = False,
) -> PlanMade:
    """Asks the engine for a plan and waits for it.

    Args:
        client: The engine process.
        model: As `PlanModel` takes it.
        config: What was asked for.
        machine: `None` for this one, which is measured.
        is_compact_allowed: Whether INT4 experts as the target may be chosen.

    Raises:
        MiraError: There is no plan, not even one that refuses.
    """
    call = client.submit(
        PlanModel(
            request_id=client.new_request_id(),
            model=model,
            config=config,
            machine=machine,
            is_compact_allowed=is_compact_allowed,
        )
    )
    made = [event for event in call if isinstance(event, PlanMade)]
    return made[-1]
