"""The README's table of models lists what the tests hold the engine to, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import support
from families.refused import REFUSED, refusals
from families.support import HEADER, MAX_ERROR, THINKING, TakesBack, readme_rows
from mira_engine.checkpoint.refused import REFUSED_FAMILIES
from mira_engine.model.reply_parts import THINK_TAGS, uses_channels
from tiny_hybrids import UNCROPPED_FAMILIES
from tiny_models import FAMILIES

TEMPLATES = {
    "deepseek_v3": "chat_templates/deepseek-ai-DeepSeek-V3.1.jinja",
    "glm4_moe": "chat_templates/GLM-4.6.jinja",
    "gpt_oss": "chat_templates/openai-gpt-oss-120b.jinja",
    "granitemoe": "chat_templates/ibm-granite-granite-3.3-2B-Instruct.jinja",
    "lfm2_moe": "chat_templates/llama-cpp-lfm2.jinja",
    "nemotron_h": "chat_templates/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
    "phimoe": "chat_templates/microsoft-Phi-3.5-mini-instruct.jinja",
    "qwen3_5_moe": "configs/Qwen3.5-25B-REAP-A3B-Coding/chat_template.jinja",
    "qwen3_5_moe_text": "configs/Qwen3.5-25B-REAP-A3B-Coding/chat_template.jinja",
    "qwen3_moe": "chat_templates/Qwen3-Coder.jinja",
}

EXAMPLE = f"""Text before.
{support.BEGIN}
old
{support.END}
Text behind.
"""


def test_table_lists_exactly_the_families_that_are_tested() -> None:
    rows = readme_rows()
    running = {name for name, row in rows.items() if len(row) == len(HEADER)}
    assert running == set(FAMILIES)
    assert set(rows) - running == set(REFUSED)


def test_table_says_of_each_family_what_the_exactness_tests_demand() -> None:
    for family in FAMILIES:
        _, error, drafts, takes_back, routers, thinking = readme_rows()[family]
        assert float(error) <= MAX_ERROR, family
        assert (drafts == "yes") == (takes_back != TakesBack.NOTHING), family
        assert takes_back != TakesBack.NOTHING or family in UNCROPPED_FAMILIES
        assert routers in ("yes", "no", "in part"), family
        assert thinking == THINKING.get(family, "not known"), family


def test_table_gives_each_refused_family_the_engines_own_reason() -> None:
    rows = readme_rows()
    assert {family: rows[family][1] for family in REFUSED} == refusals()
    assert set(REFUSED_FAMILIES) <= set(REFUSED)


@pytest.mark.parametrize("family", TEMPLATES)
def test_thinking_is_told_apart_as_the_familys_template_needs(
    family: str, shared_inputs: Path
) -> None:
    template = (shared_inputs / "data" / TEMPLATES[family]).read_text(encoding="utf-8")
    is_tagged = any(opening in template for opening, _ in THINK_TAGS)
    parser = "channels" if uses_channels(template) else "tags" if is_tagged else "none"
    assert THINKING[family] == parser
    assert TEMPLATES.keys() == THINKING.keys()


def test_write_replaces_what_is_between_the_marks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(EXAMPLE)
    monkeypatch.setattr(support, "README", readme)
    row = ("olmoe", "1e-06", "yes", TakesBack.ANY, "yes", "none")
    support.write(support.table([row], {"dbrx": "It is refused."}))
    text = readme.read_text()
    assert text.startswith("Text before.\n")
    assert text.endswith("\nText behind.\n")
    assert "old" not in text
    assert readme_rows(text) == {"olmoe": row, "dbrx": ("dbrx", "It is refused.")}


def test_write_without_marks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("No marks.\n")
    monkeypatch.setattr(support, "README", readme)
    with pytest.raises(SystemExit, match="no place"):
        support.write("table")
    assert readme.read_text() == "No marks.\n"
