"""The process that quantises, seen from the one that waits for it.

GPTQModel changes the process that loads it, so it gets one of its own. It is told its job
in one line, tells its progress in lines of JSON, and ends when its standard input does:
nothing outlives an engine process that was killed. Runs in the thread that asked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from ..errors import PrepareError, error_from_fields
from ..types import Precision
from .gptq_store import STEP
from .progress import Progress
from .writing import PARTIAL_SUFFIX, disk_errors

PACKAGE = "gptqmodel"
"""Brings the algorithm; an extra of this project."""

_WAIT_S = 0.2
"""Longest wait between two looks whether to stop."""

_ENVIRONMENT = {
    # On machines with few cores it asks for more workers than it has allowed itself.
    "GPTQMODEL_CPU_WORKERS": "2",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqJob:
    """One store to be made.

    Attributes:
        checkpoint_dir: The float weights.
        traces_dir: The recording that codes are chosen by.
        store_dir: Where the store is until it is whole; finished layers in it are kept.
        precision: `int4` or `nested`.
        source: Where the weights came from, for people.
        revision: Fingerprint of the checkpoint.
        calibration: Fingerprint of the recording.
        num_threads: Threads of the arithmetic.
    """

    checkpoint_dir: str
    traces_dir: str
    store_dir: str
    precision: Precision
    source: str
    revision: str
    calibration: str
    num_threads: int

    def to_line(self) -> str:
        """Returns the job as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> GptqJob:
        """Reads what `to_line` wrote."""
        fields = json.loads(line)
        return cls(**fields | {"precision": Precision(fields["precision"])})


def require_gptqmodel() -> None:
    """Refuses early where the library is not installed.

    Raises:
        PrepareError: It is not.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise PrepareError(
            f"A GPTQ draft needs the package {PACKAGE}, which is not installed.",
            hint="Run: pip install 'mira-chat[gptq]'",
        )


def run_job(job: GptqJob, progress: Progress) -> None:
    """Has a store made, up to its manifest.

    Args:
        job: What to make.
        progress: Reports `experts`; asked at least every fifth of a second.

    Raises:
        MiraError: What went wrong there; finished layers are kept.
        PrepareError: The process ended without a word.
        CancelledError: Somebody asked to stop; finished layers are kept.
    """
    with _started(job) as (process, lines):
        while True:
            progress.check()
            try:
                line = lines.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
            if line is None:
                break
            kind, *values = json.loads(line)
            if kind == "error":
                raise error_from_fields(values[0])
            progress.report(STEP, *values)
        status = process.wait()
    if status != 0:
        raise PrepareError(
            f"The process that quantises ended with status {status}.",
            hint="What is finished is kept; run it again. The engine's log has its last words.",
        )


Lines = queue.SimpleQueue[str | None]
"""What the process says, `None` at its end."""


@contextlib.contextmanager
def _started(job: GptqJob) -> Iterator[tuple[subprocess.Popen[str], Lines]]:
    """Starts the process; however this is left, it has ended, and leaves no half of a file."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.gptq_child"],
        env=os.environ | _ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines: Lines = queue.SimpleQueue()
    reader = threading.Thread(
        target=_read, args=(process.stdout, lines), name="mira-gptq-lines", daemon=True
    )
    reader.start()
    try:
        with contextlib.suppress(OSError):  # It has ended already, which is told below.
            process.stdin.write(job.to_line())
            process.stdin.flush()
        yield process, lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        with disk_errors(Path(job.store_dir)):
            for path in Path(job.store_dir).glob(f"*{PARTIAL_SUFFIX}"):
                path.unlink()


def _read(stream: IO[str], lines: Lines) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
