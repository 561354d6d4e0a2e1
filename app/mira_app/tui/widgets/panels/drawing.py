"""Lines, bars and histories of characters, as `Content`. Pure; no sign is by colour alone."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

LABEL, VALUE, FILLED, EMPTY = "$foreground 60%", "bold", "$primary", "$foreground 20%"
TITLE = "bold $primary"

Part = tuple[str, str]
"""Mark and colour of a part of a stacked bar. Within a bar the marks differ, too."""

_STEPS = "▁▂▃▄▅▆▇█"


def title(text: str, value: str = "", *, width: int = 0) -> Content:
    """Returns a section's first line, with its main figure at the right end."""
    gap = " " * max(1, width - len(text) - len(value)) if value else ""
    return Content.assemble((text, TITLE), gap, (value, VALUE))


def row(label: str, value: str, *, width: int) -> Content:
    """Returns a label at the left end of a line and a value at its right end."""
    gap = " " * max(1, width - len(label) - len(value))
    return Content.assemble((label, LABEL), gap, (value, VALUE))


def bar(share: float, width: int) -> Content:
    """Draws a share of 0 to 1; the two parts differ in form as well as in colour."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return Content.assemble(("━" * filled, FILLED), ("╌" * (width - filled), EMPTY))


def widths_of(parts: Sequence[float], width: int) -> list[int]:
    """Shares out characters by size: they add up to `width`, and no part vanishes.

    Where there are more parts than characters the last ones get none.
    """
    total = sum(parts)
    if total <= 0:
        return [0] * len(parts)
    exact = [width * part / total for part in parts]
    shares = [max(int(size), int(part > 0)) for size, part in zip(exact, parts, strict=True)]
    while (surplus := sum(shares) - width) > 0:
        largest = max(range(len(shares)), key=lambda i: (shares[i], i))
        shares[largest] -= min(surplus, max(1, shares[largest] - 1))
    by_rest = sorted(range(len(parts)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_rest[: width - sum(shares)]:
        shares[i] += 1
    return shares


def stacked_bar(sizes: Sequence[float], parts: Sequence[Part], width: int) -> Content:
    """Draws parts of a whole side by side; an empty bar where there is nothing."""
    shares = widths_of(sizes, width)
    if not any(shares):
        return Content.styled("╌" * width, EMPTY)
    pieces = zip(shares, parts, strict=True)
    return Content.assemble(*((mark * share, colour) for share, (mark, colour) in pieces))


def legend(part: Part, label: str, value: str, *, width: int) -> Content:
    """Returns one entry of a stacked bar's legend."""
    mark, colour = part
    gap = " " * max(1, width - 2 - len(label) - len(value))
    return Content.assemble((mark + " ", colour), (label, LABEL), gap, (value, VALUE))


def in_columns(entries: Sequence[Content], *, gap: int = 2) -> list[Content]:
    """Puts entries of one width side by side by twos."""
    space = " " * gap
    return [Content(space).join(entries[i : i + 2]) for i in range(0, len(entries), 2)]


def spark(values: Sequence[float], width: int, *, most: float | None = None) -> Content:
    """Draws the last values as a line of blocks, the newest at the right.

    Args:
        values: 0 or more each.
        width: Characters.
        most: What a full block stands for; the largest value where `None`.
    """
    shown = values[-width:] if width > 0 else []
    top = most if most is not None else max(shown, default=0.0)
    steps = (
        _STEPS[min(7, int(8 * max(0.0, value) / top))] if top > 0 else _STEPS[0] for value in shown
    )
    return Content.styled("".join(steps).rjust(max(0, width)), FILLED)


def short_bytes(num_bytes: float) -> str:
    """Formats bytes in five characters at most: `742M`, `1.3G`."""
    if num_bytes < 1000 * 2**10:
        return f"{num_bytes / 2**10:.0f}K"
    if num_bytes < 1000 * 2**20:
        return f"{num_bytes / 2**20:.0f}M"
    if num_bytes < 1000 * 2**30:
        return f"{num_bytes / 2**30:.{1 if num_bytes < 100 * 2**30 else 0}f}G"
    return f"{num_bytes / 2**40:.1f}T"


def short_count(number: int) -> str:
    """Formats a number in six characters at most: `5210`, `1.3M`."""
    if number < 10**6:
        return str(number)
    return f"{number / 1e6:.1f}M" if number < 10**9 else f"{number / 1e9:.1f}G"


def mib(num_bytes: int) -> str:
    """Formats bytes in short, for pairs such as `800/900 MiB`."""
    return f"{num_bytes / 2**20:.0f}"
