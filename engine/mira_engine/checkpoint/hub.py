"""Repositories of the hub: what is in one, which of it is needed, and what went wrong.

Talks to the hub with huggingface_hub, whose settings hold: HF_ENDPOINT, HF_HOME,
HF_TOKEN, HF_HUB_OFFLINE. Asks for lists and small headers; files are moved by
`hub_download`, and what goes wrong is put into words by `hub_errors`.
"""

from __future__ import annotations

import fnmatch
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from ..errors import CheckpointError, HubBusyError, HubUnreachableError
from .backbone import SMALL_FILES
from .hub_errors import TRANSIENT_STATUS, endpoint, no_weights, plain_error, retry_after_s
from .progress import Progress
from .shards import INDEX_FILE, SINGLE_FILE

Answer = TypeVar("Answer")

ANSWER_TIMEOUT_S = 15.0
"""How long the hub may take over a question."""

_POLL_S = 0.1
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long one bears with a hub that fails.

    Attributes:
        num_tries: Failures in a row after which a file is given up; one that brought bytes
            begins the count anew.
        first_wait_s: Pause after the first failure; doubled after each.
        longest_wait_s: Longest pause; a hub that asks for more is told to the user instead.
        read_timeout_s: Silence that counts as a failure; `None` takes the client's setting.
        num_asks: Failures in a row after which a question is given up.
        num_parallel: Files moved at once.
    """

    num_tries: int = 5
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    read_timeout_s: float | None = None
    num_asks: int = 3
    num_parallel: int = 4


USUAL_PATIENCE = Patience()


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a repository at one commit.

    Attributes:
        name: Path in the repository.
        num_bytes: Length.
        etag: Its name in the client's cache: SHA-256 of a large file's contents, git's blob
            hash of a small one's.
    """

    name: str
    num_bytes: int
    etag: str

    @property
    def is_large(self) -> bool:
        """Whether `etag` is a SHA-256; else it is git's hash."""
        return len(self.etag) == 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRevision:
    """A repository at one commit.

    Attributes:
        repo_id: `owner/name`.
        asked: The branch, tag or commit that was asked for.
        commit: 40 hexadecimal digits.
        files: All of its files, by name.
        license: As its card says, or an empty string.
    """

    repo_id: str
    asked: str
    commit: str
    files: Mapping[str, HubFile]
    license: str = ""

    @property
    def repo_dir(self) -> Path:
        """The repository's folder in the client's cache."""
        return cached_repo_dir(self.repo_id)

    @property
    def snapshot_dir(self) -> Path:
        """Where the client's cache has this commit's files."""
        return self.repo_dir / "snapshots" / self.commit

    @property
    def small_files(self) -> tuple[HubFile, ...]:
        """Configuration, tokenizer, templates and the weights' index, by name."""
        return tuple(
            self.files[name] for name in sorted(self.files) if _is_small(name) or name == INDEX_FILE
        )

    @property
    def has_index(self) -> bool:
        """Whether weights are found by an index; a single file comes first, as in `shards`."""
        return SINGLE_FILE not in self.files and INDEX_FILE in self.files

    def weight_files(self, index: Path) -> tuple[HubFile, ...]:
        """Returns the weights that are needed: what the index names, or the single file.

        Args:
            index: The index, fetched before; not read where there is a single file.

        Raises:
            UnsupportedModelError: The repository has no safetensors weights.
            CheckpointError: The index is damaged, or names a file that is not there.
        """
        if SINGLE_FILE in self.files:
            return (self.files[SINGLE_FILE],)
        if INDEX_FILE not in self.files:
            raise no_weights(self.repo_id, self.files)
        names = sorted(set(weight_map(index).values()))
        absent = [name for name in names if name not in self.files]
        if absent:
            raise CheckpointError(
                f"{self.repo_id} lacks {absent[0]}, which its {INDEX_FILE} names"
                + (f", and {len(absent) - 1} more files." if len(absent) > 1 else "."),
                hint="The publisher has to add it; pick another model or revision.",
            )
        return tuple(self.files[name] for name in names)


