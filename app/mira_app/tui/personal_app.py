"""An app that looks as its person's settings say, keeps what they change, and tells once.

Knows themes, keys, the settings file and toasts; no screen and no chat. Files are written
in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from mira_engine.api import ConfigError, MiraError
from textual.notifications import SeverityLevel
from textual.theme import Theme

from mira_app.paths import AppPaths
from mira_app.sanitise import sanitise
from mira_app.setting_fields import InterfaceSettings

from .ordered_keys import OrderedKeysApp
from .themes import check_theme, make_themes

PROBLEM_S = 12.0
"""Seconds that a problem is shown; F1 keeps it among the notes."""


class PersonalApp(OrderedKeysApp):
    """What `MiraApp` is beside its screens.

    Args of the constructor: how it is to look; where files are, `None` to keep nothing; what
    is wrong from the beginning.
    """

    def __init__(
        self,
        interface: InterfaceSettings,
        paths: AppPaths | None,
        problems: Sequence[MiraError],
    ) -> None:
        super().__init__()
        self.interface = interface
        self.paths = paths
        self.problems = list(problems)
        self._kept_theme = interface.theme
        self._toasts: dict[str, float] = {}

    def dress(self) -> None:
        """Takes theme and keys into use; `tell_problems` is for when a screen is there."""
        self._use_themes()
        self._use_keymap()

    def _use_themes(self) -> None:
        for theme in make_themes():
            self.register_theme(theme)
        self.theme = self.own_theme_names[0]
        try:
            check_theme(self.interface.theme, self.available_themes)
            self.theme = self.interface.theme
        except ConfigError as problem:
            self.problems.append(self._placed(problem, "theme", self.interface.theme))
        self.theme_changed_signal.subscribe(self, self._keep_theme, immediate=True)

    def _use_keymap(self) -> None:
        if self.interface.keymap:
            from .keymap import check_keymap, known_bindings

            report = check_keymap(self.interface.keymap, known_bindings())
            self.problems += [
                self._placed(problem, "keymap", self.interface.keymap, binding_id)
                for binding_id, problem in report.problems.items()
            ]
            self.set_keymap(report.keymap)

    def _placed(self, problem: ConfigError, name: str, value: object, key: str = "") -> ConfigError:
        """Says where the settings file has what is wrong, where it is there that it is."""
        if self.paths is None:
            return problem
        from mira_app.settings_file import read_settings_file

        place = read_settings_file(self.paths.config).place_of(name, value, key)
        return ConfigError(f"{place}{problem.message}", hint=problem.hint)

    # -- settings that change here

    @property
    def own_theme_names(self) -> list[str]:
        """Names of our own themes, the default first."""
        return [theme.name for theme in make_themes()]

    def change_theme(self, name: str) -> None:
        """Changes the colours, and keeps them for the next time."""
        self.theme = name

    def _keep_theme(self, theme: Theme) -> None:
        if theme.name != self._kept_theme:
            self._kept_theme = theme.name
            self.keep_settings({"theme": theme.name})

    def keep_settings(self, changes: dict[str, object], *, is_told: bool = False) -> None:
        """Writes settings by name to the settings file; `is_told` says so when it is done."""
        if self.paths is not None:
            self.run_worker(self._write_settings(changes, is_told), group="settings")

    async def _write_settings(self, changes: dict[str, object], is_told: bool) -> None:
        from mira_app.settings_file import change_settings

        assert self.paths is not None
        try:
            await asyncio.to_thread(change_settings, self.paths.config, changes)
        except MiraError as error:
            self.tell_problem(error)
        else:
            if is_told:
                self.notify(f"Written to {self.paths.config}.", markup=False)

    # -- telling

    def tell_problems(self) -> None:
        """Shows what is wrong so far."""
        for problem in self.problems:
            self._toast(problem)

    def tell_problem(self, problem: MiraError) -> None:
        """Shows what went wrong, and keeps it among the notes of the help."""
        if str(problem) not in [str(known) for known in self.problems]:
            self.problems.append(problem)
        self._toast(problem)

    def _toast(self, problem: MiraError) -> None:
        text = sanitise(f"{problem.message}\n{problem.hint}".strip())
        self.notify(text, severity="warning", timeout=PROBLEM_S, markup=False)

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """Shows a toast, unless it is still there from before."""
        now = time.monotonic()
        shown_s = self.NOTIFICATION_TIMEOUT if timeout is None else timeout
        self._toasts = {text: end for text, end in self._toasts.items() if end > now}
        if message not in self._toasts:
            self._toasts[message] = now + shown_s
            super().notify(message, title=title, severity=severity, timeout=timeout, markup=markup)
