"""Running state: taken back, brought forward over what is kept, and never silently wrong.

Oracle: the same model on a cache of its own, one token after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mira_engine.model import recurrent
from mira_engine.model.kv import ReservedLayer, StateManager
from mira_engine.model.linear import dense_groups
from mira_engine.model.recurrent import mixers_of, running_state_bytes
from tiny_running import OTHER_FAMILIES, save_other
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, JambaConfig, PreTrainedModel
from transformers.models.jamba.modeling_jamba import JambaMambaMixer

SCANNING = ("jamba", "qwen3_next", "nemotron_h", "granitemoehybrid")
FAMILIES = (*SCANNING, *OTHER_FAMILIES, "lfm2_moe")
CAPACITY = 64
PROMPT = [5, 91, 17, 200, 33, 64, 8, 129, 77]
CANDIDATES = [12, 250, 3, 99, 180]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def loaded(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], PreTrainedModel]:
    """Loads a family's tiny model once."""
    root = tmp_path_factory.mktemp("running")
    models: dict[str, PreTrainedModel] = {}

    def load(family: str) -> PreTrainedModel:
        if family not in models:
            is_other = family in OTHER_FAMILIES
            folder = save_other(family, root / family) if is_other else tiny_checkpoint(family)
            models[family] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, experts_implementation="eager"
            ).eval()
        return models[family]

    return load


@pytest.fixture
def model(family: str, loaded: Callable[[str], PreTrainedModel]) -> Iterator[PreTrainedModel]:
    """A tiny model; what a State Manager did to it is undone."""
    model = loaded(family)
    yield model
    for mixer in mixers_of(model).values():
        mixer.__dict__.pop("forward", None)


@torch.inference_mode()
def _run(model: PreTrainedModel, state: StateManager, tokens: list[int]) -> Tensor:
    """A pass as the engine makes it. Returns `[T, V]` logits."""
    logits = model(input_ids=torch.tensor([tokens]), cache=state.cache, use_cache=True).logits[0]
    state.commit(tokens)
    return logits


def _verify(model: PreTrainedModel, state: StateManager, tokens: list[int]) -> Tensor:
    state.begin_verification()
    return _run(model, state, tokens)


def _read(model: PreTrainedModel, *, is_rollback_wanted: bool = True) -> StateManager:
    """A state that has read the prompt."""
    state = StateManager(model, capacity=CAPACITY, is_rollback_wanted=is_rollback_wanted)
    _run(model, state, PROMPT)
    state.rollback(0)
    return state


def _singly(model: PreTrainedModel, tokens: list[int]) -> tuple[StateManager, Tensor]:
    """The oracle: after the prompt, token by token, nothing ever taken back."""
    state = _read(model, is_rollback_wanted=False)
    return state, torch.cat([_run(model, state, [token]) for token in tokens])


def _states(state: StateManager) -> dict[str, Tensor]:
    """All that the cache keeps, keys and values as far as they are in use."""
    found = {}
    for index, layer in enumerate(state.cache.layers):
        if isinstance(layer, ReservedLayer):
            length = layer.get_seq_length()
            found[f"{index} keys"] = layer.keys[:, :, :length].clone()
            found[f"{index} values"] = layer.values[:, :, :length].clone()
        for kind in ("conv_states", "recurrent_states"):
            kept = getattr(layer, kind, {}).get(0)
            if kept is not None:
                found[f"{index} {kind}"] = kept.clone()
    return found


def _assert_close(actual: Tensor, expected: Tensor, what: str = "logits") -> None:
    """Same but for the rounding of float32, relative to the largest number."""
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= 1e-5, f"{what}: {error}"


def _assert_same_states(state: StateManager, expected: StateManager) -> None:
    actual, wanted = _states(state), _states(expected)
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        _assert_close(actual[name], tensor, name)


def test_verification_gives_the_logits_of_single_tokens(model: PreTrainedModel) -> None:
    state = _read(model)
    assert state.can_roll_back
    state.mark()
    together = _verify(model, state, CANDIDATES)
    state.rollback(0)
    single, one_by_one = _singly(model, CANDIDATES)
    _assert_close(together, one_by_one)
    _assert_same_states(state, single)


