"""Takes away what Windows lacks, before anything of ours is imported.

Python runs this first in every process whose path begins with this folder, the engine's
included. Modules that only Unix has are refused to our own packages: libraries choose by
`sys.platform`, which a running system does not survive to be changed. Names that libraries
do without are removed for everybody, and triton is not installed for anybody.
"""

from __future__ import annotations

import builtins
import errno
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil  # noqa: F401 - on Unix it imports what is taken away below

OURS = ("mira_app", "mira_engine", "mira_kernels", "mira_assets")
MODULES = ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
NAMES: dict[ModuleType, tuple[str, ...]] = {
    os: (
        "O_DIRECT", "O_CLOEXEC", "preadv", "pread", "pwritev", "posix_fadvise",
        "POSIX_FADV_DONTNEED", "killpg", "setsid", "fork", "forkpty", "nice",
        "sched_getaffinity", "sched_setaffinity",
        "mkfifo", "chown", "uname",
    ),
    signal: ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM", "pthread_sigmask", "setitimer"),
    mmap: ("MADV_HUGEPAGE", "MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_ANON"),
}  # fmt: skip

_import = builtins.__import__


def _importing(name: str, globals: Any = None, *rest: Any, **options: Any) -> ModuleType:
    importer = (globals or {}).get("__name__", "").partition(".")[0]
    if name.partition(".")[0] in MODULES and importer in OURS:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _import(name, globals, *rest, **options)


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
for _module, _names in NAMES.items():
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)
os.symlink = _not_linking
subprocess.Popen.kill = subprocess.Popen.terminate  # type: ignore[method-assign]
for _method in ("read_text", "write_text", "read_bytes"):
    setattr(Path, _method, _without_proc(getattr(Path, _method)))
