"""How much memory this process may have: the machine's, or less where a container holds it.

The one place that is asked, by loading, planning, preparing and the reports alike. Control
groups of both kinds are read, every group above the process' own included: the tightest one
counts, because the system kills a process that goes over it, pinned memory above all, which
cannot be taken away again. Torch-free; any thread; nothing is kept, since free memory changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT_BYTES = 1 << 60
"""The older interface says "none" by a number that no machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemMemory:
    """Memory as this process may have it.

    Attributes:
        total_bytes: Of the machine or of the tightest group, whichever is less.
        available_bytes: Of that, what nobody holds; what the system keeps of files counts as
            nobody's. No more than a limit of the process itself (`ulimit -v`) leaves it.
        container_bytes: Limit of the tightest group, `None` where none is below the machine's
            memory.
    """

    total_bytes: int
    available_bytes: int
    container_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Interface:
    """Where one kind of control groups says what.

    Attributes:
        tops: Folders in which its topmost group may be.
        limits: Files with a limit each. A process above `memory.high` is not killed but slowed
            to a crawl, so that it is as good as a limit.
        usage: File with the bytes held.
        file_cache: Fields of `memory.stat` that are given back when memory is short.
    """

    tops: tuple[str, ...]
    limits: tuple[str, ...]
    usage: str
    file_cache: tuple[str, ...]


_UNIFIED = _Interface(
    ("sys/fs/cgroup", "sys/fs/cgroup/unified"),
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
)
_OLDER = _Interface(
    ("sys/fs/cgroup/memory",),
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def system_memory(root: Path = Path("/")) -> SystemMemory:
    """Asks the machine, and every control group that holds this process.

    Args:
        root: Where `proc` and `sys` are.
    """
    import psutil  # Here, because the app imports this module to print its version, too.

    memory = psutil.virtual_memory()
    groups = [group for group in _groups(root) if group[0] < memory.total]
    limits = [limit for limit, _ in groups]
    return SystemMemory(
        total_bytes=min([memory.total, *limits]),
        available_bytes=max(
            0, min([memory.available, *(free for _, free in groups), *_own_room()])
        ),
        container_bytes=min(limits, default=None),
    )


def _own_room() -> Iterator[int]:
    """Yields the bytes that a limit of this process on its addresses leaves it."""
    try:
        import resource
    except ImportError:  # Windows.
        return
    import psutil

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit - psutil.Process().memory_info().vms


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yields limit and free bytes of each group with a limit."""
    for folder, interface in _folders(root):
        found = [_number(folder / name) for name in interface.limits]
        limits = [limit for limit in found if limit is not None and limit < _NO_LIMIT_BYTES]
        if limits:
            used = (_number(folder / interface.usage) or 0) - _file_cache(folder, interface)
            yield min(limits), min(limits) - max(0, used)


def _folders(root: Path) -> Iterator[tuple[Path, _Interface]]:
    """Yields the folders of the process' own group and of all above it.

    In a container the path may lead nowhere, while what is mounted at the top is the
    container's own group; hence every folder on the way that is there.
    """
    for interface, path in _own_groups(root):
        for group in (path, *path.parents):
            for top in interface.tops:
                folder = root / top / group.relative_to("/")
                if folder.is_dir():
                    yield folder, interface


def _own_groups(root: Path) -> Iterator[tuple[_Interface, PurePosixPath]]:
    """Yields the groups that the system names as this process' own, by interface."""
    try:
        # The name of a group is bytes that need not be text.
        path = root / "proc/self/cgroup"
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # A group outside of what this process may see begins with `..`.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if not controllers:
            yield _UNIFIED, PurePosixPath("/", *parts)
        elif "memory" in controllers.split(","):
            yield _OLDER, PurePosixPath("/", *parts)


def _file_cache(folder: Path, interface: _Interface) -> int:
    """Bytes of files that the group's usage counts and the system gives back."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(" ", 1) for line in lines if " " in line)
        return sum(int(fields.get(name, 0)) for name in interface.file_cache)
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    """Returns a file's number, `None` where there is none; `max` is none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
