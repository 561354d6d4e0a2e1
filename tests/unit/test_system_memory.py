"""Memory is the machine's or the tightest container's, whichever is less, wherever it is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from mira_engine.system_memory import system_memory

GIB = 1 << 30
MACHINE = SimpleNamespace(total=64 * GIB, available=48 * GIB)
UNIFIED, OLDER = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB, of which 48 are free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)


def write(root: Path, place: str, **files: object) -> None:
    """Writes files of a group; `max` stands for `memory.max`, and so on."""
    (root / place).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / place / f"memory.{name}").write_text(f"{text}\n", encoding="ascii")


def in_group(root: Path, *lines: str) -> None:
    """Says which groups the process is in."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_machine_without_groups_has_its_own_memory(tmp_path: Path) -> None:
    memory = system_memory(tmp_path)

    assert (memory.total_bytes, memory.available_bytes) == (64 * GIB, 48 * GIB)
    assert memory.container_bytes is None


def test_container_of_the_newer_kind_leaves_what_it_does_not_hold(tmp_path: Path) -> None:
    in_group(tmp_path, "0::/")
    write(tmp_path, UNIFIED, max=8 * GIB, current=3 * GIB)

    memory = system_memory(tmp_path)

    assert memory.total_bytes == memory.container_bytes == 8 * GIB
    assert memory.available_bytes == 5 * GIB


def test_container_of_the_older_kind_leaves_what_it_does_not_hold(tmp_path: Path) -> None:
    in_group(tmp_path, "11:cpu,cpuacct:/x", "4:memory:/", "0::/")
    write(tmp_path, OLDER, limit_in_bytes=8 * GIB, usage_in_bytes=3 * GIB)

    assert system_memory(tmp_path).available_bytes == 5 * GIB


@pytest.mark.parametrize(
    ("place", "files", "line"),
    [
        (UNIFIED, {"max": 8 * GIB, "current": 8 * GIB}, "0::/"),
        (OLDER, {"limit_in_bytes": 8 * GIB, "usage_in_bytes": 8 * GIB}, "4:memory:/"),
    ],
)
def test_cached_files_count_as_free(tmp_path: Path, place: str, files: dict, line: str) -> None:
    prefix = "" if place == UNIFIED else "total_"
    stat = f"anon 5\n{prefix}inactive_file {2 * GIB}\n{prefix}active_file {GIB}\nfile 77"
    in_group(tmp_path, line)
    write(tmp_path, place, stat=stat, **files)

    assert system_memory(tmp_path).available_bytes == 3 * GIB


def test_groups_above_count_as_well_and_the_tightest_decides(tmp_path: Path) -> None:
    in_group(tmp_path, "0::/user.slice/chat.scope")
    write(tmp_path, UNIFIED)
    write(tmp_path, f"{UNIFIED}/user.slice", max=16 * GIB, current=14 * GIB)
    write(tmp_path, f"{UNIFIED}/user.slice/chat.scope", max=8 * GIB, current=GIB)

    memory = system_memory(tmp_path)

    assert memory.container_bytes == 8 * GIB
    assert memory.available_bytes == 2 * GIB


def test_path_that_leads_nowhere_means_the_group_that_is_mounted(tmp_path: Path) -> None:
    in_group(tmp_path, "9:memory:/docker/0123", "0::/../../docker/0123")
    write(tmp_path, OLDER, limit_in_bytes=4 * GIB, usage_in_bytes=GIB)

    assert system_memory(tmp_path).available_bytes == 3 * GIB


def test_throttled_group_has_no_more_than_its_throttle(tmp_path: Path) -> None:
    in_group(tmp_path, "0::/")
    write(tmp_path, UNIFIED, max="max", high=6 * GIB, current=2 * GIB)

    assert system_memory(tmp_path).available_bytes == 4 * GIB


@pytest.mark.parametrize(
    "files",
    [{"max": "max"}, {"limit_in_bytes": 9223372036854771712}, {"max": 100 * GIB}, {"max": "?"}],
    ids=["newer-none", "older-none", "more-than-the-machine", "unreadable"],
)
def test_group_without_a_limit_that_holds_changes_nothing(tmp_path: Path, files: dict) -> None:
    in_group(tmp_path, "4:memory:/", "0::/")
    write(tmp_path, OLDER if "limit_in_bytes" in files else UNIFIED, **files)

    memory = system_memory(tmp_path)

    assert memory.available_bytes == 48 * GIB
    assert memory.container_bytes is None


def test_group_that_is_full_leaves_nothing_and_never_less(tmp_path: Path) -> None:
    in_group(tmp_path, "0::/")
    write(tmp_path, UNIFIED, max=GIB, current=2 * GIB)

    assert system_memory(tmp_path).available_bytes == 0


def test_machine_with_less_free_than_its_container_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MACHINE, "available", GIB)
    in_group(tmp_path, "0::/")
    write(tmp_path, UNIFIED, max=8 * GIB, current=0)

    assert system_memory(tmp_path).available_bytes == GIB


def test_nothing_else_asks_how_much_memory_there_is(repository: Path) -> None:
    asking = [
        path.relative_to(repository).as_posix()
        for folder in ("app", "engine", "kernels")
        for path in sorted((repository / folder).rglob("*.py"))
        if "virtual_memory" in path.read_text(encoding="utf-8")
    ]

    assert asking == ["engine/mira_engine/system_memory.py"]


def test_group_whose_name_is_no_text_is_found(tmp_path: Path) -> None:
    in_group(tmp_path)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/\xff\n")
    write(tmp_path, f"{UNIFIED}/\udcff", max=8 * GIB, current=3 * GIB)

    assert system_memory(tmp_path).container_bytes == 8 * GIB


def test_figure_of_the_files_that_is_no_number_is_none(tmp_path: Path) -> None:
    in_group(tmp_path, "0::/")
    stat = "inactive_file many\nactive_file 4096"
    write(tmp_path, UNIFIED, max=8 * GIB, current=3 * GIB, stat=stat)

    assert system_memory(tmp_path).available_bytes == 5 * GIB


def test_limit_of_the_process_itself_leaves_what_it_has_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resource = pytest.importorskip("resource")
    taken = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (taken + (1 << 20), taken))

    assert 0 <= system_memory().available_bytes <= 1 << 20
