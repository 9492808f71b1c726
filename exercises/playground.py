"""The playground: five pages on which pictures of distributed training follow sliders.

    pip install -r requirements.txt -r requirements-extra.txt
    marimo run exercises/playground.py

Each page first asks a question. The picture appears after the answer. All numbers and pictures come from figures.py,
which calls the project's own code. `marimo export html exercises/playground.py -o FILE` shows all pages in one file.
"""

import marimo        # not found? Run: pip install -r requirements-extra.txt

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="nanodomino's playground")

with app.setup:
    import base64
    import html
    import re
    import sys
    from contextlib import contextmanager
    from pathlib import Path

    import marimo as mo
    import torch._dynamo         # noqa: F401     the first optimizer would import it, while a student waits

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

    from exercises import figures
    from nanodomino.analysis.hardware import GPUS
    from nanodomino.config.config import ALL_PRESETS, ALL_SCHEDULES
    from nanodomino.errors import UserError
    from nanodomino.options.recompute.tape_policy import GRANULARITIES
    from nanodomino.settings.presets import DTYPES, PRESETS


@app.function
def picture(svg: str, words: str):
    """Show a picture. It keeps its own light background. On a narrow screen it scrolls sideways."""
    width = int(re.search(r'width="(\d+)"', svg)[1])
    data = base64.b64encode(svg.encode()).decode()
    return mo.Html(f'<div style="overflow-x:auto" tabindex="0" role="group" aria-label="{html.escape(words)}">'
                   f'<img alt="{html.escape(words)}" src="data:image/svg+xml;base64,{data}" style="display:block;width:'
                   f'100%;min-width:{min(width, 720)}px;max-width:{width}px;height:auto;border-radius:6px"></div>')


@app.function
def table(rows):
    """Show rows of text, the heading first."""
    heading, *others = [[html.escape(cell) for cell in row] for row in rows]
    style = 'style="padding:2px 14px 2px 0;text-align:left;white-space:nowrap"'
    lines = ["".join(f"<{kind} {style}>{cell}</{kind}>" for cell in row)
             for kind, row in [("th", heading), *(("td", row) for row in others)]]
    return mo.Html('<div style="overflow-x:auto" tabindex="0"><table>' + "".join(f"<tr>{one}</tr>" for one in lines)
                   + "</table></div>")


@app.function
def question(words: str, choices):
    """Ask a question. The value is None until it is answered."""
    return mo.ui.radio([str(choice) for choice in choices], label=f"**{words}**").form(
        submit_button_label="Show", bordered=True)


@app.function
def verdict(said: str, right: str, because: str):
    """Compare the answer with the right one. because: why, in a sentence or two"""
    words = "Right" if said == right else f"You said {said}, but it is {right}"
    return mo.callout(mo.md(f"**{words}.** {because}"), kind="success" if said == right else "info")


@app.function
def refusal(error):
    """Show the sentence of a UserError."""
    return mo.callout(mo.md(f"**This combination breaks a rule:** {html.escape(str(error))}"), kind="warn")


@app.function
def page(form, right, because: str, controls, draw, in_words):
    """Show the question. After the answer, also show the verdict, the controls and the picture.

    right(): the right choice. because: see verdict()
    draw(**values): the Figure for the controls' values. in_words(numbers): a sentence with the figure's numbers
    An export cannot be answered, so it shows everything.
    """
    if form.value is None and mo.app_meta().mode == "run":
        return form
    parts = [form]
    if form.value is not None:
        parts.append(verdict(form.value, str(right()), because))
    parts.append(mo.hstack([controls[name] for name in controls.elements], wrap=True, justify="start", gap=1.5))
    try:
        figure = draw(**controls.value)
    except UserError as error:
        return mo.vstack([*parts, refusal(error)])
    words = in_words(figure.numbers)
    return mo.vstack([*parts, mo.md(words), picture(figure.svg, re.sub("[*`]", "", words)),
                      *([table(figure.table)] if figure.table else [])])