def cached_repo_dir(repo_id: str) -> Path:
    """Returns the folder of a model's repository in the client's cache."""
    return Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"


def weight_map(index: Path) -> dict[str, str]:
    """Reads which file holds which tensor.

    Raises:
        CheckpointError: It is no index.
    """
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(name) for key, name in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is no weight index.", hint="Pick another model or revision."
        ) from error


def look_up(
    repo_id: str,
    revision: str | None,
    progress: Progress,
    patience: Patience = USUAL_PATIENCE,
) -> HubRevision:
    """Asks the hub for a repository's files, sizes and hashes.

    Raises:
        UnknownModelError: There is no such repository or revision.
        HubAccessError: It is gated or private; says what to do.
        HubBusyError: The hub limits requests or is out of order.
        HubUnreachableError: Nobody answers, or offline mode is on.
        CancelledError: Somebody asked to stop.
    """
    info = ask(
        lambda: huggingface_hub.HfApi().model_info(
            repo_id, revision=revision, files_metadata=True, timeout=ANSWER_TIMEOUT_S
        ),
        progress,
        patience,
        repo_id=repo_id,
        revision=revision,
    )
    files = {
        sibling.rfilename: HubFile(
            name=sibling.rfilename,
            num_bytes=int(sibling.lfs.size if sibling.lfs else sibling.size or 0),
            etag=sibling.lfs.sha256 if sibling.lfs else sibling.blob_id or "",
        )
        for sibling in info.siblings or ()
        if _is_inside(sibling.rfilename)
    }
    card = info.card_data
    named = getattr(card, "license_name", None) or getattr(card, "license", None) or ""
    if not _COMMIT.fullmatch(info.sha or "") or not all(_is_hash(f.etag) for f in files.values()):
        raise HubUnreachableError(
            f"{endpoint()} does not answer as the hub does: sizes or hashes are missing.",
            hint="Check HF_ENDPOINT.",
        )
    return HubRevision(
        repo_id=repo_id,
        asked=revision or constants.DEFAULT_REVISION,
        commit=str(info.sha),
        files=files,
        license=named if isinstance(named, str) else ", ".join(map(str, named)),
    )


def cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """Returns a snapshot in the client's cache that has all that is needed, or `None`.

    Looks at names only. For use without a network.
    """
    repo = cached_repo_dir(repo_id)
    commit = revision or constants.DEFAULT_REVISION
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (repo / "refs" / commit).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
    snapshot = repo / "snapshots" / commit
    return snapshot if is_complete(snapshot) else None


def is_complete(snapshot: Path) -> bool:
    """Whether a folder has a configuration and every weight file that it should have."""
    if not (snapshot / "config.json").is_file():
        return False
    if (snapshot / SINGLE_FILE).is_file():
        return True
    try:
        names = set(weight_map(snapshot / INDEX_FILE).values())
    except CheckpointError:
        return False
    return bool(names) and all((snapshot / name).is_file() for name in names)


