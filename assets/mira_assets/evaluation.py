"""The texts that precisions are compared on: of our own writing, five kinds."""

from __future__ import annotations

import importlib.resources
import json
from typing import NamedTuple


class EvaluationText(NamedTuple):
    """A text, and what kind it is."""

    kind: str
    text: str


def evaluation_texts() -> tuple[EvaluationText, ...]:
    """Returns the texts, kinds taking turns: any first part of them is a fair mixture."""
    file = importlib.resources.files("mira_assets") / "evaluation_texts.json"
    kinds: dict[str, list[str]] = json.loads(file.read_text(encoding="utf-8"))
    most = max(map(len, kinds.values()))
    return tuple(
        EvaluationText(kind, texts[turn])
        for turn in range(most)
        for kind, texts in kinds.items()
        if turn < len(texts)
    )
