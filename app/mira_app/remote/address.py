"""Where an OpenAI-compatible server is, and the key that opens it. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from mira_engine.api import ConfigError

KEY_VARIABLES = ("MIRA_API_KEY", "OPENAI_API_KEY")
"""Environment variables of the key, the first that is set wins. No setting: a key is in no file."""

_EXAMPLE = "Write it as http://host:8000, or with the path that it serves under."
_ENDPOINTS = ("/chat/completions", "/completions", "/models")


def server_address(text: str) -> str:
    """Completes what a person writes to the address that requests go under.

    A host alone gets `http://` and `/v1`; an endpoint's own path is taken off.

    Raises:
        ConfigError: It is no address, or holds a password.
    """
    given = text.strip()
    try:
        parts = urlsplit(given if "://" in given else f"http://{given}")
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        raise ConfigError.for_field("connect", text, _EXAMPLE) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port:
        raise ConfigError.for_field("connect", text, _EXAMPLE)
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "The address to connect to holds a name or a password.",
            hint=f"Leave it out, and give the key in {KEY_VARIABLES[0]}.",
        )
    if parts.query or parts.fragment or any(c.isspace() for c in given):
        raise ConfigError.for_field("connect", text, _EXAMPLE)
    path = parts.path.rstrip("/")
    for endpoint in _ENDPOINTS:
        path = path.removesuffix(endpoint)
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))


def host_of(address: str) -> str:
    """Returns the host and port of an address, for messages."""
    return urlsplit(address).netloc


def metrics_address(address: str) -> str:
    """Returns where servers that tell metrics do: beside `/v1`, not under it."""
    return f"{address.removesuffix('/v1')}/metrics"


def api_key(environ: Mapping[str, str], address: str) -> str | None:
    """Returns the key that the environment holds for a server, `None` without one.

    The usual variable may hold a key for another server: where anybody on the way could read
    it, only the one of this program counts.
    """
    own, usual = KEY_VARIABLES
    names = (own,) if is_unprotected(address) else (own, usual)
    return next((environ[name] for name in names if environ.get(name)), None)


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def is_unprotected(address: str) -> bool:
    """Whether what is sent there can be read on the way."""
    parts = urlsplit(address)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")
