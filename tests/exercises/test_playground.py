"""The playground shows the numbers of the functions that it draws, and works in a browser."""

import base64
import re
import shutil
import subprocess
import sys

import pytest
from support import ROOT

from benchmarks import plan
from benchmarks.common import config_of, free_port, parse
from exercises import __main__ as command_line
from exercises import figures
from nanodomino.config.config import ALL_SCHEDULES
from nanodomino.errors import UserError
from nanodomino.mesh import group_rows
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.placement_and_messages import timetable
from nanodomino.schedules.simulation import bubble, peak_microbatches, simulate, step_time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURE = "data:image/svg+xml;base64,"


def words_of(svg: str) -> str:
    """Return all text of a picture."""
    return "\n".join(re.findall(r"<text[^>]*>([^<]*)<", svg))


def test_the_partners_of_each_rank_are_its_rows_in_the_mesh():
    rows = group_rows({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, lambda rows: {})
    for rank in range(16):
        numbers = figures.grid(world=16, tp=2, pp=2, cp=2, rank=rank).numbers
        for name in ("tp", "pp", "dp", "cp"):
            (row,) = [row for row in rows[name] if rank in row]
            assert sorted([rank, *numbers[name]]) == sorted(row), name


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_schedule_is_drawn_with_the_numbers_of_its_simulation_and_its_formula(name):
    figure, chunks = figures.schedule(name, F=2.0, I=2.0, W=2.0), ALL_SCHEDULES[name].chunks[0]
    table = timetable(ALL_SCHEDULES[name], 4, 8, chunks)
    rows = simulate(table, lambda stage, action: 2 * action.length / chunks)
    assert figure.numbers["step"] == step_time(rows) and figure.numbers["bubble"] == bubble(rows)
    assert figure.numbers["held"] == [peak_microbatches(row, lambda chunk: 1 / chunks) for row in table.rows]
    assert f"rank 0  {step_time(rows):10.1f}" in words_of(figure.svg)
    if name in SCHEDULES:
        assert figure.numbers["formula_bubble"] == pytest.approx(bubble(rows))
        assert figure.numbers["formula_held"] == figure.numbers["held"]


def test_a_layer_is_drawn_with_the_bound_of_the_ideal_wire():
    numbers = {way: figures.domino(way=way, ratio=1.0).numbers for way in ("blocking", "Domino", "paired")}
    assert numbers["blocking"]["bound"] == pytest.approx(2.0)
    assert 1 < numbers["paired"]["bound"] < numbers["Domino"]["bound"] < figures.domino(slices=1).numbers["bound"] < 2
    for way, ratio in (("blocking", 0.5), ("Domino", 2.0), ("paired", 1.0)):
        figure = figures.domino(way=way, ratio=ratio)
        found = figure.numbers
        assert found["wires"] == pytest.approx(ratio * found["work"])
        assert found["step"] == pytest.approx(found["bound"] * max(found["work"], found["wires"]), rel=1e-6)
        assert f"{found['step'] - found['work']:10.1f}" in words_of(figure.svg), "exposed, in the table"


def test_the_memory_is_that_of_bench_plan():
    figure = figures.memory("gpt2", 8, "A100", tp=2, pp=2, zero_stage=2, recompute="full")
    flags = parse(plan, "plan --model gpt2 --gpus 8 --gpu A100 --tp 2 --pp 2 --zero-stage 2 --recompute-granularity "
                        "full".split())
    plan.processes(flags)
    record = plan.plan(config_of(flags, 8), flags)[1]
    assert figure.numbers["stages"] == record["memory"] and figure.numbers["usable"] == record["usable_bytes"]


@pytest.mark.parametrize("draw, values, sentence", [
    (figures.grid, dict(tp=3), "world size 8 must equal"), (figures.schedule, dict(chunks=2), "virtual-stages must be"),
    (figures.memory, dict(model="gpt2", tp=8), "num-attention-heads 12 must be divisible")])
def test_a_bad_combination_raises_the_sentence_of_its_rule(draw, values, sentence):
    with pytest.raises(UserError, match=sentence):
        draw(**values)


def test_without_marimo_a_sentence_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install -r requirements-extra.txt"):
        command_line.main(["play"])


# ---- in a browser

@pytest.fixture(scope="module")
def address():
    """The address of a running playground."""
    pytest.importorskip("marimo", reason="the playground needs marimo: pip install -r requirements-extra.txt")
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "marimo", "run", "exercises/playground.py", "--headless",
                               "--no-token", "--port", str(port)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while "URL" not in (line := server.stdout.readline()):
        assert line, "marimo ended"
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait()


@pytest.fixture
def browser_page(address):
    """An open playground on a phone's width. At its end, the console must be without errors."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser is driven by playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, errors = browser.new_page(viewport={"width": 390, "height": 1500}), []
        page.set_default_timeout(120_000)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        yield page
        browser.close()
        assert errors == []


def see(page, figure):
    """Wait until the page shows this picture, and check that the page itself does not scroll sideways."""
    page.locator(f'img[src="{PICTURE}{base64.b64encode(figure.svg.encode()).decode()}"]').wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def answer(page, tab):
    """Open a tab and answer its question."""
    page.get_by_role("tab", name=tab).click()
    page.get_by_role("radio").first.check()
    assert page.locator(f'img[src^="{PICTURE}"]').count() == 0, "the question comes before the picture"
    page.get_by_role("button", name="Show").click()


@pytest.mark.exhaustive
@pytest.mark.parametrize("tab, draw, values, slider, moved", [
    ("The grid", figures.grid, dict(rank=5), 1, dict(tp=1)), ("Schedules", figures.schedule, {}, 0, dict(stages=3)),
    ("Domino", figures.domino, {}, 0, dict(ratio=0.75)),
    ("Memory", figures.memory, dict(gpus=16, tp=2), 3, dict(zero_stage=0))])
def test_a_page_asks_then_draws_and_follows_a_slider_that_a_key_moves(browser_page, tab, draw, values, slider, moved):
    answer(browser_page, tab)
    see(browser_page, draw(**values))
    browser_page.get_by_role("slider").nth(slider).press("ArrowLeft")
    see(browser_page, draw(**values | moved))


@pytest.mark.exhaustive
def test_a_bad_combination_shows_the_sentence_of_its_rule(browser_page):
    answer(browser_page, "Schedules")
    browser_page.locator("select").nth(1).select_option("2")
    with pytest.raises(UserError) as rule:
        figures.schedule(chunks=2)
    browser_page.get_by_text(str(rule.value)).wait_for()


@pytest.mark.exhaustive
def test_the_plan_shows_the_command_of_the_fastest_layout(browser_page):
    answer(browser_page, "Plan")
    browser_page.get_by_role("button", name="Search").click()
    figure = figures.search()
    see(browser_page, figure)
    browser_page.get_by_text(figure.numbers["layouts"][0]["command"]).first.wait_for()
