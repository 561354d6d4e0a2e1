"""Prepares a model and tells each step on stdout; at a given line it waits to be killed.

Usage: prepare_child.py DATA_DIR MODEL PRECISION STOP_AT, where line STOP_AT (from 0) is the
last: standard input is then read until the parent closes it, or kills. -1 never stops.
"""

import resource
import sys
from pathlib import Path

from mira_engine.errors import MiraError
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import Precision


def main() -> int:
    data_dir, model, precision, stop_at, *limit = sys.argv[1:]
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit[0]), int(limit[0])))
    num_lines = 0

    def tell(step: str, done: int, total: int, unit: str, detail: str) -> None:
        nonlocal num_lines
        print(step, done, total, unit, detail, flush=True)
        if num_lines == int(stop_at):
            sys.stdin.read()
        num_lines += 1

    home = ModelLibrary(Path(data_dir)).resolve(model)
    try:
        prepare(home, Precision(precision), on_progress=tell)
    except MiraError as error:
        print(type(error).__name__, error, flush=True)
        return 1
    print("done", flush=True)
    return 0


sys.exit(main())
