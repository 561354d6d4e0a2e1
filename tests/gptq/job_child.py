"""Runs the job that standard input names; says `waiting` once the stand-in library waits."""

import os
import sys
from pathlib import Path

from mira_engine.checkpoint.gptq_process import GptqJob, run_job
from mira_engine.checkpoint.progress import Progress


def main() -> None:
    pid_file, is_told = Path(os.environ["FAKE_GPTQ_PID"]), False

    def is_cancelled() -> bool:
        nonlocal is_told
        if not is_told and pid_file.exists():
            is_told = True
            print("waiting", flush=True)
        return False

    run_job(GptqJob.from_line(sys.stdin.readline()), Progress(is_cancelled=is_cancelled))


main()