@app.cell(hide_code=True)
def _():
    running = mo.app_meta().mode == "run"
    tab = mo.ui.tabs(dict.fromkeys(("The grid", "Schedules", "Domino", "Memory", "Plan"), ""))
    printed = "*This is a printed copy. The sliders work in* `marimo run exercises/playground.py`."
    mo.vstack([mo.md("# Playground\nAnswer the question of a page. Then move the sliders and watch the picture. "
                     "The numbers come from the functions that also plan real runs."),
               tab.style(margin="0 min(0px, 50vw - 209px)") if running else mo.md(printed)])
    return running, tab


# ---- the grid

@app.cell(hide_code=True)
def _():
    grid_form = question("Eight processes train with tensor parallelism (tp) 2, pipeline parallelism (pp) 2 and data "
                         "parallelism (dp) 2. Ranks are numbered with tp fastest, then dp, then pp. Which rank sends "
                         "activations to rank 5?", (1, 4, 7))
    grid_controls = mo.ui.dictionary({
        "world": mo.ui.slider(steps=[1, 2, 4, 6, 8, 12, 16, 24, 32], value=8, label="processes", show_value=True),
        "tp": mo.ui.slider(1, 8, value=2, label="tp", show_value=True),
        "pp": mo.ui.slider(1, 8, value=2, label="pp", show_value=True),
        "cp": mo.ui.slider(1, 4, value=1, label="cp", show_value=True),
        "ep": mo.ui.slider(1, 4, value=1, label="ep", show_value=True),
        "rank": mo.ui.number(0, 31, value=5, label="rank")})
    return grid_controls, grid_form


@app.cell(hide_code=True)
def _(grid_controls, grid_form, running, tab):
    mo.stop(running and tab.value != "The grid")

    def grid_words(numbers):
        lines = [f"`{name}`: {figures.ROLES[name]} rank{'s' * (len(numbers[name]) > 1)} "
                 f"**{', '.join(map(str, numbers[name]))}**" for name in figures.PARTNERS if numbers.get(name)]
        return (f"Rank **{numbers['rank']}** holds {numbers['holds']}: {numbers['parameters']:,} parameters "
                f"of the model `nano`. Of the 64 samples of a step, its replica trains on {numbers['samples']}.\n\n"
                + "\n".join(f"- {one}" for one in lines or ["It talks to no other rank."]))

    page(grid_form, lambda: figures.grid(rank=5).numbers["pp"][0],
         "Rank 5 is in stage 1. It has the same place in its stage as rank 1 has in stage 0, so rank 1 sends it "
         "activations. Rank 4 holds the other half of its matrices, and rank 7 the same weights in the other replica.",
         grid_controls, figures.grid, grid_words)


# ---- schedules

@app.cell(hide_code=True)
def _():
    schedule_form = question("Four stages run 1F1B on eight microbatches. How many microbatches does stage 0 hold at "
                             "once, at most?", (1, 4, 8))
    schedule_controls = mo.ui.dictionary({
        "name": mo.ui.dropdown([*ALL_SCHEDULES], value="1f1b", label="schedule"),
        "stages": mo.ui.slider(1, 8, value=4, label="stages", show_value=True),
        "microbatches": mo.ui.slider(1, 32, value=8, label="microbatches", show_value=True),
        "chunks": mo.ui.dropdown({"the fewest": None, "1": 1, "2": 2, "3": 3, "4": 4}, value="the fewest",
                                 label="chunks per stage"),
        "F": mo.ui.slider(0.5, 4, 0.5, value=1, label="F: forward", show_value=True),
        "I": mo.ui.slider(0.5, 4, 0.5, value=1, label="I: input gradients", show_value=True),
        "W": mo.ui.slider(0.5, 4, 0.5, value=1, label="W: weight gradients", show_value=True),
        "message": mo.ui.slider(0, 3, 0.5, value=0, label="message delay", show_value=True)})
    return schedule_controls, schedule_form


