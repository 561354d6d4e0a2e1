"""The panels in an app of their own: what they say, what they draw, and when."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace

import pytest
from app_scenes import NOTICES, until
from mira_app.panel_history import PanelState
from mira_app.remote.figures import ServerFigures
from mira_app.tui.screens import details
from mira_app.tui.screens.details import DetailsScreen
from mira_app.tui.widgets.live_panel import COLUMN_WIDTH
from mira_app.tui.widgets.panels import side_panel
from mira_app.tui.widgets.panels.cache_map import MARKS, fold, marks
from mira_app.tui.widgets.panels.drawing import spark, widths_of
from mira_app.tui.widgets.panels.plots import PLOTS, HistoryPlot, points
from mira_app.tui.widgets.panels.sections import (
    CAUSES,
    MEMORY,
    SERVED,
    column,
    memory_parts,
    strip,
)
from mira_app.tui.widgets.panels.side_panel import USUAL_COLUMNS, SidePanel
from mira_app.tui.widgets.residency_map import CacheGrid, ResidencyMap
from mira_engine.api import Notice, ReplyStats, ResidencySample
from panel_scenes import PLAN, Feed, PanelApp, picture


def fed(num_steps: int = 20, **shape: int) -> PanelState:
    feed = Feed(**shape)
    for _ in range(num_steps):
        state = feed.next()
    return state


def text_of(state: PanelState, width: int = COLUMN_WIDTH) -> str:
    return "\n".join(str(line) for line in column(state, width))


# -- what they say ------------------------------------------------------------------------


def test_column_says_every_figure() -> None:
    state = fed()
    text, stats, reply = text_of(state), state.stats, state.reply
    assert reply.served.shares is not None
    hot, stage, miss = reply.served.shares
    for figure in (
        f"{stats.tokens_per_s:.1f} tok/s", "0.84 s", f"{stats.hit_rate:.1%}",
        f"{hot:.1%}", f"{stage:.1%}", f"{miss:.1%}", f"{stats.stall_ms_per_token:.1f} ms/token",
        f"{stats.accepted_per_round:.2f} of 2", "K 2", "48 tok/s expected", "of 500M/s",
        "742 / 900 MiB", "240 of 480 experts",
    ):  # fmt: skip
        assert figure in text, figure
    for part in reply.ms_per_token or ():
        assert f"{part:.1f}" in text
    for name in (*SERVED, *CAUSES, *MEMORY):
        assert name in text
    for notice in NOTICES:
        assert notice.text in text


@pytest.mark.parametrize("width", [30, 43, 44, 59])
@pytest.mark.parametrize(
    "state", [PanelState(), PanelState(plan=PLAN), fed(1), fed(70)], ids=("none", "plan", "1", "70")
)
def test_lines_of_the_column_never_wrap_but_for_sentences(state: PanelState, width: int) -> None:
    sentences = {
        *(notice.text for notice in NOTICES),
        "48 tok/s expected, K 3 47; 7 records a round.",
    }
    for line in column(state, width):
        assert line.cell_length <= width or str(line) in sentences


def test_columns_with_extreme_figures_fit() -> None:
    stats = ReplyStats(
        num_prompt_tokens=131_072, num_cached_tokens=131_000, num_new_tokens=99_999,
        ttft_s=9999.99, decode_s=99_999.0, elapsed_s=2e5, num_hits=999_999_999,
        num_misses=99_999_999, bytes_moved=900 * 2**40, stall_s=9e4, verify_s=9.5e4,
        num_drafted=32 * 9999, num_rounds=9999, num_accepted=31 * 9999, num_records_loaded=10**6,
        peak_memory_bytes=900 * 2**30, planned_memory_bytes=999 * 2**30,
    )  # fmt: skip
    for line in column(PanelState(stats=stats, plan=PLAN, link_bytes_per_s=6.4e10), COLUMN_WIDTH):
        assert line.cell_length <= COLUMN_WIDTH, str(line)
    notices = tuple(Notice(code=str(i), text="t") for i in range(9))
    for line in strip(PanelState(stats=stats, plan=PLAN, notices=notices)):
        assert line.cell_length <= 78, str(line)


def test_memory_parts_are_the_plan_and_follow_the_picture() -> None:
    state = fed()
    parts = memory_parts(state)
    assert parts is not None
    assert sum(parts) == PLAN.total_bytes
    shown = dict(zip(MEMORY, parts, strict=True))
    rows = "".join(state.residency.regions)
    assert shown["HOT"] == rows.count("H") * PLAN.slot_bytes
    assert shown["STAGE"] == (rows.count("S") + rows.count("s")) * PLAN.slot_bytes
    unknown = dict(zip(MEMORY, memory_parts(replace(state, residency=None)), strict=True))
    assert unknown["STAGE"] == state.stats.expert_peak_bytes - PLAN.draft_bytes


def test_link_of_unknown_rate_is_shown_without_a_limit() -> None:
    assert "of 500M/s" not in text_of(replace(fed(), link_bytes_per_s=0.0))


def test_control_characters_of_notices_do_not_reach_the_screen() -> None:
    evil = Notice(code="x", text="red \x1b[31m and \x07bell")
    assert "\x1b" not in text_of(PanelState(notices=(evil,)))


@pytest.mark.parametrize("parts", [SERVED, CAUSES, MEMORY], ids=("served", "causes", "memory"))
def test_parts_of_a_bar_differ_without_colour(parts: dict[str, tuple[str, str]]) -> None:
    assert len({mark for mark, _ in parts.values()}) == len(parts)


@pytest.mark.parametrize(
    ("sizes", "width"),
    [((1, 1, 1), 30), ((1000, 1, 0, 1), 10), ((0, 0), 5), ((5, 5, 5, 5), 3), ((1e-9, 1), 2)],
)
def test_widths_add_up_and_no_part_vanishes(sizes: tuple[float, ...], width: int) -> None:
    shares = widths_of(sizes, width)
    assert sum(shares) == (width if sum(sizes) else 0)
    assert all(share >= 0 for share in shares)
    if sum(map(bool, sizes)) <= width:
        assert all(bool(share) == bool(size) for share, size in zip(shares, sizes, strict=True))


def test_spark_shows_the_last_values_at_the_right() -> None:
    assert str(spark([9, 0, 4, 8], 3)) == "▁▅█"
    assert str(spark([1.0], 3, most=2.0)) == "  ▅"
    assert str(spark([], 3)) == "   "


# -- the map ------------------------------------------------------------------------------


def test_fold_keeps_every_expert_where_there_is_room() -> None:
    sample = picture(3)
    folded = fold(sample, 16, 30)
    assert folded.regions == sample.regions
    assert folded.heat == sample.heat


@pytest.mark.parametrize(("columns", "rows"), [(5, 7), (1, 1), (16, 4), (100, 3), (60, 100)])
def test_fold_fits_the_room_and_keeps_majority_and_peak(columns: int, rows: int) -> None:
    sample = picture(1, 48, 128)
    folded = fold(sample, columns, rows)
    assert len(folded.regions) == len(folded.heat) <= rows
    assert {len(row) for row in folded.regions} == {folded.num_columns}
    assert folded.num_columns <= columns
    down, across = folded.layers_per_row, folded.experts_per_cell
    for y, row in enumerate(folded.regions):
        for x, region in enumerate(row):
            group = [
                line[x * across : (x + 1) * across] for line in sample.regions[y * down :][:down]
            ]
            cell = "".join(group)
            assert cell.count(region) == max(map(cell.count, "HSs."))
            heat = [line[x * across : (x + 1) * across] for line in sample.heat[y * down :][:down]]
            assert folded.heat[y][x] == max("".join(heat))


def test_marks_of_regions_differ_without_colour() -> None:
    by_region: dict[str, set[str]] = {}
    for (region, _), mark in MARKS.items():
        by_region.setdefault(region, set()).add(mark)
    assert len(set().union(*by_region.values())) == sum(map(len, by_region.values()))
    assert marks("HHSSs..", "9009190") == "█▓░▒+x·"


# -- on the screen ------------------------------------------------------------------------


async def show(pilot, state: PanelState) -> None:
    """Lets the side panel show a state, however recent its last one is."""
    pilot.app.show(state)
    side = pilot.app.screen_stack[1].query_one(SidePanel)
    grid = side.query_one(CacheGrid)
    layers_per_row = -(-len(state.residency.regions) // 16)
    if side.is_open:
        await until(pilot, lambda: side.column._state == state)
        await until(pilot, lambda: grid.map and grid.map.layers_per_row == layers_per_row)
        await until(pilot, lambda: side.column.size.height == len(side.column._rows))
    for _ in range(3):
        await pilot.pause()


def drawn_rows(grid: CacheGrid) -> list[str]:
    return ["".join(s.text for s in grid.render_line(y)) for y in range(grid.size.height)]


async def test_map_shows_the_picture_of_the_moment() -> None:
    app = PanelApp()
    async with app.run_test(size=(120, 80)) as pilot:
        state = fed(num_layers=12, num_experts=8)
        await show(pilot, state)
        grid = app.screen.side.query_one(CacheGrid)
        assert grid.size.height == 12
        for y, (regions, heat) in enumerate(
            zip(state.residency.regions, state.residency.heat, strict=True)
        ):
            text = drawn_rows(grid)[y]
            assert text.startswith(f"{y:>3} ")
            assert text[4::3][:8] == marks(regions, heat)
        moved = replace(state.residency, regions=("H" * 8, *state.residency.regions[1:]))
        await show(pilot, replace(state, residency=moved))
        assert set(drawn_rows(grid)[0][4:28]) <= set("█▓")


async def test_rows_that_did_not_change_are_not_drawn_again() -> None:
    app = PanelApp()
    async with app.run_test(size=(120, 80)) as pilot:
        state = fed()
        await show(pilot, state)
        grid, panel = app.screen.side.query_one(CacheGrid), app.screen.side.column
        regions: list = []
        for widget in (grid, panel):
            widget.refresh = lambda *where, layout=False: regions.extend(where or [layout])
        same = ResidencySample(request_id="r", **{
            name: tuple(getattr(state.residency, name)) for name in ("regions", "heat")
        })  # fmt: skip
        await show(pilot, replace(state, residency=same))
        assert regions == []
        rows = list(same.regions)
        rows[0] = "H" * 16 if rows[0][0] != "H" else "." * 16
        kept = replace(state, residency=replace(same, regions=tuple(rows)))
        await show(pilot, kept)
        map_rows = [region for region in regions if region.y == 0]
        assert map_rows
        regions.clear()
        await show(pilot, replace(kept, stats=replace(kept.stats, ttft_s=0.85)))
        assert [region.y for region in regions] == [2], "the line of the first token alone"


async def test_side_panel_rests_between_two_pictures(monkeypatch) -> None:
    monkeypatch.setattr(side_panel, "REST_S", 3600)
    app = PanelApp()
    async with app.run_test(size=(120, 60)) as pilot:
        feed = Feed()
        side = app.screen.side
        await show(pilot, feed.next())
        draws = []
        side.column.show = draws.append
        states = [feed.next() for _ in range(9)]
        for state in states:
            app.show(state)
        await pilot.pause()
        assert draws == []
        side._draw()  # as the timer does once it has rested
        assert draws == [states[-1]]


async def test_ctrl_b_closes_and_opens_the_panels() -> None:
    app = PanelApp()
    async with app.run_test(size=(120, 40)) as pilot:
        feed, side = Feed(), app.screen.side
        await show(pilot, feed.next())
        await pilot.press("ctrl+b")
        assert not side.display
        before = side.column.content
        later = feed.next()
        await show(pilot, later)
        assert side.column.content.is_same(before), "nothing is drawn for nobody"
        await pilot.press("ctrl+b")
        assert side.display
        await until(pilot, lambda: side.column._state is later)


async def test_keys_change_the_width_and_the_figures_follow() -> None:
    app = PanelApp()
    async with app.run_test(size=(160, 60)) as pilot:
        await show(pilot, fed())
        side = app.screen.side
        side.focus()
        for keys, width in (
            (("ctrl+left",), USUAL_COLUMNS + 8), (("<",), USUAL_COLUMNS + 16),
            (("<",) * 9, 80), ((">",) * 9, USUAL_COLUMNS), (("<",), USUAL_COLUMNS + 8),
            (("ctrl+left", "ctrl+right"), USUAL_COLUMNS + 8),
        ):  # fmt: skip
            await pilot.press(*keys)
            await until(pilot, lambda width=width: side.outer_size.width == width)
            room = side.column.content_size.width
            await until(pilot, lambda room=room: side.column._width == room)
            longest = max(line.cell_length for line in side.column._lines[:20])
            assert longest == room
        assert "waits, missed" not in str(side.column.content)
        side.columns = 64
        await until(pilot, lambda: "waits, missed" in str(side.column.content))


@pytest.mark.parametrize("size", [(80, 24), (40, 12)])
async def test_small_terminal_has_two_lines_in_place_of_the_column(size: tuple[int, int]) -> None:
    app = PanelApp()
    async with app.run_test(size=size) as pilot:
        app.show(fed())
        await pilot.pause()
        assert not app.screen.side.display
        assert app.screen.strip.size.height == 2
        assert "HOT" in str(app.screen.strip.content)


async def test_panels_take_the_colours_of_another_theme() -> None:
    app = PanelApp()
    async with app.run_test(size=(120, 60)) as pilot:
        await show(pilot, fed())
        column, grid = app.screen.side.column, app.screen.side.query_one(CacheGrid)

        def styles() -> list[str]:
            widgets = (column, grid)
            return [str(segment.style) for widget in widgets for segment in widget.render_line(0)]

        before = styles()
        app.theme = "textual-light"
        await until(pilot, lambda: all(map(operator.ne, before, styles())))
        assert len(styles()) == len(before)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (20, 5)])
async def test_details_show_map_and_plots_and_close(size: tuple[int, int]) -> None:
    app = PanelApp()
    async with app.run_test(size=size) as pilot:
        app.state = fed(num_layers=48, num_experts=128)
        await pilot.press("f4")
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))
        screen = app.screen
        await until(pilot, lambda: screen.query_one(ResidencyMap).map is not None)
        assert screen.map.map.num_columns <= size[0]
        assert len(screen.query(HistoryPlot)) == len(PLOTS)
        assert all(plot._session is app.state.session for plot in screen.query(HistoryPlot))
        if size[0] >= 80:
            assert "a cell is" in str(screen.map._legend.content)
        await pilot.press("f4")
        await until(pilot, lambda: not isinstance(app.screen, DetailsScreen))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_details_say_so_in_words_until_there_is_something_to_plot(size) -> None:
    app = PanelApp()
    async with app.run_test(size=size) as pilot:
        await pilot.press("f4")
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))
        screen, feed = app.screen, Feed()
        assert str(screen.sentence.content) == details.NO_REPLY
        await until(pilot, lambda: screen.sentence.region.height > 0)
        assert screen.map.display
        assert not screen.plots.display
        for _ in range(2):
            app.state = feed.next()
        await until(pilot, lambda: screen.plots.display)
        assert not screen.sentence.display
        assert all(plot._session is app.state.session for plot in screen.query(HistoryPlot))


async def test_details_of_a_server_show_its_rate_and_name_what_is_missing() -> None:
    app = PanelApp()
    async with app.run_test(size=(120, 40)) as pilot:
        app.state = replace(fed(), server=ServerFigures(address="http://host:8000/v1"))
        await pilot.press("f4")
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))
        screen = app.screen
        assert str(screen.sentence.content) == details.OF_A_SERVER
        assert not screen.map.display
        first, *others = screen.query(HistoryPlot)
        await until(pilot, lambda: first.region.height > 0)
        assert not any(plot.display for plot in others)


async def test_details_follow_the_session() -> None:
    app = PanelApp()
    async with app.run_test(size=(120, 40)) as pilot:
        feed = Feed()
        app.state = feed.next()
        await pilot.press("f4")
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))
        screen = app.screen
        app.state = feed.next()
        await until(pilot, lambda: screen.figures._state is app.state)
        plot = screen.query(HistoryPlot).first()
        await until(pilot, lambda: plot._session is app.state.session)


async def test_details_draw_only_what_changed_and_nothing_of_what_they_cover(monkeypatch) -> None:
    monkeypatch.setattr(side_panel, "REST_S", 0.01)
    for name in ("MAP_INTERVAL_S", "PLOT_INTERVAL_S"):
        monkeypatch.setattr(details, name, 3600)  # the test is the clock
    app = PanelApp()
    async with app.run_test(size=(120, 60)) as pilot:
        feed, below = Feed(), app.screen
        await show(pilot, feed.next())
        await pilot.press("f4")
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))
        screen = app.screen
        await settle_screen(pilot)
        counts: Counter[str] = Counter()
        count(monkeypatch, counts, "whole screens", screen._compositor, "render_full_update")
        count(monkeypatch, counts, "covered panels", below.side.column, "_draw")
        count(monkeypatch, counts, "figures", screen.figures, "_draw")
        count(monkeypatch, counts, "maps", screen.map._grid, "show")
        for plot in screen.query(HistoryPlot):
            count(monkeypatch, counts, "plots", plot, "render")
        for _ in range(3):
            screen._show_map()
            screen._show_next_plot()
            await settle_screen(pilot)
        assert counts == {}, "nothing changed"
        for _ in range(4):
            app.show(feed.next())
            screen._show_map()
            screen._show_next_plot()
            await settle_screen(pilot)
        # Every other sample of the feed has a picture of its own.
        assert counts == {"figures": 4, "maps": 2, "plots": 4}
        await pilot.press("f4")
        await until(pilot, lambda: app.screen is below)
        app.show(feed.next())
        await until(pilot, lambda: below.side.column._state is app.state)


def count(monkeypatch, counts: Counter[str], what: str, owner: object, name: str) -> None:
    """Counts calls of a method from now on."""
    method = getattr(owner, name)

    def counted(*args, **options):
        counts[what] += 1
        return method(*args, **options)

    monkeypatch.setattr(owner, name, counted)


async def settle_screen(pilot) -> None:
    """Lets what is due be drawn."""
    for _ in range(4):
        await pilot.pause()


def test_points_are_at_the_ends_of_their_intervals() -> None:
    session = fed(3).session
    seconds, values = points(session, lambda i: i.tokens_per_s)
    assert seconds == pytest.approx([1.09, 1.34, 1.59])
    assert values == [interval.tokens_per_s for interval in session]
    assert points(session, lambda i: None) == ([], [])


def test_lines_of_a_plot_differ_without_colour() -> None:
    for lines in PLOTS.values():
        assert len({line.mark for line in lines}) == len(lines)
        assert all(line.label[0].casefold() in "vdhsmw" for line in lines if line.label)
