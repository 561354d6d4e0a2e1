"""Which settings of looks and keys cannot be, for commands that run without the app."""

from __future__ import annotations

from collections.abc import Iterator

from mira_engine.api import ConfigError

from mira_app.setting_fields import InterfaceSettings

from .keymap import check_keymap, known_bindings
from .themes import check_theme, known_themes


def interface_problems(interface: InterfaceSettings) -> Iterator[tuple[str, str, ConfigError]]:
    """Yields the setting, its key in a table of keys (else empty), and what is wrong."""
    try:
        check_theme(interface.theme, known_themes())
    except ConfigError as problem:
        yield "theme", "", problem
    if interface.keymap:
        report = check_keymap(interface.keymap, known_bindings())
        for binding_id, problem in report.problems.items():
            yield "keymap", binding_id, problem
