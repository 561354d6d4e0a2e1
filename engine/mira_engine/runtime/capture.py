"""Compiled steps: made in the background, kept on disk, taken up between replies.

Owns one thread that has the native kernels built and the missing steps compiled, each by
a process of its own, and loads what is ready. The engine thread asks at the start of a
reply; whatever is not ready then runs as transformers' modules do. Nothing here is
needed for a reply: without a compiler, or for a model whose steps cannot be traced, one
line says so and the engine goes on.

Source: Specter, Overlap-Oriented Parallelism Optimizer (its graph capture), for CPUs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import transformers
from mira_kernels import native
from torch import nn

from ..config import format_bytes
from ..model.linear import dense_groups, split_census
from ..model.operators import StepBinding, bound
from ..model.steps import StepSpec, other_dtypes, step_arguments
from ..system_memory import system_memory
from ..types import DraftDense

STEP_VERSION = 3
"""Raised when what a step's graph calls changes."""

MAX_STEPS = 8
"""Most steps of one loaded model. Each K in use needs three; more run uncompiled."""

UNCOMPILED = "Steps run uncompiled, several times slower."

_MAX_KEPT_FILES = 48
_MIN_FREE_BYTES = 128 * 2**20
_COMPILER_BYTES = 1536 * 2**20
"""Free memory that the compiling process must find. Measured 2026-11-30 with the built-in
model: 1.1 GiB."""

_POLL_S = 0.1
_LEFT_OVER_S = 3600

OnNotice = Callable[[str, str], None]
CompiledFunction = Callable[..., Sequence[torch.Tensor]]


class CompiledStep:
    """A compiled step with one model's weights.

    Args:
        run: The compiled function; takes a flat list of tensors.
        model: Its tensors, by the names in `weights`.
        weights: Names of the inputs before tokens, positions and mask.
        num_tokens: Tokens of the pass.
    """

    def __init__(
        self,
        run: CompiledFunction,
        model: nn.Module,
        weights: Sequence[str],
        num_tokens: int,
    ) -> None:
        self._run = run
        self.num_tokens = num_tokens
        self._tokens, self._positions, self._mask = step_arguments(num_tokens)
        self._offsets = torch.arange(num_tokens)[None]
        tensors = dict(model.named_parameters(remove_duplicate=False))
        tensors.update(model.named_buffers(remove_duplicate=False))
        self._weights = [tensors[name].detach() for name in weights]

    def __call__(
        self, tokens: Sequence[int], num_cached: int, binding: StepBinding
    ) -> torch.Tensor:
        """Runs `tokens` behind `num_cached` others. Returns logits `[T, V]`."""
        self._tokens[0] = torch.tensor(tokens)
        torch.add(self._offsets, num_cached, out=self._positions)
        with bound(binding):
            return self._run(*self._weights, self._tokens, self._positions, self._mask)[0][0]


