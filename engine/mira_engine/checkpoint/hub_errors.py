"""What the hub's client reports, in one sentence that a person can act on.

Tells apart: gated, private, missing, limited, out of order, unreachable, offline. Takes
nothing of an error's own text, which may hold signed addresses; a token is in no message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)

from ..errors import (
    CheckpointError,
    HubAccessError,
    HubBusyError,
    HubUnreachableError,
    MiraError,
    UnknownModelError,
    UnsupportedModelError,
)

_TOKEN_HINT = "log in with `hf auth login`, or set HF_TOKEN"

TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
"""Refusals that may be over in a moment."""


def plain_error(
    error: Exception, *, repo_id: str, revision: str | None = None, file: str = ""
) -> Exception:
    """Says in one sentence what the hub's client meant; other errors come back as they are."""
    if isinstance(error, MiraError):
        return error
    if isinstance(error, OfflineModeIsEnabled):
        return HubUnreachableError(
            f"{repo_id} is not complete in the hub's cache, and offline mode is on.",
            hint="Unset HF_HUB_OFFLINE to download it.",
        )
    if isinstance(error, HFValidationError):
        return UnknownModelError(
            f"{repo_id!r} is no name of a repository.", hint="Names look like owner/name."
        )
    if isinstance(error, RevisionNotFoundError):
        return UnknownModelError(
            f"{repo_id} has no revision {revision!r}.",
            hint=f"Look at {endpoint()}/{repo_id}/commits/main.",
        )
    if isinstance(error, (RepositoryNotFoundError, HfHubHTTPError)):
        return _refused(error, repo_id, file)
    if isinstance(error, EntryNotFoundError):
        return _no_file(repo_id, file)
    if isinstance(error, SafetensorsParsingError):
        return CheckpointError(
            f"{file} of {repo_id} is no safetensors file.", hint="Pick another model or revision."
        )
    if isinstance(error, (HTTPError, TimeoutError)):
        return _unreachable(_kind(error))
    if isinstance(error, (ValueError, TypeError, KeyError)):
        return _unreachable("its answer cannot be read")
    return error


def _refused(error: HfHubHTTPError, repo_id: str, file: str) -> MiraError:
    status, page = error.response.status_code, f"{endpoint()}/{repo_id}"
    has_token = huggingface_hub.get_token() is not None
    if isinstance(error, GatedRepoError):
        if not has_token:
            return HubAccessError(
                f"{repo_id} is gated, and there is no token.",
                hint=f"Accept its licence at {page}, then {_TOKEN_HINT}.",
            )
        return HubAccessError(
            f"{repo_id} is gated, and its licence is not accepted by the owner of your token.",
            hint=f"Accept it at {page}; some publishers take days to answer. A fine-grained token "
            "must be allowed to read gated repositories.",
        )
    said = (error.response.headers.get("X-Error-Message") or "").lower()
    if status == 401 and "credentials" in said:
        return HubAccessError(
            "The hub does not know your token.", hint=f"Make a new one, and {_TOKEN_HINT}."
        )
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        if has_token:
            return UnknownModelError(
                f"The hub has no repository {repo_id}, or your token may not see it.",
                hint="Check the spelling and the token's rights.",
            )
        return UnknownModelError(
            f"The hub has no public repository {repo_id}.",
            hint=f"Check the spelling. If it is private, {_TOKEN_HINT}. For a folder, write "
            f"./{repo_id}.",
        )
    if isinstance(error, EntryNotFoundError):
        return _no_file(repo_id, file)
    if status == 429:
        wait = retry_after_s(error.response.headers)
        when = "in some minutes" if wait is None else f"in {wait} seconds"
        return HubBusyError(
            f"The hub limits how often it may be asked; it answers again {when}.",
            hint="Try again then; what is downloaded is kept. With a token the limit is higher.",
        )
    if status >= 500 or status == 408:
        return HubBusyError(
            f"The hub is out of order (status {status}).",
            hint="Try again later; what is downloaded is kept.",
        )
    return HubAccessError(
        f"The hub refuses {file or repo_id} (status {status}).",
        hint=f"Look at {page}. A fine-grained token must be allowed to read it.",
    )


def retry_after_s(headers: Mapping[str, str]) -> int | None:
    """Returns the seconds that a server asks to wait, `None` where it does not say."""
    match = re.search(r"r=0;\s*t=(\d+)", headers.get("RateLimit", ""))
    said = match[1] if match else headers.get("Retry-After", "").strip()
    return int(said) if said.isdigit() else None


def endpoint() -> str:
    """Returns the hub's address without a password in it."""
    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _unreachable(why: str) -> HubUnreachableError:
    return HubUnreachableError(
        f"The hub at {endpoint()} cannot be reached: {why}.",
        hint="Check the network, the proxy settings and HF_ENDPOINT; what is downloaded is kept.",
    )


def _kind(error: Exception) -> str:
    """Names a network error by its class; its text may hold addresses with signatures."""
    words = {
        "ConnectError": "no connection",
        "ConnectTimeout": "no connection in time",
        "TimeoutError": "no answer in time",
        "ReadTimeout": "nothing came for too long",
        "ReadError": "the connection broke",
        "RemoteProtocolError": "the connection broke",
        "ProxyError": "the proxy refuses",
        "TooManyRedirects": "it sends from address to address",
    }
    return words.get(type(error).__name__, "the connection failed")


def _no_file(repo_id: str, file: str) -> CheckpointError:
    return CheckpointError(f"{repo_id} has no file {file}.", hint="Pick another model or revision.")


def no_weights(repo_id: str, names: Iterable[str]) -> UnsupportedModelError:
    """Says that a repository has no weights that are read here, and which it has instead."""
    endings = {Path(name).suffix for name in names}
    others = {".bin": "pickled", ".pt": "pickled", ".pth": "pickled", ".gguf": "GGUF"}
    has = sorted({others[ending] for ending in endings if ending in others})
    return UnsupportedModelError(
        f"{repo_id} has no weights in safetensors form"
        + (f", only in {' and '.join(has)} form." if has else "."),
        hint="Pick the model's safetensors repository.",
    )
