"""What a menu works with besides the list of models: jobs, verdicts, and their end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mira_engine.api import EngineConfig

from .catalog import Shelf
from .engine_client import EngineClient
from .job import Jobs
from .jobs import JobRunner
from .verdicts import VerdictBoard, Verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDesk:
    """The parts behind the menu of models.

    Attributes:
        shelf: Adds and removes models.
        jobs: Downloads and prepares them.
        verdicts: Say how they would run here.
    """

    shelf: Shelf
    jobs: Jobs
    verdicts: Verdicts

    def close(self) -> None:
        """Ends both engine processes; blocks for a few seconds at most."""
        self.verdicts.close()
        self.jobs.close()


def make_desk(
    shelf: Shelf,
    config: EngineConfig,
    make_client: Callable[[], EngineClient],
    *,
    data_dir: Path,
    cache_dir: Path,
) -> ModelDesk:
    """Builds the desk; jobs that were under way go on once the menu polls.

    Args:
        shelf: The catalog.
        config: How models will be loaded.
        make_client: Makes a client for an engine process apart from the chat's.
        data_dir: Where models and the jobs' state are.
        cache_dir: Where verdicts are kept.
    """
    return ModelDesk(
        shelf=shelf,
        jobs=JobRunner(make_client, config, data_dir),
        verdicts=VerdictBoard(make_client, config, cache_dir),
    )
