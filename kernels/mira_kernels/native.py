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
from torch import Tensor
from torch.utils import cpp_extension

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
            _register_fakes()
            wrong = _find_wrong()
        except RuntimeError as error:
            wrong = f"an operator failed ({error})"
        if wrong is not None:
            # The operators are registered now; a second library could not be.
            _failed = NativeStatus(False, f"Native kernels are off: {wrong}.")
            return _failed
        _loaded = path
        return NativeStatus(True)


def _find_wrong() -> str | None:
    """Multiplies small matrices of every kind, and says what is wrong, if anything is."""
    from . import packing, reference
    from .split import join_draft, split
    from .weights import Int4Layout, Int4Weight, NestedWeight

    ops = torch.ops.mira

    def differs(y: Tensor, truth: Tensor) -> bool:
        error = (y.double() - truth.double()).norm()
        return not bool(error <= 1e-2 * truth.double().norm())

    x = (torch.arange(3 * 64) * 37 % 101 / 50 - 1).view(3, 64).to(torch.bfloat16)
    entries = (torch.arange(64 * 64) * 73 % 255 - 127).view(64, 64)
    dense = (entries / 127).to(torch.bfloat16)
    if differs(ops.dense_linear(x, dense, None), x.double() @ dense.double().t()):
        return "their dense product is wrong"
    planes = split(dense)
    parts = (planes.bases, planes.exceptions, planes.exception_values)
    if not ops.split_rows(torch.arange(64), planes.high, planes.low, *parts).equal(dense):
        return "their rows from two planes are wrong"
    y = ops.split_linear(x, planes.high, planes.low, *parts, None)
    if not y.equal(ops.dense_linear(x, dense, None)):
        return "their product with two planes is wrong"
    y = ops.split_linear(x, planes.high, None, *parts, None)
    if differs(y, x.double() @ join_draft(planes, 0, 64).double().t()):
        return "their product with a high plane is wrong"
    factors = torch.arange(1, 65) / 512
    y = ops.int8_linear(x, entries.to(torch.int8), factors, None)
    if differs(y, x.double() @ (entries * factors[:, None]).double().t()):
        return "their INT8 product is wrong"
    for layout in (Int4Layout.CPU_PACKED_AVX512, Int4Layout.CPU_PACKED_AVX2):
        scales = torch.stack((factors, factors.flip(0)), 1).to(torch.bfloat16)
        stored = packing.arrange_scales(scales, layout)
        codes = (entries % 15 - 7, entries % 16 - 8)
        planes = [packing.pack_codes(plane, layout).contiguous() for plane in codes]
        hi = Int4Weight(planes[0], stored, 32, (64, 64), layout)
        nested = NestedWeight(hi, planes[1])
        y = ops.int4_linear(x, hi.packed, stored, 32, layout.block_rows)
        if differs(y, reference.linear(x, hi)):
            return "their INT4 product is wrong"
        y = ops.nested_linear(x, hi.packed, stored, nested.lo, 32, layout.block_rows)
        if differs(y, reference.linear(x, nested)):
            return "their nested product is wrong"
    states = x.view(1, 1, 3, 64)
    y = ops.attend(states, states, states, 0, 0.125)
    truth = torch.nn.functional.scaled_dot_product_attention(
        states.float(), states.float(), states.float(), is_causal=True, scale=0.125
    )
    return "their attention is wrong" if differs(y, truth.transpose(1, 2)) else None


def _register_fakes() -> None:
    """Tells torch the shapes of results, for tracing."""

    def product(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    def attend(query: Tensor, _keys: Tensor, values: Tensor, *_: object) -> Tensor:
        num_heads, num_queries = query.shape[1], query.shape[2]
        return query.new_empty(1, num_queries, num_heads, values.shape[3])

    fakes = {
        "dense_linear": product,
        "int8_linear": product,
        "split_linear": product,
        "split_rows": lambda ids, high, *_: high.new_empty(
            *ids.shape, high.shape[1], dtype=torch.bfloat16
        ),
        "int4_linear": product,
        "nested_linear": product,
        "gated_experts_": lambda *_: None,
        "combine_experts": lambda rows, weights: rows.new_empty(
            weights.shape[0], rows.shape[1], dtype=torch.bfloat16
        ),
        "draft_experts": lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
        "predict_experts": lambda x, *rest: x.new_empty(rest[-1], dtype=torch.float32),
        "attend": attend,
        "attend_cached_": lambda query, _k, _v, keys, values, *_: attend(query, keys, values),
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"mira::{name}", fake)
