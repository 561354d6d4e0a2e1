"""The C++ kernels: compiled once by the user's compiler, kept in a folder, loaded as operators.

Owns the library files in that folder and the operators of torch's namespace `mira`. Knows
no weights: that is `dispatch`. `build` may run in any thread or process, also in two at
once; `load` belongs before a process' first product, or between two replies, because the
bits of results change with it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import cpp_extension

from . import native_proof

MAX_ROWS = 48
"""Most rows that dense and INT8 operators multiply themselves; more go to torch."""

_SOURCES = Path(__file__).parent / "csrc"
_MAIN_SOURCE = "mira_cpu.cpp"
_PREFIX, _SUFFIX = "mira_cpu-", ".so"
_COMPILERS = ("c++", "g++", "clang++")
# torch's own threads run the loops (`torch_parallel_for`), so nothing of OpenMP is needed:
# a second OpenMP library would bring a second pool of threads.
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-w", "-fno-math-errno")
_BUILD_PREFIX = "mira_build-"
_BUILD_TIMEOUT_S = 600
_LEFT_OVER_S = 3600
_PROOF_TIMEOUT_S = 120

_lock = threading.Lock()
_loaded: Path | None = None


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """Whether the kernels can be used.

    Attributes:
        is_available: They are built (after `build`), or loaded and proved (after `load`).
        reason: One plain sentence where they are not, else empty.
    """

    is_available: bool
    reason: str = ""


def compiler() -> str | None:
    """Returns the C++ compiler's path: `$CXX`, else the first of the usual names.

    None where the system is not supported.
    """
    if not is_supported():
        return None
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        return shutil.which(chosen)
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def compiler_problem() -> tuple[str, str]:
    """Says why `compiler` found none, and what to do about it."""
    if not is_supported():
        return "they are not built on Windows", "In WSL 2 they are; here everything works without."
    named = os.environ.get("CXX", "").strip()
    why = f"$CXX names {named}, which is not there" if named else "no C++ compiler was found"
    return why, "Install g++ or clang, then start again."


def is_supported() -> bool:
    """Whether the kernels can be built on this system.

    On Windows torch's libraries are those of another compiler than the sources and their flags
    are written for.
    """
    return sys.platform != "win32"


@functools.cache
def _processor() -> str:
    """Model and flags of the processor: what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    found = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(found.get(name, "") for name in wanted)


