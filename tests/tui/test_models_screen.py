"""The menu of models: its table, verdicts, details, searches, and how a model is picked."""

from __future__ import annotations

import pytest
from app_scenes import settle, until
from desk_fakes import FOLDER, GRANITE, OLMOE, DeskScene
from fake_engine import PLAN
from mira_app.catalog import BUILTIN
from mira_app.job import JobState
from mira_app.model_rows import Column, columns_for
from mira_app.tui.widgets.model_table import ModelList
from mira_assets.models import load_models
from mira_engine import api


@pytest.fixture
def make_scene(tmp_path):
    scenes = []

    def make(*ready: str, **options) -> DeskScene:
        scenes.append(DeskScene(tmp_path, *ready, **options))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.close()


# -- the table


@pytest.mark.parametrize("width", [20, 40, 60, 76, 77, 90, 100, 116, 140, 200])
def test_columns_fit_the_width_and_the_important_ones_come_first(width):
    widths = columns_for(width)
    gaps = 2 * (len(widths) - 1)
    assert sum(widths.values()) + gaps <= width
    order = [Column.NAME, Column.STATE, Column.VERDICT, Column.PARAMETERS, Column.DOWNLOAD]
    assert set(order[: len(widths)]) <= {*widths}
    assert list(widths) == [column for column in Column if column in widths]


@pytest.mark.parametrize(("size", "num_columns"), [((80, 24), 4), ((120, 40), 6), ((44, 15), 2)])
async def test_table_lists_all_models_with_the_columns_there_is_room_for(
    make_scene, size, num_columns
):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=size) as pilot:
        await scene.open(pilot)
        await settle(pilot)
        assert scene.listed() == [BUILTIN, FOLDER, *load_models()]
        assert len(scene.menu.model_list.columns) == num_columns
        assert "ready" in scene.text_of(BUILTIN)
        assert "downloaded" in scene.text_of(FOLDER)
        assert "available" in scene.text_of(OLMOE)
        assert scene.menu.model_list.max_scroll_x == 0


