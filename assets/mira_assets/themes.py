"""Colours of the application: one dark theme, one light, and the terminal's own colours.

Data alone; the terminal interface makes themes of it. Text on its background has a
contrast of at least 4.5 to 1, measured by a test; nothing is said by colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """One theme.

    Attributes:
        name: What the setting `theme` calls it.
        colors: Colour by role; `ansi_*` are the sixteen colours of the terminal.
        variables: Colours of widgets that the roles do not give.
        is_dark: Whether its background is dark.
        is_ansi: Whether the terminal itself chooses how its colours look.
    """

    name: str
    colors: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    is_dark: bool
    is_ansi: bool = False


DARK = Palette(
    name="mira-dark",
    is_dark=True,
    colors={
        "primary": "#7aa2c8",
        "secondary": "#8fb39a",
        "accent": "#c8a878",
        "warning": "#d0a860",
        "error": "#d07878",
        "success": "#86b08a",
        "foreground": "#d4d7dc",
        "background": "#16181c",
        "surface": "#1d2025",
        "panel": "#262a31",
    },
    variables={
        "block-cursor-background": "#2f4a66",
        "block-cursor-foreground": "#f0f2f5",
        "block-cursor-text-style": "bold",
    },
)

LIGHT = Palette(
    name="mira-light",
    is_dark=False,
    colors={
        "primary": "#2b5f92",
        "secondary": "#3c6b4b",
        "accent": "#7a5a1e",
        "warning": "#7d5300",
        "error": "#a02f2f",
        "success": "#2f6b3a",
        "foreground": "#23262b",
        "background": "#f8f7f3",
        "surface": "#efede7",
        "panel": "#e4e1d9",
    },
    variables={
        "block-cursor-background": "#c9d9ea",
        "block-cursor-foreground": "#14171b",
        "block-cursor-text-style": "bold",
    },
)

TERMINAL = Palette(
    name="terminal",
    is_dark=True,
    is_ansi=True,
    colors={
        "primary": "ansi_blue",
        "secondary": "ansi_cyan",
        "accent": "ansi_magenta",
        "warning": "ansi_yellow",
        "error": "ansi_red",
        "success": "ansi_green",
        "foreground": "ansi_default",
        "background": "ansi_default",
        "surface": "ansi_default",
        "panel": "ansi_default",
        "boost": "ansi_default",
    },
    variables={
        "ansi-background": "ansi_default",
        "ansi-foreground": "ansi_default",
        "border-blurred": "ansi_bright_black",
        "block-cursor-foreground": "ansi_bright_white",
        "block-cursor-background": "ansi_blue",
        "block-cursor-text-style": "bold",
        "input-cursor-text-style": "reverse",
        "input-cursor-background": "ansi_default",
        "input-cursor-foreground": "ansi_default",
        "input-selection-background": "ansi_blue",
        "input-selection-foreground": "ansi_bright_white",
        "screen-selection-background": "ansi_blue",
        "screen-selection-foreground": "ansi_bright_white",
    },
)

PALETTES = (DARK, LIGHT, TERMINAL)