def _sources() -> list[Path]:
    return sorted(path for path in _SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def library_path(cache_dir: Path) -> Path:
    """Returns where the library of these sources, this torch and processor lies."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (
        torch.__version__,
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
        " ".join(_FLAGS),
        _processor(),
    ):
        digest.update(part.encode() + b"\0")
    return cache_dir / f"{_PREFIX}{digest.hexdigest()[:20]}{_SUFFIX}"


def is_built(cache_dir: Path) -> bool:
    """Whether a library that fits lies in `cache_dir`, whole.

    A damaged one must not be loaded: the process would die of it.
    """
    path = library_path(cache_dir)
    try:
        return _digest_path(path).read_text(encoding="ascii") == _digest_of(path)
    except (OSError, ValueError):
        return False


def _digest_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def build(cache_dir: Path, *, is_cancelled: Callable[[], bool] = lambda: False) -> NativeStatus:
    """Compiles the kernels into `cache_dir`, as a child process of low priority.

    The new library is proved in a child process before it gets its name; older ones are
    removed. A library that is there already is made anew. Asked ten times a second,
    `is_cancelled` ends it.
    """
    chosen = compiler()
    if chosen is None:
        return NativeStatus(False, f"Native kernels are off: {compiler_problem()[0]}.")
    target = library_path(cache_dir)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_BUILD_PREFIX, dir=cache_dir) as folder:
            made = Path(folder) / target.name
            status = _compile(chosen, made, is_cancelled=is_cancelled)
            if status.is_available:
                status = _prove_in_child(made, is_cancelled)
            if status.is_available:
                _digest_path(target).write_text(_digest_of(made), encoding="ascii")
                os.replace(made, target)
    except OSError as error:
        return NativeStatus(False, f"Native kernels are off: {cache_dir} failed ({error}).")
    if status.is_available:
        _remove_older(cache_dir, target)
    return status


def _run_child(
    command: list[str],
    timeout_s: float,
    is_cancelled: Callable[[], bool],
    env: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Runs a command to its end. Returns its exit status and what it wrote to stderr.

    Raises:
        subprocess.TimeoutExpired: It took too long, or somebody asked to stop; it is killed.
        OSError: It cannot be started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,  # So that a compiler's own children end with it.
    )
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            _, told = process.communicate(timeout=0.1)
            return process.returncode, told
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline and not is_cancelled():
                continue
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            process.communicate()
            raise


def _compile(
    chosen: str,
    made: Path,
    extra_flags: tuple[str, ...] = (),
    *,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> NativeStatus:
    command = [chosen, *_FLAGS, *extra_flags]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [str(_SOURCES / _MAIN_SOURCE), "-o", str(made)]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-ltorch_cpu", "-ltorch", "-lc10"]
    nice = shutil.which("nice")
    if nice is not None:
        command = [nice, "-n", "10", *command]
    try:
        code, told = _run_child(command, _BUILD_TIMEOUT_S, is_cancelled)
    except subprocess.TimeoutExpired:
        reason = "it was stopped" if is_cancelled() else f"took over {_BUILD_TIMEOUT_S} s"
        return NativeStatus(False, f"Native kernels are off: {chosen}: {reason}.")
    except OSError as error:
        return NativeStatus(False, f"Native kernels are off: {chosen} did not run ({error}).")
    if code == 0 and made.is_file():
        return NativeStatus(True)
    lines = [line for line in told.splitlines() if "error" in line]
    lines = lines or told.splitlines()[-1:] or [f"exit status {code}"]
    return NativeStatus(
        False, f"Native kernels are off: {chosen} failed ({lines[0].strip()[:200]})."
    )


def _prove_in_child(
    library: Path, is_cancelled: Callable[[], bool] = lambda: False
) -> NativeStatus:
    """Loads and proves a new library where a forbidden instruction does no harm."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from mira_kernels import native\n"
        "sys.exit(native._load_file(Path(sys.argv[1])).reason or 0)"
    )
    package = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", code, str(library), package]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        status, told = _run_child(command, _PROOF_TIMEOUT_S, is_cancelled, environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        return NativeStatus(False, f"Native kernels are off: their trial did not run ({error}).")
    if status == 0:
        return NativeStatus(True)
    if status < 0:
        return NativeStatus(
            False, f"Native kernels are off: they died of signal {-status} when tried."
        )
    lines = told.strip().splitlines() or ["no message"]
    return NativeStatus(False, lines[-1])


def _remove_older(cache_dir: Path, current: Path) -> None:
    """Removes other libraries, and what builds that were killed left an hour ago or more."""
    for folder in cache_dir.glob(f"{_BUILD_PREFIX}*"):
        if time.time() - folder.stat().st_mtime > _LEFT_OVER_S:
            shutil.rmtree(folder, ignore_errors=True)
    for path in cache_dir.glob(f"{_PREFIX}*{_SUFFIX}"):
        if path != current:
            path.unlink(missing_ok=True)
            _digest_path(path).unlink(missing_ok=True)


def load(cache_dir: Path) -> NativeStatus:
    """Loads the library and proves it on small products; never builds.

    Call it before the first product or between replies. A library that does not load or
    computes wrongly is removed, so that the next `build` makes it anew.
    """
    if _loaded is not None:
        return NativeStatus(True)
    path = library_path(cache_dir)
    if not is_built(cache_dir):
        return NativeStatus(False, "Native kernels are off: they are not built.")
    status = _load_file(path)
    if not status.is_available:
        path.unlink(missing_ok=True)
    return status


def is_loaded() -> bool:
    """Whether the operators can be called in this process."""
    return _loaded is not None


_failed: NativeStatus | None = None


def _load_file(path: Path) -> NativeStatus:
    global _failed, _loaded
    with _lock:
        if _loaded is not None:
            return NativeStatus(True)
        if _failed is not None:
            return _failed
        try:
            torch.ops.load_library(str(path))
        except (OSError, RuntimeError) as error:
            return NativeStatus(
                False, f"Native kernels are off: {path.name} does not load ({error})."
            )
        try:
            native_proof.register_shapes()
            wrong = native_proof.find_wrong()
        except RuntimeError as error:
            wrong = f"an operator failed ({error})"
        if wrong is not None:
            # The operators are registered now; a second library could not be.
            _failed = NativeStatus(False, f"Native kernels are off: {wrong}.")
            return _failed
        _loaded = path
        return NativeStatus(True)
