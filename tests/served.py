"""`mira-chat serve` as a process, and the official client that talks to it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openai
from programs import begun

FAKE_PROGRAM = Path(__file__).parent / "app_fakes.py"
_ADDRESS = re.compile(r"at (http://\S+?/v1)\.")
KEY = "the-key-of-the-tests"


@dataclass
class Served:
    """A server under way.

    Attributes:
        process: It.
        address: Where it is, `/v1` included.
        said: The lines it wrote to standard error.
    """

    process: subprocess.Popen
    address: str
    said: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    def wait(self, timeout_s: float) -> int:
        """Waits until it has ended and all it said is there; returns its exit code."""
        code = self.process.wait(timeout_s)
        self.reader.join(timeout_s)
        return code

    @property
    def root(self) -> str:
        return self.address.removesuffix("/v1")

    @property
    def port(self) -> str:
        return self.root.rpartition(":")[2]

    def client(self, key: str = KEY) -> openai.OpenAI:
        """Close it, or it is told of as a leak."""
        return openai.OpenAI(base_url=self.address, api_key=key, max_retries=0)


@contextlib.contextmanager
def serving(command: Sequence[str], **environment: str) -> Iterator[Served]:
    """Starts a server and waits until it listens."""
    with begun(command, env=os.environ | environment, text=True) as process:
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if found := _ADDRESS.search(line):
                break
        else:
            raise AssertionError("".join(said))
        reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
        reader.start()
        yield Served(process, found[1], said, reader)


def fake_serve(folder: Path, *modes: str, options: Sequence[str] = ()) -> list[str]:
    """The command of a server with the scripted engine."""
    marker = str(folder / "marker")
    program = [sys.executable, str(FAKE_PROGRAM), marker, ",".join(modes)]
    return [*program, "serve", "--port", "0", "--plain", *options]
