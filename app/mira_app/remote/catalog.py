"""The models of a server, as a menu and the command line want them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mira_engine.api import ConfigError, Precision, UnknownModelError

from mira_app.catalog import CatalogEntry, ModelState

from .address import host_of
from .errors import ServerError

if TYPE_CHECKING:
    from mira_app.settings import Settings

    from .client import RemoteClient


class RemoteCatalog:
    """Lists what the server offered when it was last asked; asks nothing itself."""

    def __init__(self, client: RemoteClient) -> None:
        self._client = client

    def entries(self, precision: Precision) -> tuple[CatalogEntry, ...]:
        """Returns the server's models in its own order."""
        del precision
        return tuple(self._entry(model.name) for model in self._client.served)

    def find(self, model: str, precision: Precision) -> CatalogEntry:
        """Returns one model.

        Raises:
            UnknownModelError: The server has others, but not this one.
        """
        entries = self.entries(precision)
        for entry in entries:
            if entry.model == model:
                return entry
        if entries:
            raise UnknownModelError(
                f"The server at {host_of(self._client.address)} has no model {model!r}.",
                hint=f"It has: {', '.join(entry.model for entry in entries)}.",
            )
        return self._entry(model)  # Not asked yet, or it has no list: loading will tell.

    def _entry(self, model: str) -> CatalogEntry:
        return CatalogEntry(
            model=model,
            title=model,
            about=f"served at {self._client.address}",
            is_ready=True,
            state=ModelState.READY,
            is_remote=True,
        )


def with_served_model(client: RemoteClient, settings: Settings, *, is_needed: bool) -> Settings:
    """Takes the server's model where the person named none and it has one; waits for the list.

    Args:
        client: The server.
        settings: What the person chose.
        is_needed: Whether one has to be known now, since nobody can be asked.

    Raises:
        ConfigError: The server has several, and one is needed.
        ServerError: It cannot be reached, or offers none.
    """
    if settings.is_model_given:
        return settings
    served = client.list_models()
    if served is None:
        raise ConfigError(
            f"The server at {host_of(client.address)} has no list of its models.",
            hint="Name one by --model.",
        )
    if not served:
        raise ServerError(
            f"The server at {host_of(client.address)} offers no model.",
            hint="It may still be loading one; try again.",
        )
    if len(served) > 1:
        if is_needed:
            names = ", ".join(model.name for model in served)
            raise ConfigError(
                f"The server at {host_of(client.address)} has several models: {names}.",
                hint="Name one by --model.",
            )
        return settings
    return dataclasses.replace(settings, model=served[0].name, is_model_given=True)
