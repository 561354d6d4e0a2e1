"""What the engine can plan a model by before it is here: a folder with its configuration.

The catalog knows the configuration of most of its models, so a plan of them takes no network.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from mira_assets.models import load_models
from mira_engine.api import Precision, UnknownModelError

from .catalog import BUILTIN, Catalog, CatalogEntry, ModelState
from .paths import home_expanded
from .state_files import read_json, write_json


def plannable_name(entry: CatalogEntry, cache_dir: Path) -> str | None:
    """Returns what the engine can plan without a network, `None` where nothing is known yet.

    Args:
        entry: The model.
        cache_dir: What the catalog knows of a model that is not here is written there.
    """
    if entry.state is not ModelState.AVAILABLE or entry.facts is None:
        is_hub_name = entry.state is ModelState.AVAILABLE and "/" in entry.model
        return None if is_hub_name else entry.model
    if not entry.facts.config:
        return None
    folder = cache_dir / "catalog" / re.sub(r"[^\w.-]", "--", entry.model)
    path = folder / "config.json"
    config = dict(entry.facts.config)
    if read_json(path) != config and not write_json(path, config):
        return None
    return str(folder)


def find_entry(name: str, catalog: Catalog, precision: Precision) -> CatalogEntry:
    """Returns a model by its name, its title, or its repository's name without the owner.

    Args:
        name: As `--model` takes it, or as the catalog calls the model; a folder wins.
        catalog: Where it is looked up.
        precision: It would be run in.

    Raises:
        UnknownModelError: There is no such model; the nearest names of the catalog are said.
    """
    if (home_expanded(name) / "config.json").is_file():
        return catalog.find(name, precision)
    repos = {}
    for repo, facts in load_models().items():
        for known in (repo, repo.partition("/")[2], facts.title):
            repos.setdefault(known.casefold(), repo)
    try:
        return catalog.find(repos.get(name.casefold(), name), precision)
    except UnknownModelError as error:
        near = difflib.get_close_matches(name.casefold(), [BUILTIN, *repos], n=3, cutoff=0.5)
        if not near:
            raise
        names = dict.fromkeys(repos.get(each, each) for each in near)
        raise UnknownModelError(
            error.message, hint=f"Did you mean {' or '.join(names)}?"
        ) from error
