"""Families that do not run are refused in one sentence, from the configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from families.refused import REFUSED, save_refused
from mira_engine.checkpoint.architecture import model_class
from mira_engine.checkpoint.preflight import examine
from mira_engine.checkpoint.refused import REFUSED_FAMILIES, check_family
from mira_engine.errors import UnsupportedModelError
from tiny_models import FAMILIES, tiny_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


@pytest.mark.parametrize("family", REFUSED)
def test_family_that_cannot_run_is_refused_in_one_sentence(family: str, tmp_path: Path) -> None:
    """Before a download, where only its configuration is known."""
    save_refused(family, tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        examine(tmp_path)
    message = caught.value.message
    assert family in message
    assert message.endswith(".")
    assert message.count(". ") == 0, "more than one sentence"
    assert caught.value.hint


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_check_family_gives_the_reason_of_the_list(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED_FAMILIES[family]):
        check_family(family)


def test_every_family_of_the_interface_is_tested_or_refused() -> None:
    """Also what a newer transformers brings."""
    models = Path(transformers.models.__file__).parent
    packages = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if "\n@use_experts_implementation" in path.read_text(encoding="utf-8")
    }
    known = {CONFIG_MAPPING[name].__module__.split(".")[-2] for name in (*FAMILIES, *REFUSED)}
    assert len(packages) > 60
    assert packages - known == set()


def test_check_family_lets_others_pass() -> None:
    check_family("qwen3_moe")


def test_class_that_writes_no_text_is_refused_by_its_name() -> None:
    config = tiny_config("qwen3_moe")
    config.architectures = ["Qwen3MoeForSequenceClassification"]
    with pytest.raises(UnsupportedModelError, match="Qwen3MoeForSequenceClassification"):
        model_class(config)
    config.architectures = ["Qwen3MoeForCausalLM"]
    assert model_class(config) is transformers.Qwen3MoeForCausalLM
