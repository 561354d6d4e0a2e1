"""Forks a process that prepares a model for each line of input and kills itself on the way.

Input: DATA_DIR MODEL KILL_AT. Downloads are deleted as they are used up. A moment is each
report of progress, those of downloads left out, and each deletion or renaming of a file,
before it is done. At moment KILL_AT the process ends itself by SIGKILL; at 0 it never does.
Output: `done MOMENTS` or an error, then `ended STATUS`. One file is moved at a time, so that
the moments of two runs are the same. Everything is imported once, before the first fork.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from disk_meter import before_each_fall
from mira_engine.checkpoint.hub import Patience
from mira_engine.errors import MiraError
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import Precision


def run(data_dir: str, model: str, kill_at: int) -> int:
    num_moments = 0

    def count() -> None:
        nonlocal num_moments
        num_moments += 1
        if num_moments == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def tell(step: str, done: int, total: int, unit: str, detail: str) -> None:
        if step != "download":
            count()

    try:
        with before_each_fall(count):
            prepare(
                ModelLibrary(Path(data_dir)).resolve(model),
                Precision.NESTED,
                on_progress=tell,
                patience=Patience(first_wait_s=0.01, read_timeout_s=30, num_parallel=1),
                is_download_deleted=True,
            )
    except MiraError as error:
        print(type(error).__name__, error, flush=True)
        return 1
    print("done", num_moments, flush=True)
    return 0


for line in sys.stdin:
    data_dir, model, kill_at = line.split()
    pid = os.fork()
    if pid == 0:
        os._exit(run(data_dir, model, int(kill_at)))
    _, status = os.waitpid(pid, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