@pytest.mark.parametrize("num_accepted", [1, 3, 4])
def test_rollback_after_verification_leaves_the_state_of_the_accepted_tokens(
    model: PreTrainedModel, num_accepted: int
) -> None:
    state = _read(model)
    state.mark()
    _verify(model, state, CANDIDATES)
    state.rollback(len(CANDIDATES) - num_accepted)
    assert state.tokens == PROMPT + CANDIDATES[:num_accepted]
    accepted, _ = _singly(model, CANDIDATES[:num_accepted])
    _assert_same_states(state, accepted)
    following = _run(model, state, [42])
    _assert_close(following, _run(model, accepted, [42]))


def test_rounds_in_a_row_do_not_drift(model: PreTrainedModel) -> None:
    state = _read(model)
    kept = []
    for length in (1, 4, 2, 5, 3):
        state.mark()
        for token in (7, 8):
            _run(model, state, [token])
        state.rollback(2)
        _verify(model, state, CANDIDATES)
        state.rollback(len(CANDIDATES) - length)
        kept += CANDIDATES[:length]
        state.rollback(0)
    _assert_same_states(state, _singly(model, kept)[0])


def test_draft_is_undone_bit_by_bit(model: PreTrainedModel) -> None:
    state = _read(model)
    before = _states(state)
    state.mark()
    for token in CANDIDATES:
        _run(model, state, [token])
    changed = _states(state)
    assert any(not torch.equal(changed[name], before[name]) for name in before if "_st" in name)
    state.rollback(len(CANDIDATES))
    after = _states(state)
    assert state.tokens == PROMPT
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_rollback_without_mark_or_record_raises_and_changes_nothing(
    model: PreTrainedModel,
) -> None:
    state = _read(model)
    _run(model, state, CANDIDATES)
    before = _states(state)
    with pytest.raises(RuntimeError, match="not marked"):
        state.rollback(2)
    state.mark()
    _run(model, state, CANDIDATES)
    with pytest.raises(RuntimeError, match="not marked"):
        state.rollback(2)
    with pytest.raises(RuntimeError, match="not marked"):
        state.rollback(len(CANDIDATES) + 1)
    assert len(state.tokens) == len(PROMPT) + 2 * len(CANDIDATES)
    state.rollback(len(CANDIDATES))
    after = _states(state)
    assert all(torch.equal(after[name], before[name]) for name in before)
    plain = _read(model, is_rollback_wanted=False)
    with pytest.raises(RuntimeError):
        plain.rollback(1)


class _BrokenOffError(Exception):
    pass


@pytest.mark.parametrize("is_verifying", [False, True])
def test_pass_broken_off_leaves_the_state_of_the_mark(
    model: PreTrainedModel, is_verifying: bool
) -> None:
    state = _read(model)
    before = _states(state)
    state.mark()
    _run(model, state, [7])
    if is_verifying:
        state.rollback(1)
        state.begin_verification()

    def break_off(*_: object) -> None:
        raise _BrokenOffError

    last = list(model.get_decoder().layers)[-1]
    handle = last.register_forward_pre_hook(break_off)
    with pytest.raises(_BrokenOffError):
        _run(model, state, CANDIDATES)
    handle.remove()
    state.recover(len(PROMPT))
    assert state.tokens == PROMPT
    after = _states(state)
    assert all(torch.equal(after[name], before[name]) for name in before)
    expected = _singly(model, CANDIDATES)[0]
    state.mark()
    _verify(model, state, CANDIDATES)
    state.rollback(0)
    _assert_same_states(state, expected)


def test_recover_without_mark_in_reach_drops_the_state(model: PreTrainedModel) -> None:
    state = _read(model)
    state.recover(len(PROMPT))
    assert state.tokens == [], "no mark but the empty one"
    _run(model, state, PROMPT)
    state.mark()
    _run(model, state, CANDIDATES)
    state.recover(len(PROMPT) - 1)
    assert state.tokens == [], "the mark lies behind what is wanted"


def test_prefix_is_reused_whole_up_to_the_mark_or_not_at_all(model: PreTrainedModel) -> None:
    state = _read(model)
    state.mark()
    _run(model, state, CANDIDATES)
    assert state.reuse_prefix([*PROMPT, *CANDIDATES, 1]) == len(PROMPT) + len(CANDIDATES)
    other = [*PROMPT, *CANDIDATES[:2], 1, 2]
    assert state.reuse_prefix(other) == len(PROMPT)
    _run(model, state, other[len(PROMPT) :])
    _assert_same_states(state, _singly(model, other[len(PROMPT) :])[0])
    assert state.reuse_prefix([*PROMPT[:4], 1, 2]) == 0
    assert state.tokens == []


