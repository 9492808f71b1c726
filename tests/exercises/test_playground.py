"""The playground shows the numbers of the functions that it draws, and works in a browser."""

import base64
import shutil
import subprocess
import sys

import pytest
from support import ROOT, needs

from benchmarks import plan
from benchmarks.runner import parse, reserve_port
from exercises import figures
from nanodomino.mesh import group_rows
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.simulation import bubble, peak_microbatches, simulate, step_time, timetable

needs("matplotlib")


def test_the_partners_of_each_rank_are_its_rows_in_the_mesh():
    rows = group_rows({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, lambda rows: {})
    for rank in range(16):
        numbers = figures.grid(world=16, tp=2, pp=2, cp=2, rank=rank).numbers
        assert all(sorted([rank, *numbers[name]]) in rows[name] for name in ("tp", "pp", "dp", "cp"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_drawn_with_the_numbers_of_its_simulation(name):
    figure, chunks = figures.schedule(name, F=2.0, I=2.0, W=2.0), SCHEDULES[name].chunks[0]
    table = timetable(SCHEDULES[name], 4, 8, chunks)
    rows = simulate(table, lambda stage, action: 2 * action.length / chunks)
    assert figure.numbers["step"] == step_time(rows) and figure.numbers["bubble"] == bubble(rows)
    assert figure.numbers["held"] == [peak_microbatches(row) / chunks for row in table.rows]
    assert f"rank 0  {step_time(rows):10.1f}".replace(" ", "\xa0") in figure.svg


def test_a_layer_is_drawn_with_the_bound_of_the_ideal_wire():
    bounds = [figures.domino(**cut).numbers["bound"] for cut in (
        dict(way="paired"), dict(way="Domino"), dict(way="Domino", slices=1), dict(way="blocking"))]
    assert 1 < bounds[0] < bounds[1] < bounds[2] < bounds[3] == pytest.approx(2.0)
    for way, ratio in (("blocking", 0.5), ("Domino", 2.0)):
        found = (figure := figures.domino(way=way, ratio=ratio)).numbers
        assert found["wires"] == pytest.approx(ratio * found["work"])
        assert found["step"] == pytest.approx(found["bound"] * max(found["work"], found["wires"]), rel=1e-6)
        assert f"{found['step'] - found['work']:10.1f}".replace(" ", "\xa0") in figure.svg, "exposed, in the table"


def test_the_memory_is_that_of_bench_plan():
    figure = figures.memory("gpt2", 8, "A100", tp=2, pp=2, zero_stage=2)
    plan.processes(flags := parse(plan, "plan --model gpt2 --gpus 8 --gpu A100 --tp 2 --pp 2 --zero-stage 2".split()))
    record = plan.answer(flags, None)[1]
    assert figure.numbers["stages"] == record["memory"] and figure.numbers["usable"] == record["usable_bytes"]


def test_the_printed_copy_says_what_it_needs_until_its_scripts_have_filled_it():
    printed, says = (ROOT / "docs/playground.html").read_text(), (ROOT / "exercises/playground.css").read_text().strip()
    assert printed.index(says) < printed.index('<div id="root"></div>')


@pytest.fixture(scope="module")
def page():
    """An open playground on a phone's width. At its end, the console must be without errors."""
    needs("marimo")
    driver = needs("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("there is no Chromium")
    reserved, errors = reserve_port(), []
    port = reserved.getsockname()[1]
    command = [sys.executable, *f"-m marimo run exercises/playground.py --headless --no-token --port {port}".split()]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert any("URL" in line for line in server.stdout), "marimo ended"
        with driver.sync_playwright() as started:
            page = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page(
                viewport={"width": 390, "height": 1500})
            page.set_default_timeout(60_000)
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(f"http://127.0.0.1:{port}")
            yield page
    finally:
        server.kill()
        reserved.close()
    assert errors == []


def see(page, figure):
    """Wait until the page shows this picture. The page itself must not scroll sideways."""
    page.locator(f'img[src$="{base64.b64encode(figure.svg.encode()).decode()}"]').wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.exhaustive
@pytest.mark.parametrize("tab, question, draw, values, slider, moved", [
    ("The grid", "Eight processes", figures.grid, dict(rank=5), 1, dict(tp=1)),
    ("Schedules", "Four stages", figures.schedule, {}, 0, dict(stages=3)),
    ("Domino", "The all-reduces", figures.domino, {}, 0, dict(ratio=0.75)),
    ("Memory", "A GPU trains", figures.memory, dict(gpus=16, tp=2), 1, dict(tp=1)),
    ("Plan", "GPT-2 XL", figures.search, {}, None, None)])
def test_a_page_asks_then_draws_follows_a_slider_and_refuses(page, tab, question, draw, values, slider, moved):
    page.get_by_role("tab", name=tab).click()
    page.get_by_text(question).wait_for()
    page.locator('img[src^="data:"]').wait_for(state="detached")
    page.get_by_role("radio").first.check()
    page.get_by_role("button", name="Show").click()
    if tab == "Plan":
        page.get_by_role("button", name="Search").click()
        see(page, figure := draw())
        assert figure.numbers["layouts"][0]["dp"] == 8, "the right answer"
        return page.get_by_text(figure.numbers["layouts"][0]["command"]).first.wait_for()
    see(page, draw(**values))
    page.get_by_role("slider").nth(slider).press("ArrowLeft")
    see(page, draw(**values | moved))
    if tab == "The grid":
        page.get_by_role("slider").nth(slider).press("End")
        page.get_by_text("world size 8 must equal tensor x pipeline x data parallel = 8 x 2 x 1 = 16").wait_for()
