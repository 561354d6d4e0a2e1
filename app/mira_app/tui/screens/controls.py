"""What of a loaded model can be changed while one chats: budget, K, precision, prefetch.

Knows the configuration in force and the memory plan; whoever opened it carries the change
out, when it posts `Changed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mira_engine.api import (
    LIVE_FIELDS,
    MAX_DRAFT_TOKENS,
    ConfigError,
    EngineConfig,
    MemoryAmount,
    MemoryPlan,
    Precision,
    format_bytes,
)
from textual import getters, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Button, Checkbox, Input, RadioButton, RadioSet, Static

from mira_app.sanitise import sanitise
from mira_app.tui.footer_keys import KeyFooter

AUTO = "auto"

_NARROW_COLUMNS = 64
_SHORT_ROWS = 20

_ABOUT = {
    Precision.NESTED: "INT8 with its draft inside",
    Precision.INT8: "8 bits",
    Precision.INT4: "4 bits, smallest",
    Precision.BF16: "as published",
    Precision.FLOAT32: "32 bits",
}


class ControlInput(Input):
    """A field; says in the footer what Enter does."""

    BINDINGS = [Binding("enter", "submit", "Apply", id="controls.submit")]


class ControlsScreen(ModalScreen[None]):
    """The live controls. Enter applies, Esc leaves all as it is.

    Args:
        current: The configuration in force.
        plan: The memory plan in force, `None` where nothing is loaded.
        is_k_auto: Whether a governor chooses K.
        prepared: Precisions that the model can be loaded in.
    """

    CSS_PATH = "controls.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_NARROW_COLUMNS, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (_SHORT_ROWS, "-tall")]
    BINDINGS = [
        Binding("escape,f2", "dismiss", "Leave as it is", id="controls.close"),
        Binding("up", "app.focus_previous", "Field above", show=False, id="controls.up"),
        Binding("down", "app.focus_next", "Field below", show=False, id="controls.down"),
    ]

    @dataclass
    class Changed(Message):
        """The person wants this configuration from the next turn on."""

        config: EngineConfig

    budget_input = getters.query_one("#budget", Input)
    k_input = getters.query_one("#k", Input)
    precisions = getters.query_one("#precision", RadioSet)
    prefetch = getters.query_one("#prefetch", Checkbox)
    apply_button = getters.query_one("#apply", Button)

    def __init__(
        self,
        current: EngineConfig,
        plan: MemoryPlan | None,
        is_k_auto: bool,
        prepared: Sequence[Precision] = (),
    ) -> None:
        super().__init__()
        self._current = current
        self._plan = plan
        self._is_k_auto = is_k_auto
        self._prepared = tuple(dict.fromkeys([*prepared, current.precision]))

    def compose(self) -> ComposeResult:
        """Lays out one line a control, each with what it means, and what would happen."""
        current = self._current
        with Vertical(id="controls"):
            with Horizontal(classes="row"):
                yield Static("Budget", classes="name")
                yield ControlInput(
                    AUTO if current.budget is None else str(current.budget),
                    placeholder=f"{AUTO}, 40%, 2GB",
                    compact=True,
                    id="budget",
                )
                yield Static(id="budget-note", classes="about")
            with Horizontal(classes="row"):
                yield Static("K", classes="name")
                yield ControlInput(
                    AUTO if self._is_k_auto else str(self._k_in_force),
                    placeholder=f"{AUTO}, 0 to {MAX_DRAFT_TOKENS}",
                    compact=True,
                    id="k",
                )
                yield Static(id="k-note", classes="about")
            with Horizontal(classes="row", id="precisions"):
                yield Static(id="precision-name", classes="name")
                with RadioSet(id="precision", compact=True):
                    for precision in self._prepared:
                        yield RadioButton(
                            f"{precision}: {_ABOUT[precision]}",
                            value=precision is current.precision,
                        )
            with Horizontal(classes="row"):
                yield Static("Prefetch", classes="name")
                yield Checkbox(
                    "",
                    current.is_prefetch_enabled,
                    compact=True,
                    id="prefetch",
                )
            yield Static(id="outcome")
            with Horizontal(id="buttons"):
                yield Button("Apply", variant="primary", compact=True, id="apply")
                yield Button("Leave as it is", compact=True, id="leave")
        yield KeyFooter()

    @property
    def _k_in_force(self) -> int:
        if self._current.num_draft_tokens is not None:
            return self._current.num_draft_tokens
        return self._plan.num_draft_tokens if self._plan is not None else 0

    def on_mount(self) -> None:
        """Names the dialog and says what is in force."""
        self.query_one("#controls").border_title = "Live controls"
        self._show()
        self.budget_input.focus()

    # -- what is written ---------------------------------------------------------------------

    def wanted(self) -> EngineConfig:
        """Returns the configuration as it is written now.

        Raises:
            ConfigError: A field cannot be used; says which and what would do.
        """
        return replace(
            self._current,
            budget=self._wanted_budget(),
            num_draft_tokens=self._wanted_k(),
            precision=self._wanted_precision(),
            is_prefetch_enabled=self.prefetch.value,
        )

    def _wanted_budget(self) -> MemoryAmount | None:
        text = self.budget_input.value.strip()
        current = self._current.budget
        if text.lower() in ("", AUTO):
            return None
        if current is not None and text == str(current):
            return current  # What is shown is rounded.
        return MemoryAmount.parse(text)

    def _wanted_k(self) -> int | None:
        text = self.k_input.value.strip()
        if text.lower() in ("", AUTO):
            return None
        if not text.isdecimal():
            hint = f"Write {AUTO}, or 0 to {MAX_DRAFT_TOKENS} draft tokens."
            raise ConfigError.for_field("K", text, hint)
        return int(text)

    def _wanted_precision(self) -> Precision:
        index = self.precisions.pressed_index
        return self._prepared[index] if index >= 0 else self._current.precision

    # -- what is shown -----------------------------------------------------------------------

    @on(Input.Changed)
    @on(RadioSet.Changed)
    @on(Checkbox.Changed)
    def _show(self) -> None:
        """Says for each field what it means, and for all what applying would do."""
        self._note(self.query_one("#budget-note", Static), self.budget_input, self._budget_note)
        self._note(self.query_one("#k-note", Static), self.k_input, self._k_note)
        # In words, too: a mark that differs by its colour alone is none without colours.
        chosen = Content.assemble("Precision\n", (str(self._wanted_precision()), "not bold"))
        self.query_one("#precision-name", Static).update(chosen)
        state = "on" if self.prefetch.value else "off"
        self.prefetch.label = Content(f"{state}: fetch experts before they are needed")
        outcome = self.query_one("#outcome", Static)
        try:
            text, is_valid = self._outcome(self.wanted()), True
        except ConfigError as error:
            is_told = bool(self.query(".about.-wrong"))
            text = "A field is wrong, see beside it." if is_told else str(error)
            is_valid = False
        outcome.update(Content(sanitise(text)))
        outcome.set_class(not is_valid, "-wrong")
        self.apply_button.disabled = not is_valid

    def _note(self, note: Static, field: Input, describe: Callable[[], str]) -> None:
        try:
            text, is_valid = describe(), True
        except ConfigError as error:
            text, is_valid = error.hint, False
        note.update(Content(sanitise(text)))
        for widget in (note, field):
            widget.set_class(not is_valid, "-wrong")

    def _budget_note(self) -> str:
        amount, plan = self._wanted_budget(), self._plan
        if plan is None:
            return "memory for experts"
        if amount is None:
            return f"as memory allows; now {format_bytes(plan.budget_bytes)}"
        num_bytes = amount.resolve(plan.reference_bytes)
        share = num_bytes / plan.reference_bytes
        return f"{format_bytes(num_bytes)}, {share:.0%} of the experts in INT8"

    def _k_note(self) -> str:
        k = self._wanted_k()
        if k is None:
            return f"the engine chooses, up to {MAX_DRAFT_TOKENS} draft tokens"
        if k > MAX_DRAFT_TOKENS:
            raise ConfigError.for_field("K", k, f"Give 0 to {MAX_DRAFT_TOKENS} draft tokens.")
        return "no drafting" if k == 0 else f"draft tokens a round, fixed at {k}"

    def _outcome(self, wanted: EngineConfig) -> str:
        changed = self._current.changed_fields(wanted)
        if not changed:
            return "Nothing is changed."
        if not changed <= LIVE_FIELDS:
            return (
                "The model is loaded anew before the next turn; the experts worth most come "
                "back, and the chat is read again."
            )
        if wanted.num_draft_tokens != 0 and not self._has_draft:
            return "At the next turn. If a draft has to be loaded, the model is loaded anew."
        return "At the next turn; the cached experts and the chat stay."

    @property
    def _has_draft(self) -> bool:
        plan = self._plan
        return plan is not None and (plan.num_draft_tokens > 0 or plan.draft_bytes > 0)

    # -- what is done ------------------------------------------------------------------------

    @on(Input.Submitted)
    @on(Button.Pressed, "#apply")
    def action_apply(self) -> None:
        """Posts the change and closes; with a wrong field it stays."""
        try:
            wanted = self.wanted()
        except ConfigError:
            self.app.bell()
            return
        if self._current.changed_fields(wanted):
            self.post_message(self.Changed(wanted))
        self.dismiss()

    @on(Button.Pressed, "#leave")
    def _leave(self) -> None:
        self.dismiss()