def test_prompt_goes_on_in_passes_of_several_tokens(model: PreTrainedModel) -> None:
    for is_rollback_wanted in (False, True):
        state = _read(model, is_rollback_wanted=is_rollback_wanted)
        state.mark()
        logits = _run(model, state, CANDIDATES)
        state.rollback(0)
        single, one_by_one = _singly(model, CANDIDATES)
        _assert_close(logits, one_by_one)
        following = _run(model, state, [42])
        _assert_close(following, _run(model, single, [42]))


@pytest.mark.parametrize("family", ["jamba"], indirect=True)
def test_restarting_scan_is_seen_where_it_is_left_alone(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `RESTARTING_FAMILIES` is for; when transformers mends it, the entry can go."""
    monkeypatch.setattr(recurrent, "RESTARTING_FAMILIES", frozenset())
    state = _read(model, is_rollback_wanted=False)
    wrong = _run(model, state, CANDIDATES)
    _, right = _singly(model, CANDIDATES)
    assert (wrong - right).abs().max() > 1e-3


def test_projections_are_computed_once_for_all_candidates(model: PreTrainedModel) -> None:
    """One product a verification, and none for what is replayed."""
    state = _read(model)
    rows: list[int] = []
    handles = [
        child.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[1]))
        for mixer in mixers_of(model).values()
        for name, child in mixer.named_children()
        if isinstance(child, nn.Linear) and name not in ("x_proj", "dt_proj", "g_b_proj")
    ]
    state.mark()
    _verify(model, state, CANDIDATES)
    assert rows == [len(CANDIDATES)] * len(handles)
    state.rollback(2)
    assert len(rows) == len(handles)
    for handle in handles:
        handle.remove()


def test_rollback_frees_what_was_recorded_and_keeps_the_room_of_the_mark(
    model: PreTrainedModel,
) -> None:
    state = _read(model)
    before = state.num_bytes()
    state.mark()
    marked = state.num_bytes()
    running = marked - before
    assert running > 0
    for _ in range(3):
        state.mark()
        _verify(model, state, CANDIDATES)
        state.rollback(len(CANDIDATES) - 1)
    assert all(not mixer.forward.__self__.num_recorded for mixer in mixers_of(model).values())
    per_token = (before - running) // len(PROMPT)
    assert state.num_bytes() == marked + 3 * per_token
    state.reset()
    assert state.num_bytes() == running, "the room of the copy stays"


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 8])
def test_planned_bytes_cover_what_is_held(model: PreTrainedModel, num_draft_tokens: int) -> None:
    state = _read(model, is_rollback_wanted=num_draft_tokens > 0)
    state.mark()
    running = sum(t.nbytes for name, t in _states(state).items() if "_states" in name)
    held = running
    if num_draft_tokens:
        _verify(model, state, [*range(num_draft_tokens + 1)])
        mixers = [mixer.forward.__self__ for mixer in mixers_of(model).values()]
        rows = sum(t.nbytes for mixer in mixers for t in mixer._rows.values())
        assert rows > 0
        held = 2 * running + rows
    planned = running_state_bytes(model, torch.float32, num_draft_tokens)
    assert held <= planned <= 4 * held
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    assert running_state_bytes(empty, torch.float32, num_draft_tokens) == planned


def test_model_without_running_state_needs_no_bytes_and_no_mark() -> None:
    assert running_state_bytes(nn.Linear(3, 3), torch.float32, 4) == 0


def test_time_steps_keep_their_weight_which_the_mixer_reads_itself() -> None:
    with torch.device("meta"):
        mixer = JambaMambaMixer(JambaConfig(hidden_size=1024, mamba_dt_rank=64), layer_idx=0)
    names = [group.name for group in dense_groups(mixer.to(torch.bfloat16))]
    assert names == ["in_proj", "x_proj", "out_proj"]


def test_unknown_mixers_are_left_to_the_library(
    family: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolutions alone it can take back; scans it cannot, and that is said."""
    monkeypatch.setattr(recurrent, "_OUTPUT_PROJECTIONS", ())
    state = _read(model)
    assert state.can_roll_back == (family == "lfm2_moe")
    if family != "lfm2_moe":
        with pytest.raises(RuntimeError, match="cannot be rolled back"):
            state.rollback(1)
        return
    _run(model, state, CANDIDATES)
    state.rollback(3)
    monkeypatch.undo()
    expected = _singly(model, CANDIDATES[:2])[0]
    following = _run(model, state, [42])
    _assert_close(following, _run(model, expected, [42]))