@app.cell(hide_code=True)
def _(running, schedule_controls, schedule_form, tab):
    mo.stop(running and tab.value != "Schedules")

    def schedule_words(numbers):
        known = numbers["formula_bubble"]
        return (f"A step takes **{numbers['step']:g}** units of time. The bubble is **{numbers['bubble']:.1%}** of the "
                "busiest stage's computing time. "
                + ("The table of `schedules/definitions.py` has no formula for this schedule." if known is None else
                   f"The formula for the idle time, `{numbers['idle_formula']}`, gives {known:.1%}"
                   + ("." if abs(known - numbers["bubble"]) < 1e-9 else ": it assumes that messages take no time, and "
                      "conditions that `schedules/definitions.py` lists.")))

    page(schedule_form, lambda: f"{figures.schedule().numbers['held'][0]:g}",
         "Look at stage 0: it runs the forwards of microbatches 0 to 3 before the first backward. From then on, each "
         "backward frees one microbatch before the next forward adds one. GPipe would hold all eight.",
         schedule_controls, figures.schedule, schedule_words)


# ---- Domino

@app.cell(hide_code=True)
def _():
    domino_form = question("The all-reduces of a step take as long as its matmuls. A perfect overlap would hide them "
                           "all. How many times as long does a step take if it waits for each all-reduce?",
                           (1.0, 1.5, 2.0))
    domino_controls = mo.ui.dictionary({
        "way": mo.ui.radio(["blocking", "Domino", "paired"], value="Domino", inline=True, label="way"),
        "ratio": mo.ui.slider(0.25, 2, 0.25, value=1, label="wires / work", show_value=True),
        "slices": mo.ui.slider(1, 4, value=2, label="slices", show_value=True),
        "columns": mo.ui.slider(1, 4, value=1, label="columns", show_value=True),
        "sequence_parallel": mo.ui.checkbox(label="sequence parallelism")})
    return domino_controls, domino_form


@app.cell(hide_code=True)
def _(domino_controls, domino_form, running, tab):
    mo.stop(running and tab.value != "Domino")

    def domino_words(numbers):
        return (f"A step takes **{numbers['bound']:.2f}** times as long as a perfect one, in which the shorter of work "
                f"({numbers['work']:.1f} ms) and wires ({numbers['wires']:.1f} ms) is hidden entirely; a "
                f"millisecond stands for a million multiplications. The step launches {numbers['collectives']} "
                "collectives."
                + (" The blocking way has neither slices, columns nor sequence parallelism."
                   if domino_controls.value["way"] == "blocking" else ""))

    page(domino_form, lambda: f"{figures.domino(way='blocking').numbers['bound']:.1f}",
         "While an all-reduce is in flight, nothing computes, so the times add up. The picture below shows Domino: "
         "while one slice's all-reduce is in flight, the other slice computes. Red hatching is time spent waiting.",
         domino_controls, figures.domino, domino_words)


# ---- memory

@app.cell(hide_code=True)
def _():
    memory_form = question("A GPU trains in bfloat16 with AdamW, and nothing is sharded. How many bytes of weights, "
                           "gradients and optimizer state does it hold for each parameter?", (2, 6, 18))
    memory_controls = mo.ui.dictionary({
        "model": mo.ui.dropdown([*PRESETS], value="gpt3-13b", label="model"),     # dense: answers in a second
        "gpus": mo.ui.slider(steps=[1, 2, 4, 8, 16, 32, 64, 128], value=16, label="GPUs", show_value=True),
        "gpu": mo.ui.dropdown([*GPUS], value="H100", label="GPU"),
        "tp": mo.ui.slider(1, 8, value=2, label="tp", show_value=True),
        "pp": mo.ui.slider(1, 8, value=4, label="pp", show_value=True),
        "zero_stage": mo.ui.slider(0, 2, value=1, label="ZeRO stage", show_value=True),
        "recompute": mo.ui.dropdown([*GRANULARITIES], value="none", label="recomputation"),
        "dtype": mo.ui.dropdown([*DTYPES], value="bfloat16", label="precision")})
    return memory_controls, memory_form


