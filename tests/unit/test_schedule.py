"""The order in which shards are used up, and the room that it takes."""

from hypothesis import given
from hypothesis import strategies as st
from mira_engine.checkpoint.schedule import shard_steps, space_need

SIZES = {"a": 100, "b": 100, "c": 100}
LAYERS = [{"a"}, {"a", "b"}, {"c"}]


def test_shard_steps_drops_a_shard_with_the_last_layer_in_it():
    steps = shard_steps(LAYERS, [])
    assert [(step.layer, step.shards, step.dropped) for step in steps] == [
        (0, ("a",), ()),
        (1, ("a", "b"), ("a", "b")),
        (2, ("c",), ("c",)),
    ]


def test_shard_steps_takes_layers_in_the_order_of_their_shards():
    lexicographic = [{"a"}, {"c"}, {"a", "b"}, {"b"}]
    assert [step.layer for step in shard_steps(lexicographic, [])] == [0, 2, 3, 1]


def test_shard_steps_takes_shards_of_the_backbone_alone_first():
    steps = shard_steps(LAYERS, ["a", "z"])
    assert (steps[0].layer, steps[0].shards, steps[0].dropped) == (None, ("z",), ("z",))
    assert "a" not in {name for step in steps if step.layer is None for name in step.shards}


def test_shard_steps_leaves_out_what_is_done_and_what_nobody_needs():
    assert shard_steps(LAYERS, ["a", "b", "c"], done_layers={0, 1, 2}, done_shards=set(SIZES)) == ()
    (step,) = shard_steps(LAYERS, ["a", "b", "c"], done_layers={0, 1, 2}, done_shards={"a", "c"})
    assert (step.layer, step.shards, step.dropped) == (None, ("b",), ("b",))
    steps = shard_steps(LAYERS, [], done_layers={0, 1})
    assert [step.shards for step in steps] == [("c",)]


def need_of(steps, **fields):
    given_fields = {
        "shard_bytes": SIZES,
        "backbone_bytes": dict.fromkeys(SIZES, 10),
        "layer_bytes": dict.fromkeys(range(3), 30),
        "here_bytes": {},
    }
    return space_need(steps, **(given_fields | fields))


def test_space_need_counts_shards_that_wait_and_all_that_is_made():
    need = need_of(shard_steps(LAYERS, SIZES))
    # Layer 1 holds two shards, their parts of the backbone and two layers at once.
    assert (need.weights_bytes, need.made_bytes) == (200, 120)
    assert need.whole_bytes == 200 + 2 * 10 + 2 * 30


def test_space_need_of_keeping_is_everything():
    need = need_of(shard_steps(LAYERS, SIZES), is_dropping=False)
    assert (need.weights_bytes, need.whole_bytes) == (300, 420)


def test_space_need_leaves_out_what_is_here():
    need = need_of(shard_steps(LAYERS, SIZES), here_bytes={"a": 100, "b": 40})
    assert need.weights_bytes == 60
    assert need_of((), here_bytes={"a": 100}).whole_bytes == 0


shards = st.sampled_from("abcdef")
layer_shards = st.lists(st.sets(shards, min_size=1, max_size=3), min_size=1, max_size=6)


@given(layer_shards, st.sets(shards), st.sets(st.integers(0, 5)), st.sets(shards))
def test_shard_steps_any_work_has_each_shard_when_needed_and_drops_it_once(
    layers, backbone, done_layers, done_shards
):
    steps = shard_steps(layers, backbone, done_layers=done_layers, done_shards=done_shards)
    gone, converted, taken = set(), [], set(done_shards)
    for step in steps:
        assert not gone & set(step.shards)
        assert set(step.dropped) <= set(step.shards)
        taken |= set(step.shards)
        if step.layer is not None:
            assert set(step.shards) == layers[step.layer]
            converted.append(step.layer)
        gone |= set(step.dropped)
    assert sorted(converted) == [n for n in range(len(layers)) if n not in done_layers]
    assert backbone <= taken
    assert gone == {name for step in steps for name in step.shards}