async def test_table_follows_the_terminal_and_keeps_the_marked_model(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.mark(pilot, OLMOE)
        await pilot.resize_terminal(130, 40)
        await until(pilot, lambda: len(scene.menu.model_list.columns) == 6)
        assert scene.marked() == OLMOE
        assert "12.9 GiB | ~6.9 GiB" in scene.text_of(OLMOE)


async def test_reread_without_news_draws_no_cell_anew(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await settle(pilot)
        before = scene.menu.model_list.get_row(OLMOE)
        scene.menu.reread()
        after = scene.menu.model_list.get_row(OLMOE)
        assert all(a is b for a, b in zip(before, after, strict=True))


async def test_table_takes_the_colours_of_another_theme(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        before = [str(cell.style) for cell in scene.menu.model_list.get_row(BUILTIN)]
        scene.app.theme = "mira-light"
        await until(
            pilot,
            lambda: [str(c.style) for c in scene.menu.model_list.get_row(BUILTIN)] != before,
        )


async def test_title_with_escape_sequences_reaches_the_table_without(make_scene):
    scene = make_scene()
    scene.shelf.added.append("/models/bad\x1b[31m\u202ename")
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        texts = [str(cell) for cell in scene.menu.model_list.get_row_at(2)]
        assert "badname" in texts[0]


# -- verdicts


async def test_verdicts_arrive_one_by_one(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await until(pilot, lambda: "working it out" in scene.text_of(OLMOE))
        await scene.judge(pilot)
        assert "about 81 tok/s, estimate" in scene.text_of(BUILTIN)
        assert "about 81 tok/s, estimate, large, draft 4" in scene.details_text()
        assert "working it out" in scene.text_of(OLMOE)
        assert "240 of 480 experts" in scene.details_text()


async def test_model_that_does_not_fit_says_what_is_missing(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.judge(pilot, refusal="This model needs 9.0 GiB.")
        assert "needs 5.0 MiB more" in scene.text_of(BUILTIN)
        assert "This model needs 9.0 GiB." in scene.details_text()


async def test_no_verdict_is_asked_beside_the_first_preparation(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await until(pilot, lambda: len(scene.plan_client.requests) == 1)
        await scene.start(pilot, BUILTIN)
        scene.plan_client.calls[-1].fail(api.PrepareError("The disk is read-only."))
        scene.menu.show_models()
        for _ in range(3):
            scene.menu.poll_desk()
        assert len(scene.plan_client.requests) == 1


async def test_verdicts_are_not_asked_while_the_menu_is_hidden(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await pilot.press("enter")
        await scene.load(pilot)
        scene.menu.show_models()
        assert not scene.desk.verdicts.is_pending(OLMOE)


# -- details


async def test_details_tell_disk_licence_and_what_was_checked(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.mark(pilot, GRANITE)
        assert "58.6 GiB once it is prepared" in scene.details_text()
        assert "Licence: Apache-2.0" in scene.details_text()
        assert "Shape checked" in scene.details_text()
        await scene.mark(pilot, "zai-org/GLM-4.5-Air")
        assert "47.8 GiB too few" in scene.details_text()
        assert "Shape NOT checked" in scene.details_text()


# -- picking


async def test_enter_on_a_ready_model_loads_it(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await pilot.press("enter")
        await scene.load(pilot)
        assert isinstance(scene.client.requests[0], api.LoadModel)
        assert scene.job_client.requests == []


async def test_enter_on_another_model_starts_its_job_and_opens_it_when_done(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.start(pilot, OLMOE)
        request = scene.job_client.requests[0]
        assert isinstance(request, api.PrepareModel)
        assert request.model == OLMOE
        for second in range(4):
            scene.now_s = second
            await scene.progress(pilot, "download", second * 2**30, 10 * 2**30)
        assert "download 30%" in scene.text_of(OLMOE)
        step = str(scene.menu.work.step.content)
        assert step == "OLMoE 1B-7B Instruct: download · 3.0 GiB of 10.0 GiB · 1.0 GiB/s · 7 s left"
        assert "[download]" in str(scene.menu.work.steps.content)
        await scene.done(pilot)
        await scene.load(pilot)
        assert scene.client.requests[0].model == OLMOE
        assert any("is ready" in toast for toast in scene.toasts)


async def test_model_opens_once_it_can_be_loaded_and_its_predictors_are_put_off(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.start(pilot, OLMOE)
        await scene.progress(pilot, "predictors", 1, 10, "tokens")
        assert scene.client.requests == []
        scene.shelf.ready.add(OLMOE)
        scene.menu.reread()
        scene.menu.poll_desk()
        await scene.load(pilot)
        await until(pilot, lambda: scene.job_client.cancelled == [scene.job_call])
        assert any("predictors are put off" in toast for toast in scene.toasts)
        assert any("Ctrl+O goes on" in toast for toast in scene.toasts)
        scene.job_call.fail(api.CancelledError("Stopped."))
        await until(pilot, lambda: scene.desk.jobs.jobs[0].state is JobState.PAUSED)
        assert len(scene.job_client.requests) == 1


async def test_what_was_put_off_is_seen_in_the_chat_and_goes_on_in_the_menu(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(120, 30)) as pilot:
        await scene.open(pilot)
        await scene.start(pilot, OLMOE)
        scene.shelf.ready.add(OLMOE)
        scene.menu.reread()
        scene.menu.poll_desk()
        await scene.load(pilot)
        await until(pilot, lambda: len(scene.job_client.cancelled) == 1)
        scene.job_call.fail(api.CancelledError("Stopped."))
        state_line = scene.app.chat_screen.state_line
        await until(
            pilot,
            lambda: str(state_line.content) == "predictors put off, Ctrl+O goes on · ready",
        )
        await pilot.press("ctrl+o")
        await until(pilot, lambda: len(scene.job_client.requests) == 2)
        assert scene.desk.jobs.jobs[0].state is JobState.RUNNING
        await pilot.press("ctrl+o")
        await until(pilot, lambda: len(scene.job_client.cancelled) == 2)


async def test_what_was_put_off_goes_on_while_one_chats_with_another_model(make_scene):
    scene = make_scene(BUILTIN, OLMOE)
    async with scene.app.run_test(size=(120, 30)) as pilot:
        await scene.open(pilot)
        scene.desk.jobs.start(OLMOE, "OLMoE", is_profiling=True)
        await scene.mark(pilot, OLMOE)
        await pilot.press("enter")
        await scene.load(pilot)
        await until(pilot, lambda: scene.desk.jobs.jobs[0].is_put_off)
        if scene.job_client.calls:
            scene.job_call.fail(api.CancelledError("Stopped."))
        await pilot.press("ctrl+o")
        await scene.mark(pilot, BUILTIN)
        await pilot.press("enter")
        await scene.requested_load(pilot, BUILTIN)
        scene.client.deliver_loaded(PLAN)
        await until(pilot, lambda: scene.app.screen is scene.app.chat_screen)
        assert not scene.desk.jobs.jobs[0].is_put_off
        assert scene.desk.jobs.jobs[0].is_active


async def test_job_that_ends_while_another_model_answers_leaves_the_chat_alone(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.start(pilot, OLMOE)
        await scene.mark(pilot, BUILTIN)
        await pilot.press("enter")
        await scene.load(pilot)
        await scene.progress(pilot, "download", 1, 10)
        await scene.done(pilot)
        assert scene.controller.loaded.model == BUILTIN
        assert len(scene.client.requests) == 1
        assert any("OLMoE 1B-7B Instruct is ready" in toast for toast in scene.toasts)


async def test_second_job_waits_and_is_counted(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.start(pilot, OLMOE)
        await scene.mark(pilot, GRANITE)
        await pilot.press("enter")
        await until(pilot, lambda: "waiting" in scene.text_of(GRANITE))
        assert "1 more waiting" in str(scene.menu.work.step.content)


# -- searching and sorting


async def test_slash_searches_while_typing_and_escape_shows_all_again(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.mark(pilot, OLMOE)
        await pilot.press("slash", "q", "w", "e", "n", "3")
        await until(pilot, lambda: len(scene.listed()) == 3)
        assert all(model.startswith("Qwen/Qwen3") for model in scene.listed())
        await pilot.press("escape")
        await scene.open(pilot)
        assert len(scene.listed()) == 2 + len(load_models())
        assert scene.menu.search.value == ""


async def test_enter_in_the_search_goes_to_what_was_found(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await pilot.press("slash", *"mixtral", "enter")
        await scene.open(pilot)
        assert [*scene.listed()] == ["mistralai/Mixtral-8x7B-Instruct-v0.1"]
        await pilot.press("enter")
        await until(pilot, lambda: len(scene.job_client.requests) == 1)


async def test_search_that_finds_nothing_says_so_and_enter_is_harmless(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await pilot.press("slash", *"zzz", "enter")
        await scene.open(pilot)
        assert "Esc shows all again" in scene.details_text()
        await pilot.press("enter", "p", "x", "delete", "escape")
        await until(pilot, lambda: len(scene.listed()) == 2 + len(load_models()))


async def test_s_sorts_by_the_next_column_and_comes_back(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(120, 40)) as pilot:
        await scene.open(pilot)
        unsorted = scene.listed()
        await pilot.press("s")
        await until(pilot, lambda: scene.listed()[0] == BUILTIN and scene.listed() != unsorted)
        assert "Model ▲" in [str(c.label) for c in scene.menu.model_list.ordered_columns]
        await pilot.press("s")
        await until(pilot, lambda: scene.listed()[0] == GRANITE)
        assert scene.listed()[-2:] == [BUILTIN, FOLDER]
        for _ in range(4):
            await pilot.press("s")
        await until(pilot, lambda: scene.listed() == unsorted)


async def test_click_on_a_heading_sorts_and_the_second_turns_round(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await settle(pilot)
        for first in (GRANITE, "zai-org/GLM-4.5-Air"):
            await pilot.click(ModelList, offset=(28, 0))
            await until(pilot, lambda first=first: scene.listed()[0] == first)


# -- over restarts


async def test_paused_job_is_in_the_menu_after_a_restart(make_scene):
    first = make_scene()
    async with first.app.run_test(size=(80, 24)) as pilot:
        await first.open(pilot)
        await first.start(pilot, OLMOE)
        await pilot.press("p")
        await first.fail(pilot, api.CancelledError("Preparation was cancelled."))
    first.close()
    second = make_scene()
    async with second.app.run_test(size=(80, 24)) as pilot:
        await second.open(pilot)
        await until(pilot, lambda: "paused" in second.text_of(OLMOE))
        assert second.job_client.requests == []
        await second.mark(pilot, OLMOE)
        await pilot.press("p")
        await until(pilot, lambda: len(second.job_client.requests) == 1)
