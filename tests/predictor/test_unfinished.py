"""What is said of predictors that cannot be used: why, and not more than is known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from mira_engine.config import EngineConfig
from mira_engine.engine import Engine
from mira_engine.predictor.bank import MANIFEST_FILE


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, []),
        (
            [],
            ["The predictors are not trained yet; mira-chat prepare owner/moe goes on with that."],
        ),
        (
            [MANIFEST_FILE],
            [
                "The predictors are damaged or of other weights and are not used; "
                "mira-chat prepare owner/moe makes them anew."
            ],
        ),
    ],
    ids=("none", "begun", "damaged"),
)
def test_predictors_that_are_no_bank_are_told_by_what_there_is(tmp_path, files, said) -> None:
    folder = tmp_path / "predictors"
    for name in files or ():
        folder.mkdir()
        (folder / name).write_text("{")
    if files == []:
        folder.mkdir()
    notices: list[str] = []
    engine = SimpleNamespace(
        config=EngineConfig(),
        executor=SimpleNamespace(),
        home=SimpleNamespace(predictors_dir=folder, name="owner/moe"),
        _target=SimpleNamespace(manifest=SimpleNamespace(revision="r")),
        _notice=lambda code, text: notices.append(text),
    )
    Engine._load_predictor(engine)
    assert engine.executor.predictor is None
    assert notices == said
