"""Our palettes as Textual themes, and the theme that a setting names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mira_assets.themes import PALETTES, Palette
from mira_engine.api import ConfigError
from textual.theme import BUILTIN_THEMES, Theme


def make_theme(palette: Palette) -> Theme:
    """Makes a theme of a palette."""
    return Theme(
        name=palette.name,
        dark=palette.is_dark,
        ansi=palette.is_ansi,
        variables=dict(palette.variables),
        **palette.colors,  # type: ignore[arg-type]
    )


def make_themes() -> tuple[Theme, ...]:
    """Makes our themes, the default first."""
    return tuple(make_theme(palette) for palette in PALETTES)


def known_themes() -> frozenset[str]:
    """Returns the names of all themes, ours and Textual's."""
    return frozenset({*BUILTIN_THEMES, *(palette.name for palette in PALETTES)})


def check_theme(name: str, known: Iterable[str]) -> None:
    """Checks that there is such a theme.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    known = sorted(known)
    if name not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."
        raise ConfigError(f"There is no theme {name!r}.", hint=hint)