def read_remote_header(
    revision: HubRevision, name: str, progress: Progress, patience: Patience = USUAL_PATIENCE
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Reads the header of a safetensors file by range: element type and shape of each tensor.

    Raises:
        CheckpointError: It is no safetensors file.
        MiraError: As `look_up` says.
    """
    header = ask(
        lambda: huggingface_hub.HfApi().parse_safetensors_file_metadata(
            revision.repo_id, name, revision=revision.commit, timeout=ANSWER_TIMEOUT_S
        ),
        progress,
        patience,
        repo_id=revision.repo_id,
        revision=revision.asked,
        file=name,
    )
    return {key: (info.dtype, tuple(info.shape)) for key, info in header.tensors.items()}


def read_range(
    revision: HubRevision,
    name: str,
    start: int,
    num_bytes: int,
    progress: Progress,
    patience: Patience = USUAL_PATIENCE,
) -> bytes:
    """Reads a part of a file.

    Raises:
        HubBusyError: The hub sends other bytes than were asked for.
        MiraError: As `look_up` says.
    """
    url = huggingface_hub.hf_hub_url(revision.repo_id, name, revision=revision.commit)
    headers = build_hf_headers() | {
        "Accept-Encoding": "identity",
        "Range": f"bytes={start}-{start + num_bytes - 1}",
    }

    def question() -> bytes:
        with get_session().stream("GET", url, headers=headers, timeout=ANSWER_TIMEOUT_S) as answer:
            hf_raise_for_status(answer)
            told = answer.headers.get("Content-Range", "")
            # Else all of the file comes, whatever its length.
            is_part = answer.status_code == 206 and told.startswith(f"bytes {start}-")
            return answer.read() if is_part else b""

    found = ask(
        question,
        progress,
        patience,
        repo_id=revision.repo_id,
        revision=revision.asked,
        file=name,
    )
    if len(found) != num_bytes:
        raise HubBusyError(
            f"The hub does not send the part of {name} of {revision.repo_id} that was asked for.",
            hint="Try again later, or keep the download: all of the file is asked for then.",
        )
    return found


def ask(
    question: Callable[[], Answer],
    progress: Progress,
    patience: Patience,
    *,
    repo_id: str,
    revision: str | None,
    file: str = "",
) -> Answer:
    """Asks the hub something, again where it fails for a moment; can be left at any time.

    Raises:
        CancelledError: Somebody asked to stop.
        MiraError: What went wrong, in plain words.
    """
    wait_s = patience.first_wait_s
    for number in range(1, patience.num_asks + 1):
        try:
            return _ask_once(question, progress)
        except (HTTPError, TimeoutError) as error:
            said = plain_error(error, repo_id=repo_id, revision=revision, file=file)
            pause_s = _pause_s(error, wait_s)
            if number == patience.num_asks or pause_s is None or pause_s > patience.longest_wait_s:
                raise said from error
        except Exception as error:
            raise plain_error(error, repo_id=repo_id, revision=revision, file=file) from error
        _pause(pause_s, progress)
        wait_s *= 2
    raise AssertionError("a question is asked at least once")


def _pause_s(error: Exception, wait_s: float) -> float | None:
    """Returns how long to wait before asking again, `None` where that is of no use."""
    if not isinstance(error, HfHubHTTPError):
        return wait_s
    if error.response.status_code not in TRANSIENT_STATUS:
        return None
    asked_s = retry_after_s(error.response.headers)
    return wait_s if asked_s is None else asked_s


def _pause(seconds: float, progress: Progress) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_S))
        progress.check()


def _ask_once(question: Callable[[], Answer], progress: Progress) -> Answer:
    """Runs a question in a thread of its own; one that is left ends at its time limit."""
    answers: list[Answer] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            answers.append(question())
        except Exception as error:  # noqa: BLE001 - told to the thread that asked
            failed.append(error)

    thread = threading.Thread(target=run, name="mira-hub-question", daemon=True)
    thread.start()
    deadline = time.monotonic() + 2 * ANSWER_TIMEOUT_S
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_POLL_S)
        progress.check()
    if failed:
        raise failed[0]
    if not answers:
        raise TimeoutError
    return answers[0]


def _is_inside(name: str) -> bool:
    """Whether a file of that name lies in the snapshot; others are treated as absent."""
    parts = [kind(name) for kind in (PurePosixPath, PureWindowsPath)]
    return not any(path.is_absolute() or path.drive or ".." in path.parts for path in parts)


def _is_small(name: str) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern) for pattern in SMALL_FILES if "/" not in name
    ) or (fnmatch.fnmatchcase(name, "additional_chat_templates/*.jinja"))


def _is_hash(etag: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", etag) is not None
