"""Which system this runs on, where that decides about memory, drivers and disks.

Windows moves a card's memory into the computer's own without a word, WSL 2 is a virtual
machine with a part of the computer's memory, and its Windows drives are slow. What is looked
up is a value; the facts drawn from it are pure. Any thread.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from ..config import format_bytes
from ..events import MachineFact
from ..types import FactMark

WSL_LIBRARIES = "/usr/lib/wsl/lib"
"""Where Windows puts its driver's libraries for Linux."""

_WINDOWS_DRIVES = frozenset({"9p", "drvfs", "virtiofs"})
"""File systems by which WSL shows drives of Windows."""


class HostKind(enum.StrEnum):
    """A system, as far as it differs from others in what concerns us."""

    LINUX = "Linux"
    WSL = "WSL 2"
    """Linux in a virtual machine of Windows."""
    OLD_WSL = "WSL 1"
    """Windows that answers like Linux; it knows no cards."""
    WINDOWS = "Windows"
    OTHER = "another system"

    @property
    def is_wddm(self) -> bool:
        """Whether a card's driver is Windows' own, which spills its memory when that is full."""
        return self in (HostKind.WINDOWS, HostKind.WSL)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSystem:
    """What was looked up.

    Attributes:
        kind: The system.
        has_wsl_driver: Whether Windows' driver has left its libraries for Linux here.
    """

    kind: HostKind
    has_wsl_driver: bool = False


class Mount(Protocol):
    """A file system in its place, as psutil gives it."""

    mountpoint: str
    fstype: str


def look_at_host(root: Path = Path("/"), platform: str = sys.platform) -> HostSystem:
    """Finds out which system this is.

    Args:
        root: Where `proc` and `usr` are.
        platform: As Python names it.
    """
    if platform == "win32":
        return HostSystem(kind=HostKind.WINDOWS)
    if not platform.startswith("linux"):
        return HostSystem(kind=HostKind.OTHER)
    try:
        release = (root / "proc/sys/kernel/osrelease").read_text(encoding="utf-8").lower()
    except (OSError, ValueError):
        release = ""
    if "microsoft" not in release:
        return HostSystem(kind=HostKind.LINUX)
    # The kernel of WSL 1 only claims to be one, with a number that ends in -Microsoft.
    is_old = release.strip().endswith("-microsoft")
    return HostSystem(
        kind=HostKind.OLD_WSL if is_old else HostKind.WSL,
        has_wsl_driver=(root / WSL_LIBRARIES.lstrip("/") / "libcuda.so.1").exists(),
    )


def system_facts(host: HostSystem, total_bytes: int | None) -> Iterator[MachineFact]:
    """Says what the system takes away, and how to get it back.

    Args:
        host: The system.
        total_bytes: Memory that it shows, `None` where a container's limit hides that.
    """
    if host.kind is HostKind.WSL and total_bytes is not None:
        yield MachineFact(
            code="wsl",
            text=f"WSL 2, a virtual machine with {format_bytes(total_bytes)} of the computer's "
            "memory",
            mark=FactMark.NOTE,
            hint="Windows keeps half of its memory unless memory= under [wsl2] in .wslconfig says "
            "otherwise; wsl --shutdown takes the file up.",
        )
    elif host.kind is HostKind.OLD_WSL:
        yield MachineFact(
            code="wsl",
            text="WSL 1, which has no graphics cards and slow disks",
            mark=FactMark.NOTE,
            hint="wsl --set-version <name> 2 turns it into WSL 2.",
        )


def drive_facts(
    folder: Path, host: HostSystem, mounts: Iterable[Mount] | None = None
) -> Iterator[MachineFact]:
    """Says that models lie on a drive of Windows, seen from Linux.

    Args:
        folder: Where models are.
        host: The system.
        mounts: File systems, `None` for those that are there.
    """
    if host.kind not in (HostKind.WSL, HostKind.OLD_WSL):
        return
    mount = _mount_of(folder, psutil.disk_partitions(all=True) if mounts is None else mounts)
    if mount is not None and mount.fstype in _WINDOWS_DRIVES:
        yield MachineFact(
            code="windows-drive",
            text=f"{folder} is on {mount.mountpoint}, a drive of Windows: WSL reads it many times "
            "more slowly than its own disk",
            mark=FactMark.PROBLEM,
            hint="Set MIRA_CHAT_DATA_DIR to a folder of Linux, such as ~/mira-chat, and move the "
            "models there.",
        )


def _mount_of(folder: Path, mounts: Iterable[Mount]) -> Mount | None:
    """Returns the file system that holds a folder: that with the longest path above it."""
    resolved = folder.resolve()
    above = {resolved, *resolved.parents}
    found = [mount for mount in mounts if Path(mount.mountpoint) in above]
    # Of two in one place the later one hides the other.
    return max(
        enumerate(found), key=lambda each: (len(each[1].mountpoint), each[0]), default=(0, None)
    )[1]
