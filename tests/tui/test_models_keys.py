"""The menu of models: keys of jobs, and models added and removed."""

from __future__ import annotations

import pytest
from app_scenes import settle, until
from desk_fakes import FOLDER, OLMOE, DeskScene
from mira_app.catalog import BUILTIN
from mira_app.controller import Stage
from mira_app.job import JobState
from mira_app.tui.screens.add_model import AddModelScreen
from mira_app.tui.screens.models import ModelsScreen
from mira_app.tui.screens.remove_model import RemoveModelScreen
from mira_engine import api
from textual.widgets import Input


@pytest.fixture
def make_scene(tmp_path):
    scenes = []

    def make(*ready: str, **options) -> DeskScene:
        scenes.append(DeskScene(tmp_path, *ready, **options))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.close()


def shown_keys(scene: DeskScene) -> dict[str, str]:
    """Keys of the footer, with what they do."""
    bindings = scene.app.screen.active_bindings.values()
    return {b.binding.key: b.binding.description for b in bindings if b.binding.show}


async def type_text(pilot, text: str) -> None:
    pilot.app.screen.focused.insert_text_at_cursor(text)
    await pilot.pause()


# -- jobs


async def test_p_pauses_and_goes_on(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.start(pilot, OLMOE)
        await scene.progress(pilot, "download", 4, 10)
        await pilot.press("p")
        await until(pilot, lambda: scene.job_client.cancelled == [scene.job_call])
        assert "pausing" in scene.text_of(OLMOE)
        await scene.fail(pilot, api.CancelledError("Preparation was cancelled."))
        assert "paused 40%" in scene.text_of(OLMOE)
        assert not scene.menu.work.display
        await pilot.press("p")
        await until(pilot, lambda: len(scene.job_client.requests) == 2)


async def test_x_gives_the_job_up_and_keeps_the_model_listed(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.start(pilot, OLMOE)
        await pilot.press("x")
        await until(pilot, lambda: scene.desk.jobs.jobs == ())
        assert scene.job_client.cancelled == [scene.job_call]
        assert "available" in scene.text_of(OLMOE)


async def test_failed_job_says_why_in_its_row_and_r_tries_again(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.start(pilot, OLMOE)
        assert "r" not in shown_keys(scene)
        error = api.IndexUnreachableError("The hub does not answer.", hint="Try later.")
        await scene.fail(pilot, error)
        assert "failed" in scene.text_of(OLMOE)
        assert "The hub does not answer. Try later." in scene.details_text()
        assert any("The hub does not answer." in toast for toast in scene.toasts)
        assert shown_keys(scene)["r"] == "Try again"
        await pilot.press("r")
        await until(pilot, lambda: len(scene.job_client.requests) == 2)
        assert scene.desk.jobs.jobs[0].state is JobState.RUNNING


async def test_keys_of_jobs_are_shown_only_where_there_is_one(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.mark(pilot, BUILTIN)
        assert {"a", "slash", "s", "m", "delete"} <= {*shown_keys(scene)}
        assert not {"p", "x", "r", "escape"} & {*shown_keys(scene)}
        await scene.start(pilot, OLMOE)
        await until(pilot, lambda: "p" in shown_keys(scene))
        assert "x" in shown_keys(scene)
        assert "delete" not in shown_keys(scene)


async def test_escape_in_the_menu_stops_no_job_and_loses_nothing(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.start(pilot, OLMOE)
        await pilot.press("escape")
        await settle(pilot)
        assert scene.desk.jobs.jobs[0].state is JobState.RUNNING
        assert scene.job_client.cancelled == []
        assert isinstance(scene.app.screen, ModelsScreen)


async def test_m_measures_a_ready_model(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await pilot.press("m")
        await until(pilot, lambda: len(scene.job_client.requests) == 1)
        await scene.done(pilot)
        await until(pilot, lambda: isinstance(scene.job_client.requests[-1], api.ProfileModel))
        assert scene.controller.stage is Stage.IDLE


# -- adding


async def test_a_adds_a_repository_and_marks_it(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await pilot.press("a")
        await until(pilot, lambda: isinstance(scene.app.focused, Input))
        await type_text(pilot, "owner/a-moe")
        await until(pilot, lambda: "a repository" in str(scene.app.screen.verdict.content))
        await pilot.press("enter")
        await scene.open(pilot)
        await until(pilot, lambda: scene.marked() == "owner/a-moe")
        assert scene.job_client.requests == []


async def test_wrong_name_is_explained_and_stays_to_be_mended(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await pilot.press("a")
        await until(pilot, lambda: isinstance(scene.app.focused, Input))
        await type_text(pilot, "owner/two words")
        await pilot.press("enter")
        await until(pilot, lambda: scene.app.screen.verdict.has_class("-wrong"))
        assert isinstance(scene.app.screen, AddModelScreen)
        assert scene.app.screen.name_input.value == "owner/two words"
        await pilot.press("escape")
        await scene.open(pilot)
        assert scene.shelf.added == [FOLDER]


# -- removing


async def test_delete_asks_and_y_removes_with_the_bytes_freed(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.mark(pilot, BUILTIN)
        await pilot.press("delete")
        await until(pilot, lambda: isinstance(scene.app.screen, RemoveModelScreen))
        assert "4.0 GiB" in str(scene.app.screen.query_one("#remove-text").content)
        await pilot.press("y")
        await until(pilot, lambda: scene.shelf.removed == [BUILTIN])
        await until(pilot, lambda: any("4.0 GiB freed" in toast for toast in scene.toasts))
        await until(pilot, lambda: "not prepared" in scene.text_of(BUILTIN))


async def test_delete_and_anything_but_y_keeps_the_model(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        for key in ("escape", "n", "enter"):
            await scene.open(pilot)
            await pilot.press("delete")
            await until(pilot, lambda: isinstance(scene.app.screen, RemoveModelScreen))
            await pilot.press(key)
        await scene.open(pilot)
        assert scene.shelf.removed == []


async def test_removal_of_a_folder_model_says_that_the_folder_stays(make_scene):
    scene = make_scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.mark(pilot, FOLDER)
        await pilot.press("delete")
        await until(pilot, lambda: isinstance(scene.app.screen, RemoveModelScreen))
        text = str(scene.app.screen.query_one("#remove-text").content)
        assert f"your folder {FOLDER} stays as it is" in text


async def test_removal_that_fails_says_why(make_scene):
    scene = make_scene(BUILTIN)
    scene.shelf.refusal = api.PrepareError("It is being prepared elsewhere.", hint="Wait.")
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await pilot.press("delete")
        await until(pilot, lambda: isinstance(scene.app.screen, RemoveModelScreen))
        await pilot.press("y")
        await until(pilot, lambda: scene.menu.problem.display)
        assert "It is being prepared elsewhere." in str(scene.menu.problem.content)


async def test_loaded_model_and_one_with_a_job_are_not_removed(make_scene):
    scene = make_scene(BUILTIN)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.open(pilot)
        await scene.start(pilot, FOLDER)
        await pilot.press("delete")
        await until(pilot, lambda: any("give it up first" in toast for toast in scene.toasts))
        await scene.mark(pilot, BUILTIN)
        await pilot.press("enter")
        await scene.load(pilot)
        await pilot.press("ctrl+o")
        await scene.open(pilot)
        await until(pilot, lambda: "loaded" in scene.text_of(BUILTIN))
        await scene.mark(pilot, BUILTIN)
        await pilot.press("delete")
        await until(pilot, lambda: any("It is loaded" in toast for toast in scene.toasts))
        assert scene.shelf.removed == []
