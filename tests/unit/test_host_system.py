"""Windows and WSL are told from Linux, and what they take away is said with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from mira_engine.runtime.host_system import (
    HostKind,
    HostSystem,
    drive_facts,
    look_at_host,
    system_facts,
)
from mira_engine.types import FactMark

GIB = 1 << 30
WSL = HostSystem(kind=HostKind.WSL)


@dataclass(frozen=True)
class FakeMount:
    """A file system in its place."""

    mountpoint: str
    fstype: str


MOUNTS = [
    FakeMount("/", "ext4"),
    FakeMount("/mnt/c", "9p"),
    FakeMount("/mnt/c/fast", "ext4"),
    FakeMount("/mnt/d", "drvfs"),
]


def _root(folder: Path, release: str) -> Path:
    (folder / "proc/sys/kernel").mkdir(parents=True)
    (folder / "proc/sys/kernel/osrelease").write_text(release, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("release", "kind"),
    [
        ("5.15.167.4-microsoft-standard-WSL2\n", HostKind.WSL),
        ("6.6.87.2-microsoft-standard-WSL2+\n", HostKind.WSL),
        ("4.4.0-19041-Microsoft\n", HostKind.OLD_WSL),
        ("6.8.0-45-generic\n", HostKind.LINUX),
    ],
)
def test_kernel_release_tells_wsl_from_linux(tmp_path: Path, release: str, kind: HostKind) -> None:
    assert look_at_host(_root(tmp_path, release), "linux").kind is kind


@pytest.mark.parametrize(
    ("platform", "kind"),
    [("win32", HostKind.WINDOWS), ("darwin", HostKind.OTHER), ("linux", HostKind.LINUX)],
)
def test_system_without_proc_is_told_by_its_name(
    tmp_path: Path, platform: str, kind: HostKind
) -> None:
    assert look_at_host(tmp_path, platform).kind is kind


def test_only_windows_drivers_move_memory_by_themselves() -> None:
    assert {kind for kind in HostKind if kind.is_wddm} == {HostKind.WSL, HostKind.WINDOWS}


def test_driver_that_windows_leaves_in_wsl_is_found(tmp_path: Path) -> None:
    root = _root(tmp_path, "5.15.167.4-microsoft-standard-WSL2")
    assert not look_at_host(root, "linux").has_wsl_driver
    (root / "usr/lib/wsl/lib").mkdir(parents=True)
    (root / "usr/lib/wsl/lib/libcuda.so.1").touch()

    assert look_at_host(root, "linux").has_wsl_driver


def test_wsl_says_what_memory_it_has_and_how_to_get_more() -> None:
    (fact,) = system_facts(WSL, 8 * GIB)

    assert fact.mark is FactMark.NOTE
    assert "8.0 GiB" in fact.text
    assert ".wslconfig" in fact.hint
    assert list(system_facts(WSL, None)) == [], "a container's limit is not Windows' doing"
    assert list(system_facts(HostSystem(kind=HostKind.LINUX), GIB)) == []


@pytest.mark.parametrize(
    ("folder", "is_slow"),
    [
        ("/mnt/c/Users/me/models", True),
        ("/mnt/c", True),
        ("/mnt/d/models", True),
        ("/mnt/c/fast/models", False),
        ("/mnt/cc/models", False),
        ("/home/me/models", False),
    ],
)
def test_models_on_a_drive_of_windows_are_a_problem(folder: str, is_slow: bool) -> None:
    facts = list(drive_facts(Path(folder), WSL, MOUNTS))

    assert [fact.code for fact in facts] == ["windows-drive"] * is_slow
    assert all("MIRA_CHAT_DATA_DIR" in fact.hint for fact in facts)


@pytest.mark.parametrize("mounts", [[FakeMount("/", "9p")], []])
def test_slow_drive_is_no_concern_of_other_systems(mounts: Sequence[FakeMount]) -> None:
    linux = HostSystem(kind=HostKind.LINUX)

    assert list(drive_facts(Path("/mnt/c"), linux, mounts)) == []


def test_later_mount_in_the_same_place_hides_the_earlier() -> None:
    mounts = [FakeMount("/data", "9p"), FakeMount("/data", "ext4")]

    assert list(drive_facts(Path("/data/models"), WSL, mounts)) == []
    assert list(drive_facts(Path("/data/models"), WSL, mounts[::-1]))
