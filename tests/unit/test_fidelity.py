"""The arithmetic of an evaluation, what it reads, and which texts are refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from mira_assets.calibration import calibration_prompts
from mira_assets.evaluation import evaluation_texts
from mira_engine.checkpoint import writing
from mira_engine.errors import ConfigError, DiskSpaceError
from mira_engine.events import MemoryPlan
from mira_engine.fidelity.kept_logits import KeptLogits
from mira_engine.fidelity.measures import (
    MAX_ROWS,
    FidelitySums,
    agreeing_tokens,
    compare,
    log_likelihood,
)
from mira_engine.fidelity.scoring import logit_rows
from mira_engine.fidelity.texts import (
    MAX_CONTINUATIONS,
    MIN_TEXT_TOKENS,
    PROMPT_TOKENS,
    Text,
    TextTokens,
    Window,
    beginnings,
    lead_tokens,
    make_evaluated,
    make_windows,
    read_text,
    tokenise,
)


class ByteTokenizer:
    """A token for each byte; `lead` before and `tail` behind where special tokens are wanted."""

    def __init__(self, lead: tuple[int, ...] = (), tail: tuple[int, ...] = ()) -> None:
        self.lead, self.tail = lead, tail

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        plain = list(text.encode())
        whole = [*self.lead, *plain, *self.tail] if add_special_tokens else plain
        return {"input_ids": whole}


# -- measures ---------------------------------------------------------------------------------


def test_perplexity_of_even_logits_is_the_number_of_words():
    found = compare(torch.zeros(3, 7), torch.zeros(3, 7), [0, 5, 6])
    assert found.perplexity == pytest.approx(7)
    assert (found.num_tokens, found.kl, found.top1_agreement) == (3, 0.0, 1.0)


def test_perplexity_and_divergence_of_hand_made_logits():
    ours = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
    theirs = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]]).log()
    found = compare(ours + 3.0, theirs - 1.0, [0, 2])
    assert found.perplexity == pytest.approx(1 / math.sqrt(0.5 * 0.8))
    first = 0.25 * math.log(0.25 / 0.5) + 0.5 * math.log(0.5 / 0.25)
    second = 2 * 0.2 * math.log(0.2 / 0.1) + 0.6 * math.log(0.6 / 0.8)
    assert found.mean_kl == pytest.approx((first + second) / 2, rel=1e-5)
    assert found.top1_agreement == 0.5


def test_divergence_is_of_the_reference_from_the_others_and_not_the_other_way():
    ours, theirs = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    there = compare(ours, theirs, [0]).kl
    assert there == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-5)
    assert compare(theirs, ours, [0]).kl != pytest.approx(there, rel=0.1)


def test_word_that_the_reference_rules_out_adds_nothing():
    theirs = torch.tensor([[0.0, 0.0, -math.inf]])
    found = compare(torch.zeros(1, 3), theirs, [0])
    assert found.kl == pytest.approx(math.log(3 / 2), rel=1e-5)


def test_divergence_of_equal_bfloat16_predictions_is_exactly_nothing():
    rows = torch.randn(5, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert compare(rows, rows, [1, 2, 3, 4, 5]).kl == 0.0


def test_sums_add_up_and_means_weigh_tokens():
    few = FidelitySums(num_tokens=1, nll=1.0, kl=0.5, num_agreeing=0)
    many = FidelitySums(num_tokens=3, nll=3.0, kl=0.1, num_agreeing=3)
    both = few + many
    assert both.perplexity == pytest.approx(math.e)
    assert both.mean_kl == pytest.approx(0.15)
    assert both.top1_agreement == 0.75
    assert FidelitySums(num_tokens=1, nll=1e6).perplexity == math.inf


def test_likelihood_of_tokens_over_more_rows_than_are_taken_at_once():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2 * MAX_ROWS + 3, 50, generator=generator)
    greedy = logits.argmax(dim=-1).tolist()
    expected = logits.log_softmax(-1).amax(dim=-1).sum().item()
    assert log_likelihood(logits, greedy) == (pytest.approx(expected), True)
    other = [*greedy[:-1], (greedy[-1] + 1) % 50]
    found, is_greedy = log_likelihood(logits, other)
    assert not is_greedy
    assert found < expected
    assert log_likelihood(logits[:0], []) == (0.0, True)


@pytest.mark.parametrize(
    ("made", "choices", "expected"),
    [
        ((4, 5, 6), (4, 5, 6), 8),  # it ended by itself, and the reference does so too
        ((4, 5, 6), (4, 9, 6), 1),
        ((4, 5, 6), (9, 5, 6), 0),
        (tuple(range(8)), (*range(7), 99), 7),
    ],
)
def test_agreeing_tokens_end_at_the_first_difference(made, choices, expected):
    assert agreeing_tokens(made, choices, 8) == expected


# -- what is read -----------------------------------------------------------------------------


def texts(*lengths: int, lead: tuple[int, ...] = ()) -> TextTokens:
    kinds = tuple(f"text {number}" for number in range(len(lengths)))
    return TextTokens(lead, kinds, tuple(tuple(range(length)) for length in lengths))


def sizes(windows: list[Window]) -> list[int]:
    return [len(window.tokens) for window in windows]


def test_windows_cover_a_text_once_and_begin_with_what_the_tokenizer_puts_first():
    windows = make_windows(texts(100, lead=(7,)), max_tokens=1000, window_tokens=41)
    assert sizes(windows) == [41, 41, 21]
    assert all(window.tokens[0] == 7 for window in windows)
    assert [t for window in windows for t in window.tokens[1:]] == list(range(100))
    assert sum(window.num_predicted for window in windows) == 100


def test_last_window_that_predicts_nothing_is_left_out():
    assert sizes(make_windows(texts(81), max_tokens=1000, window_tokens=40)) == [40, 40]
    with_lead = make_windows(texts(81, lead=(7,)), max_tokens=1000, window_tokens=41)
    assert sizes(with_lead) == [41, 41, 2]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        ((100, 100, 100), 300, [100, 100, 100]),
        ((100, 100, 100), 200, [66, 67, 67]),
        ((500, 40, 500), 600, [280, 40, 280]),
        ((500, 500, 500), 128, [64, 64]),
        ((500, 500), 64, [64]),
        ((30,), 4096, [30]),
    ],
)
def test_tokens_are_shared_equally_and_short_texts_leave_theirs(lengths, max_tokens, expected):
    assert sizes(make_windows(texts(*lengths), max_tokens=max_tokens)) == expected


def test_too_few_tokens_are_refused():
    with pytest.raises(ConfigError, match="tokens cannot be 63") as caught:
        make_windows(texts(500), max_tokens=63)
    assert "64" in caught.value.hint


def test_beginnings_are_spread_over_the_windows():
    windows = [Window("a", tuple(range(number, number + 100))) for number in range(40)]
    found = beginnings(windows)
    assert [tokens[0] for tokens in found] == [4 * number for number in range(MAX_CONTINUATIONS)]
    assert {len(tokens) for tokens in found} == {PROMPT_TOKENS}
    assert beginnings([Window("a", (1, 2, 3))]) == [(1,)]


def test_evaluated_counts_the_texts_that_were_left_out():
    several = [Text("a", "x" * 200), Text("b", "y" * 200), Text("c", "z" * 200)]
    found = make_evaluated(ByteTokenizer(), several, max_tokens=130)
    assert (found.num_texts, found.num_left_out, len(found.windows)) == (2, 1, 2)
    assert found.num_predicted == 128


@pytest.mark.parametrize("lead", [(), (1,), (1, 2)])
@pytest.mark.parametrize("tail", [(), (3,)])
def test_lead_is_what_stands_before_every_text(lead, tail):
    assert lead_tokens(ByteTokenizer(lead, tail)) == lead


def test_text_is_tokenised_without_the_lead_and_short_ones_are_refused_by_name():
    whole = "x" * MIN_TEXT_TOKENS
    found = tokenise(ByteTokenizer((1,)), [Text("a", whole)])
    assert (found.lead, found.tokens) == ((1,), (tuple(whole.encode()),))
    with pytest.raises(ConfigError, match=r"short\.txt") as caught:
        tokenise(ByteTokenizer(), [Text("a", whole), Text("short.txt", whole[1:])])
    assert "15 tokens" in caught.value.hint


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "No such file"),
        (b"", "It is empty"),
        (b" \n\t\n", "It is empty"),
        (b"\x89PNG\r\n\x1a\n\xff", "not UTF-8"),
        ("Z\u00fcrich".encode("latin-1"), "not UTF-8"),
        (b"text\x00text", "zero bytes"),
    ],
)
def test_file_that_is_no_text_is_refused_with_its_name(tmp_path, data, said):
    path = tmp_path / "mine.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"mine\.txt") as caught:
        read_text(path, 100)
    assert said in caught.value.hint
    with pytest.raises(ConfigError, match="directory"):
        read_text(tmp_path, 100)


def test_file_is_read_no_farther_than_its_tokens_can_reach(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("\ufeff" + "a" * 10_000, encoding="utf-8")
    kind, text = read_text(path, 100)
    assert (kind, len(text), text[0]) == ("long.txt", 3200, "a")


def test_shipped_texts_are_five_kinds_in_turn_and_no_calibration_prompts():
    shipped = evaluation_texts()
    kinds = [text.kind for text in shipped]
    assert kinds[:5] == ["encyclopaedia", "story", "dialogue", "code", "maths"]
    assert kinds[5:] == kinds[:5]
    assert all(1200 < len(text.text) < 2600 for text in shipped)
    prompts = {prompt.text for prompt in calibration_prompts()}
    assert not any(prompt in text.text for prompt in prompts for text in shipped)


# -- what is kept -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_come_back_bit_by_bit_in_any_order(tmp_path, dtype):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(length, 11, generator=generator).to(dtype) for length in (4, 2, 5)]
    with KeptLogits(tmp_path, [4, 2, 5]) as kept:
        kept.write(2, 3, rows[2][3:])
        kept.write(0, 0, rows[0])
        kept.write(2, 0, rows[2][:3])
        kept.write(1, 0, rows[1])
        assert torch.equal(kept.read(0, 1, 3), rows[0][1:])
        assert torch.equal(kept.read(1, 0, 2), rows[1])
        assert torch.equal(kept.read(2, 2, 3), rows[2][2:])
    assert not list(tmp_path.iterdir())


def test_kept_logits_without_room_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "free_bytes", lambda path: 100)
    with KeptLogits(tmp_path, [4, 2]) as kept, pytest.raises(DiskSpaceError, match="264 bytes"):
        kept.write(0, 0, torch.zeros(4, 11))


def plan(kv_bytes: int) -> MemoryPlan:
    sizes = dict.fromkeys(
        ("non_expert_bytes", "workspace_bytes", "budget_bytes", "draft_bytes", "slot_bytes",
         "num_slots", "reference_bytes", "num_experts", "num_draft_tokens"), 0,
    )  # fmt: skip
    return MemoryPlan(**sizes | {"kv_bytes": kv_bytes})


@pytest.mark.parametrize(
    ("kv_bytes", "context_length", "expected"),
    [(10**9, 8192, 512), (8_000_000, 8192, 75), (0, 8192, 16), (10**9, 512, 16)],
)
def test_logits_take_the_room_of_the_context_that_is_not_used(kv_bytes, context_length, expected):
    sized = SimpleNamespace(num_words=25_000, itemsize=4, window_tokens=512)
    found = logit_rows(plan(kv_bytes), context_length=context_length, **vars(sized))
    assert found == expected
