"""The process that quantises: a job in on stdin, progress out on stdout, the log on stderr.

Two threads. The main thread does the job and ends; the other waits for the end of
standard input, which means that nobody waits any more, and ends the process at once:
layers are whole files, so nothing is lost. Descriptor 1 is set aside first, because the
library prints.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import TextIO

import torch

from ..errors import MiraError, PrepareError
from ..predictor.traces import TraceFolder
from .convert import planned_manifest
from .experts import CheckpointExperts
from .gptq_calibrated import CalibratedCodes
from .gptq_process import PACKAGE, GptqJob
from .gptq_store import chosen_manifest, write_store
from .progress import Progress
from .store import StoreWriter


def do_job(job: GptqJob, progress: Progress) -> None:
    """Makes the store, up to its manifest.

    Raises:
        MiraError: What `write_store` raises, or the library cannot be imported.
    """
    try:
        from .gptq_core import make_quantiser
    except ImportError as error:
        raise PrepareError(
            f"The package {PACKAGE} cannot be used: {error}.",
            hint="Run: pip install --upgrade 'mira-chat[gptq]'",
        ) from error
    torch.set_num_threads(job.num_threads)
    checkpoint = CheckpointExperts(Path(job.checkpoint_dir))
    planned = planned_manifest(checkpoint, job.precision, source=job.source, revision=job.revision)
    manifest = chosen_manifest(planned, job.calibration)
    assert manifest.group_size is not None
    chooser = CalibratedCodes(
        checkpoint,
        TraceFolder(Path(job.traces_dir)),
        group_size=manifest.group_size,
        quantise=make_quantiser(manifest.group_size),
    )
    writer = StoreWriter(Path(job.store_dir), manifest)
    write_store(checkpoint, writer, job.precision, chooser, progress)


def _claim_stdout() -> TextIO:
    """Sets the parent's descriptor aside and points descriptor 1 at stderr."""
    told = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(told, "w", encoding="utf-8", newline="\n")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> int:
    """Does the job that standard input names. Returns the exit status."""
    out = _claim_stdout()

    def tell(kind: str, *values: object) -> None:
        out.write(json.dumps([kind, *values]) + "\n")
        out.flush()

    def on_progress(step: str, done: int, total: int, unit: str, detail: str) -> None:
        tell("progress", done, total, unit, detail)

    job = GptqJob.from_line(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="mira-gptq-parent", daemon=True).start()
    try:
        with torch.inference_mode():
            do_job(job, Progress(on_progress=on_progress))
    except MiraError as error:
        tell("error", error.to_fields())
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # Thread pools of the library would keep the process waiting.
