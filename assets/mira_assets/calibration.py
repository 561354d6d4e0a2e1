"""The calibration prompts that ship with the program."""

from __future__ import annotations

import importlib.resources
import json
from typing import NamedTuple


class CalibrationPrompt(NamedTuple):
    """A prompt that predictors are trained on, and what kind of text it is."""

    kind: str
    text: str


def calibration_prompts() -> tuple[CalibrationPrompt, ...]:
    """Returns the prompts, kinds taking turns: any first part of them is a fair mixture."""
    file = importlib.resources.files("mira_assets") / "calibration.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["prompts"]
    return tuple(CalibrationPrompt(kind=row["kind"], text=row["text"]) for row in rows)