class StepCapture:
    """Compiles the steps of one loaded model.

    Args:
        model: The loaded backbone.
        folder: Its configuration.
        cache_dir: Where kernels and steps are kept.
        on_notice: Told code and text of every fallback, from the background thread.
    """

    def __init__(
        self, model: nn.Module, folder: Path, cache_dir: Path, on_notice: OnNotice
    ) -> None:
        self._model = model
        self._folder = folder
        self._cache_dir = cache_dir
        self._notify = on_notice
        self._dtypes: dict[str, str] = {}
        self._reasons: set[str] = set()
        self._is_split = False
        self._is_native_ready = threading.Event()
        self.census: dict[str, int] = {}
        """Matrices of split weights, once `is_native_ready`."""
        self._wanted: list[StepSpec] = []
        self._landed: dict[StepSpec, tuple[CompiledFunction, list[str]]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_compiled = 0
        self.num_reused = 0
        self.seconds = 0.0

    def start(
        self, specs: Sequence[StepSpec], dtype: torch.dtype, census: Mapping[str, int]
    ) -> None:
        """Begins: native kernels, then the steps in the order given. Returns at once.

        Args:
            specs: Steps, the ones most wanted first.
            dtype: The model's.
            census: From `arrange_dense` where the model is arranged already, else empty.
        """
        self.census = dict(census)
        self._dtypes = other_dtypes(self._model, dtype)
        self._is_split = any(spec.draft_dense is DraftDense.SPLIT for spec in specs)
        self._wanted = list(dict.fromkeys(specs))[:MAX_STEPS]
        thread = threading.Thread(target=self._run, name="mira-capture", daemon=True)
        thread.start()
        self._thread = thread  # Only now: one that could not start cannot be joined.

    @property
    def is_native_ready(self) -> bool:
        """Whether the native kernels can be taken up."""
        return self._is_native_ready.is_set()

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to come."""
        return self._done.is_set()

    def wait(self, is_cancelled: Callable[[], bool]) -> None:
        """Waits until nothing more is to come, or somebody asks to stop."""
        while not self._done.wait(_POLL_S) and not is_cancelled():
            pass

    def take_ready(self) -> dict[StepSpec, CompiledStep]:
        """Returns the steps that got ready since the last call, with the model's tensors.

        To be called in the engine thread, with the native kernels in use where a step's
        specification says so.
        """
        with self._lock:
            landed, self._landed = self._landed, {}
        steps = {}
        for spec, (run, weights) in landed.items():
            try:
                steps[spec] = CompiledStep(run, self._model, weights, spec.num_tokens)
            except KeyError as error:  # A list of weights that is not this step's.
                self._path(spec).unlink(missing_ok=True)
                self._notify("uncompiled", f"The {spec} runs uncompiled: no weight {error}.")
        return steps

    def close(self) -> None:
        """Stops; a compiling process is ended and what it finished is kept."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    # -- background thread -----------------------------------------------------------------

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            if not self._has_room():
                return
            if not native.is_loaded():
                self._notify(
                    "steps",
                    "C++ kernels are being compiled, once, beside everything else; "
                    "replies get faster then.",
                )
                status = native.build(self._cache_dir, is_cancelled=self._closed.is_set)
                if self._closed.is_set():
                    return
                if not status.is_available:
                    self._notify("no-native-kernels", f"{status.reason} {UNCOMPILED}")
                    return
            if self._is_split and not self.census:
                self.census = split_census(dense_groups(self._model))
            self._is_native_ready.set()
            # Set, not defaulted: the library itself sets it to a temporary folder.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._cache_dir / "inductor")
            missing = [spec for spec in self._wanted if not self._take(spec, is_new=False)]
            if missing and self._has_memory():
                self._notify(
                    "steps",
                    f"Compiling {len(missing)} of the model's steps, once for this model and K, "
                    "for a minute or so; replies get faster then.",
                )
                self._compile(missing)
                if self.num_compiled:
                    self._notify(
                        "steps",
                        f"{self.num_compiled} steps were compiled in "
                        f"{time.perf_counter() - started:.0f} s and are kept.",
                    )
        except OSError as error:
            with contextlib.suppress(OSError):  # The app itself may be what is gone.
                self._notify("uncompiled", f"{UNCOMPILED} {self._cache_dir}: {error.strerror}.")
        finally:
            self.seconds = time.perf_counter() - started
            self._done.set()

    def _has_room(self) -> bool:
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache_dir).free
        if free < _MIN_FREE_BYTES and not self.are_all_kept():
            self._notify(
                "uncompiled",
                f"{UNCOMPILED} That takes {format_bytes(_MIN_FREE_BYTES)} of disk for kernels and "
                f"steps; {self._cache_dir} has {format_bytes(free)}.",
            )
            return False
        return True

    def are_all_kept(self) -> bool:
        """Whether all that is wanted lies on the disk already."""
        return native.is_built(self._cache_dir) and all(
            self._path(spec).is_file() for spec in self._wanted
        )

    def _has_memory(self) -> bool:
        available = system_memory().available_bytes
        if available < _COMPILER_BYTES:
            self._notify(
                "uncompiled",
                f"{UNCOMPILED} Compiling takes {format_bytes(_COMPILER_BYTES)} of memory for a "
                f"minute; {format_bytes(available)} are free.",
            )
            return False
        return True

    def _compile(self, specs: Sequence[StepSpec]) -> None:
        """Has the specs compiled by a process, and takes each as it is finished."""
        folder = self._cache_dir / "steps"
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder)
        job = folder / f"job-{os.getpid()}-{threading.get_ident()}.json"
        steps = [{"spec": spec.to_json(), "path": str(self._path(spec))} for spec in specs]
        document = {
            "folder": str(self._folder),
            "cache_dir": str(self._cache_dir),
            "is_native": specs[0].is_native,
            "dtypes": self._dtypes,
            "census": self.census,
            "steps": steps,
        }
        job.write_text(json.dumps(document), encoding="utf-8")
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "mira_engine.runtime.step_compiler", str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
            start_new_session=True,  # So that the C++ compilers it starts end with it.
        )
        watcher = threading.Thread(target=self._end_when_closed, args=(process,), daemon=True)
        watcher.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                self._on_line(line)
            code = process.wait()
            if code and not self._closed.is_set():
                how = f"died of signal {-code}" if code < 0 else f"failed with status {code}"
                self._notify("uncompiled", f"Some steps run uncompiled: compiling them {how}.")
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.stdout.close()
            watcher.join()
            job.unlink(missing_ok=True)

    def _end_when_closed(self, process: subprocess.Popen[str]) -> None:
        while process.poll() is None:
            if self._closed.wait(_POLL_S):
                if hasattr(os, "killpg"):
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
                return

    def _on_line(self, line: str) -> None:
        try:
            told = json.loads(line)
        except ValueError:
            return  # Something the libraries printed.
        spec = StepSpec.from_json(told["spec"])
        if "error" in told:
            if told["error"] not in self._reasons:
                self._reasons.add(told["error"])
                self._notify("uncompiled", f"The {spec} runs uncompiled: {told['error']}.")
        elif self._take(spec, is_new=True):
            self.num_compiled += 1

    def _take(self, spec: StepSpec, *, is_new: bool) -> bool:
        """Loads a step that is on the disk. Returns whether it could be."""
        path = self._path(spec)
        if self._closed.is_set() or not path.is_file():
            return False
        try:
            told = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            if told["spec"] != spec.to_json():
                raise ValueError("its list of weights is another step's")
            weights = told["weights"]
            import torch._inductor

            run = torch._inductor.CompiledArtifact.load(path=str(path), format="binary")
            path.touch()
        except Exception as error:  # noqa: BLE001 - a damaged file fails in any way
            if native.compiler() is not None:
                path.unlink(missing_ok=True)  # It can be made again.
            if is_new or native.compiler() is None:
                self._notify("uncompiled", f"The {spec} runs uncompiled: {error}.")
            return False
        if not is_new:
            self.num_reused += 1
        with self._lock:
            self._landed[spec] = (run, weights)
        return True

    def _path(self, spec: StepSpec) -> Path:
        return self._cache_dir / "steps" / f"{self._key(spec)}.bin"

    def _key(self, spec: StepSpec) -> str:
        parts = (
            spec.to_json(),
            json.dumps([self._dtypes, self.census], sort_keys=True),
            (self._folder / "config.json").read_text(encoding="utf-8"),
            str(STEP_VERSION),
            torch.__version__,
            transformers.__version__,
            platform.python_version(),
            native.library_path(self._cache_dir).name,
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _prune(folder: Path) -> None:
    """Removes the steps not used for longest, beyond what is kept, and jobs left behind."""
    for path in folder.glob("job-*.json"):
        if time.time() - path.stat().st_mtime > _LEFT_OVER_S:
            path.unlink(missing_ok=True)
    files = sorted(folder.glob("*.bin"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[_MAX_KEPT_FILES:]:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