@app.cell(hide_code=True)
def _(memory_controls, memory_form, running, tab):
    mo.stop(running and tab.value != "Memory")

    def memory_words(numbers):
        return (f"dp is **{numbers['dp']}**, and the model state takes **{numbers['state']:g}** bytes per parameter. "
                f"The layout {numbers['words']}.")

    page(memory_form, lambda: f"{figures.memory(zero_stage=0).numbers['state']:g}",
         "2 bytes for the weight, 4 for its gradient in fp32, and 12 for AdamW: two moments and a master weight, each "
         "in fp32. ZeRO-1 divides the 12 by the number of replicas, and ZeRO-2 also the 4.",
         memory_controls, figures.memory, memory_words)


# ---- plan

@app.cell(hide_code=True)
def _():
    plan_form = question("GPT-2 XL has 1.6 billion parameters. Eight H100s of one host train it. Which layout do you "
                         "expect to be the fastest?", ("dp 8", "tp 8", "pp 8"))
    plan_controls = mo.ui.dictionary({
        "model": mo.ui.dropdown([*ALL_PRESETS], value="gpt2-xl", label="model"),
        "gpus": mo.ui.slider(steps=[1, 2, 4, 8, 16, 32, 64], value=8, label="GPUs", show_value=True),
        "gpu": mo.ui.dropdown([*GPUS], value="H100", label="GPU"),
        "gpus_per_host": mo.ui.slider(steps=[1, 2, 4, 8], value=8, label="GPUs per host", show_value=True)})
    plan_button = mo.ui.run_button(label="Search (up to two minutes)")
    searched = set()
    PLAN_BECAUSE = ("The model and its optimizer state fit into one GPU, so replicas need no communication within a "
                    "layer and have no bubble: they only reduce gradients, and backward hides that.")
    return PLAN_BECAUSE, plan_button, plan_controls, plan_form, searched


@app.cell(hide_code=True)
def _(PLAN_BECAUSE, plan_button, plan_controls, plan_form, running, searched, tab):
    mo.stop(running and tab.value != "Plan")

    @contextmanager
    def progress(total):
        """Show the search's progress in the browser."""
        class Bar:
            def set_description_str(self, words):
                shown.update(increment=0, subtitle=words)

            def update(self, count):
                shown.update(increment=int(count))

        with mo.status.progress_bar(total=total, title="Searching", remove_on_exit=True) as shown:
            yield Bar()

    def searching():
        """Search, or show an earlier result, if the button was pressed for these values."""
        if plan_button.value or not running:
            searched.add(tuple(plan_controls.value.values()))
        if tuple(plan_controls.value.values()) not in searched:
            return []
        try:
            figure = figures.search(**plan_controls.value, progress=progress)
        except UserError as error:
            return [refusal(error)]
        layouts = figure.numbers["layouts"]
        if not layouts:
            return [mo.callout(mo.md(html.escape(figure.numbers["words"])), kind="warn")]
        best = layouts[0]
        asked = plan_form.value and [plan_controls.value[name] for name in ("model", "gpus")] == ["gpt2-xl", 8]
        found = ", ".join(f"{name} {best[name]}" for name in ("tp", "pp", "dp") if best[name] > 1)
        return [*([verdict(plan_form.value, found, PLAN_BECAUSE)] if asked else []),
                mo.md(f"The fastest layout of **{best['model']}** takes **{best['step_s']:.3f} s** per step. This "
                      f"command trains with it:\n\n```sh\n{best['command']}\n```"),
                picture(figure.svg, "The ten fastest layouts"),
                mo.accordion({"Commands of the other layouts": mo.md("\n\n".join(
                    f"{i}.\n```sh\n{one['command']}\n```" for i, one in enumerate(layouts[1:], 2)))})]

    parts = [plan_form]
    if plan_form.value is not None or not running:
        parts += [mo.hstack([*plan_controls.elements.values(), plan_button], wrap=True, justify="start", gap=1.5,
                            align="end"), *searching()]
    mo.vstack(parts)


if __name__ == "__main__":
    sys.exit("Start the playground with: marimo run exercises/playground.py")
