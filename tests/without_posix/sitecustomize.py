"""Shows our packages a system like Windows, before any of them is imported.

Python runs this first in every process whose path begins with this folder, the engine's
included. What only Unix has is refused to our own packages, whose `sys.platform` is
`win32`. Libraries see the system as it is: they choose their ways by its name, and those of
Windows do not run here. Triton is not installed for anybody, files of /proc are not there,
and links are refused.
"""

from __future__ import annotations

import builtins
import errno
import mmap
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = ("mira_app", "mira_engine", "mira_kernels", "mira_assets")
MODULES = ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")


class View(ModuleType):
    """A module of the standard library without some of its names, and with others changed."""

    def __init__(self, module: ModuleType, hidden: tuple[str, ...], **changed: object) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(changed, _module=module, _hidden=hidden)

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._module, name, value)


VIEWS = {
    "os": View(
        os,
        (
            "O_DIRECT", "O_NONBLOCK", "POSIX_FADV_DONTNEED", "chown", "fork", "forkpty",
            "geteuid", "getpgid", "getuid", "killpg", "mkfifo", "nice", "posix_fadvise", "pread",
            "preadv", "pwrite", "pwritev", "sched_getaffinity", "setsid", "statvfs", "uname",
        ),
        name="nt",
    ),
    "signal": View(
        signal, ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "pthread_sigmask", "setitimer")
    ),
    "mmap": View(mmap, ("MADV_HUGEPAGE", "MAP_ANONYMOUS", "MAP_PRIVATE")),
    "sys": View(sys, (), platform="win32"),
}  # fmt: skip

_import = builtins.__import__


def _importing(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    importer = (globals or {}).get("__name__", "").partition(".")[0]
    if level == 0 and importer in OURS:
        if name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in VIEWS:
            return VIEWS[name]
    return _import(name, globals, locals, fromlist, level)


def _not_linking(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "A required privilege is not held by the client")


def _without_proc(method: Any) -> Any:
    def reading(self: Path, *rest: Any, **options: Any) -> Any:
        if self.parts[:2] == ("/", "proc"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        return method(self, *rest, **options)

    return reading


builtins.__import__ = _importing
sys.modules["triton"] = None  # type: ignore[assignment]
os.symlink = _not_linking
for _method in ("read_text", "write_text", "read_bytes"):
    setattr(Path, _method, _without_proc(getattr(Path, _method)))
