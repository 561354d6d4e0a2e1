"""Forks a process that prepares a model for each line of input; the parent may kill it.

Input: DATA_DIR MODEL STOP_AT. Tells `pid N`, then each step; at line STOP_AT it tells
`stopped` and waits for its end. -1 never stops. When the process is gone: `ended STATUS`.
Everything is imported once, before the first fork.
"""

import os
import signal
import sys
from pathlib import Path

from mira_engine.checkpoint.hub import Patience
from mira_engine.errors import MiraError
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import Precision


def run(data_dir: str, model: str, stop_at: int) -> int:
    num_lines = 0

    def tell(step: str, done: int, total: int, unit: str, detail: str) -> None:
        nonlocal num_lines
        if step != "download":
            if num_lines == stop_at:
                print("stopped", flush=True)
                signal.pause()
            num_lines += 1

    try:
        prepare(
            ModelLibrary(Path(data_dir)).resolve(model),
            Precision.NESTED,
            on_progress=tell,
            patience=Patience(first_wait_s=0.01, read_timeout_s=30),
        )
    except MiraError as error:
        print(type(error).__name__, error, flush=True)
        return 1
    print("done", flush=True)
    return 0


for line in sys.stdin:
    data_dir, model, stop_at = line.split()
    pid = os.fork()
    if pid == 0:
        print("pid", os.getpid(), flush=True)
        os._exit(run(data_dir, model, int(stop_at)))
    _, status = os.waitpid(pid, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
