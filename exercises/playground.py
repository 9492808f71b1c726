"""The playground: five pages on which pictures of distributed training follow sliders.

    pip install -r requirements.txt -r requirements-extra.txt
    marimo run exercises/playground.py

Each page first asks a question. The picture appears after the answer. Pictures, numbers and words come from figures.py,
which calls the project's own code. The printed copy, docs/playground.html, shows all pages in one file. To write it
again, run: marimo export html exercises/playground.py --no-include-code -o docs/playground.html
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="nanodomino's playground", css_file="playground.css")

with app.setup:
    import base64
    import html
    import re
    import sys
    from pathlib import Path
    from types import SimpleNamespace

    import marimo as mo
    import torch._dynamo         # noqa: F401     the first optimizer would import it, while a student waits

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

    from exercises import figures
    from nanodomino.estimate.formulas import GPUS
    from nanodomino.schedules.definitions import SCHEDULES
    from nanodomino.errors import UserError
    from nanodomino.options.recompute import GRANULARITIES
    from nanodomino.settings.presets import DTYPES, PRESETS


@app.function
def page(words: str, choices, right, because: str, draw, submit="", **controls):
    """Describe a page: its question, its controls, and the function that draws a Figure for the controls' values.

    right(): the right choice. because: why, in a sentence or two. submit: the words on a button that starts drawing
    """
    form = mo.ui.radio([str(choice) for choice in choices], label=f"**{words}**").form(
        submit_button_label="Show", bordered=True)
    row = mo.Html('<div style="display:flex;flex-wrap:wrap;gap:1.5rem">' + " ".join(f"{{{name}}}" for name in controls)
                  + "</div>").batch(**controls)
    return SimpleNamespace(form=form, right=right, because=because, draw=draw,
                           controls=row.form(submit_button_label=submit) if submit else row)


@app.function
def shown(page, form, controls):
    """Show a page: the question; after the answer also whether it is right, the controls and the picture. An export
    cannot be answered, so it shows everything."""
    running = mo.app_meta().mode == "run"
    if form.value is None and running:
        return form
    parts = [form, controls]
    if form.value is not None:
        right = str(page.right())
        words = "Right" if form.value == right else f"You said {form.value}, but it is {right}"
        parts.insert(1, mo.callout(mo.md(f"**{words}.** {page.because}"), "success" if form.value == right else "info"))
    if controls.value is None and running:
        return mo.vstack(parts)
    try:
        with mo.status.spinner("Computing", remove_on_exit=True):
            figure = page.draw(**controls.value or {})
    except UserError as error:
        words = f"**This combination breaks a rule:** {html.escape(str(error))}"
        return mo.vstack([*parts, mo.callout(mo.md(words), "warn")])
    return mo.vstack([*parts, mo.md(figure.words), picture(figure)])


@app.function
def picture(figure):
    """Show a picture, which keeps its own light background. On a narrow screen it scrolls sideways."""
    words = html.escape(re.sub("[*`]", "", figure.words.partition("```")[0]))
    data = base64.b64encode(figure.svg.encode()).decode()
    return mo.Html(f'<div style="overflow-x:auto" tabindex="0" role="group" aria-label="{words}"><img alt="{words}" '
                   f'src="data:image/svg+xml;base64,{data}" style="display:block;width:100%;min-width:720px;'
                   'max-width:1000px;height:auto;border-radius:6px"></div>' * bool(figure.svg))


@app.function
def slider(label, values, value):
    return mo.ui.slider(steps=[*values], value=value, label=label, show_value=True)


@app.cell(hide_code=True)
def _():
    eight, units = range(1, 9), [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    pages = {
        "The grid": page(
            "Eight processes train with tensor parallelism (tp) 2, pipeline parallelism (pp) 2 and data parallelism "
            "(dp) 2. Ranks are numbered with tp fastest, then dp, then pp. Which rank sends activations to rank 5?",
            (1, 4, 7), lambda: figures.grid(rank=5).numbers["pp"][0],
            "Rank 5 is in stage 1. It has the same place in its stage as rank 1 has in stage 0, so rank 1 sends it "
            "activations. Rank 4 holds the other half of its matrices, and rank 7 the same weights in the other "
            "replica.", figures.grid,
            world=slider("processes", [1, 2, 4, 6, 8, 12, 16, 24, 32], 8), tp=slider("tp", eight, 2),
            pp=slider("pp", eight, 2), cp=slider("cp", range(1, 5), 1), ep=slider("ep", range(1, 5), 1),
            rank=mo.ui.number(0, 31, value=5, label="rank")),
        "Schedules": page(
            "Four stages run 1F1B on eight microbatches. How many microbatches does stage 0 hold at once, at most?",
            (1, 4, 8), lambda: f"{figures.schedule().numbers['held'][0]:g}",
            "Look at stage 0: it runs the forwards of microbatches 0 to 3 before the first backward. From then on, "
            "each backward frees one microbatch before the next forward adds one. GPipe would hold all eight.",
            figures.schedule,
            name=mo.ui.dropdown([*SCHEDULES], value="1f1b", label="schedule"), stages=slider("stages", eight, 4),
            microbatches=slider("microbatches", range(1, 33), 8),
            chunks=mo.ui.dropdown({"the fewest": None, "1": 1, "2": 2, "3": 3, "4": 4}, value="the fewest",
                                  label="chunks per stage"),
            F=slider("F: forward", units, 1), I=slider("I: input gradients", units, 1),
            W=slider("W: weight gradients", units, 1), message=slider("message delay", [0, *units[:6]], 0)),
        "Domino": page(
            "The all-reduces of a step take as long as its matmuls. A perfect overlap would hide them all. How many "
            "times as long does a step take if it waits for each all-reduce?", (1.0, 1.5, 2.0),
            lambda: f"{figures.domino(way='blocking').numbers['bound']:.1f}",
            "While an all-reduce is in flight, nothing computes, so the times add up. The picture below shows Domino: "
            "while one slice's all-reduce is in flight, the other slice computes. Red hatching is time spent waiting.",
            figures.domino,
            way=mo.ui.radio(["blocking", "Domino", "paired"], value="Domino", inline=True, label="way"),
            ratio=slider("wires / work", [i / 4 for i in eight], 1), slices=slider("slices", range(1, 5), 2),
            columns=slider("columns", range(1, 5), 1), sequence_parallel=mo.ui.checkbox(label="sequence parallelism")),
        "Memory": page(
            "A GPU trains in bfloat16 with AdamW, and nothing is sharded. How many bytes of weights, gradients and "
            "optimizer state does it hold for each parameter?", (2, 6, 18),
            lambda: f"{figures.memory(zero_stage=0).numbers['state']:g}",
            "2 bytes for the weight, 4 for its gradient in fp32, and 12 for AdamW: two moments and a master weight, "
            "each in fp32. ZeRO-1 divides the 12 by the number of replicas, and ZeRO-2 also the 4.", figures.memory,
            model=mo.ui.dropdown([*PRESETS], value="gpt3-13b", label="model"),          # dense: answers in a second
            gpus=slider("GPUs", [1, 2, 4, 8, 16, 32, 64, 128], 16),
            gpu=mo.ui.dropdown([*GPUS], value="H100", label="GPU"), tp=slider("tp", eight, 2),
            pp=slider("pp", eight, 4), zero_stage=slider("ZeRO stage", range(3), 1),
            recompute=mo.ui.dropdown([*GRANULARITIES], value="none", label="recomputation"),
            dtype=mo.ui.dropdown([*DTYPES], value="bfloat16", label="precision")),
        "Plan": page(
            "GPT-2 XL has 1.6 billion parameters. Eight H100s of one host train it. Which layout do you expect to be "
            "the fastest?", ("dp 8", "tp 8", "pp 8"), lambda: "dp 8",
            "The model and its optimizer state fit into one GPU, so replicas need no communication within a layer and "
            "have no bubble: they only reduce gradients, and backward hides that.",
            figures.search, "Search (up to two minutes)",
            model=mo.ui.dropdown([*PRESETS], value="gpt2-xl", label="model"),
            gpus=slider("GPUs", [1, 2, 4, 8, 16, 32, 64], 8), gpu=mo.ui.dropdown([*GPUS], value="H100", label="GPU"),
            gpus_per_host=slider("GPUs per host", [1, 2, 4, 8], 8))}
    forms = mo.ui.dictionary({name: page.form for name, page in pages.items()})
    controls = mo.ui.dictionary({name: page.controls for name, page in pages.items()})
    tab = mo.ui.tabs(dict.fromkeys(pages, ""))
    return controls, forms, pages, tab


@app.cell(hide_code=True)
def _(tab):
    printed = "*This is a printed copy. The sliders work in* `marimo run exercises/playground.py`."
    mo.vstack([mo.md("# Playground\nAnswer the question of a page. Then move the sliders and watch the picture. "
                     "The numbers come from the functions that also plan real runs."),
               tab.style(margin="0 min(0px, 50vw - 209px)") if mo.app_meta().mode == "run" else mo.md(printed)])


@app.cell(hide_code=True)
def _(controls, forms, pages, tab):
    mo.vstack([shown(page, forms[name], controls[name]) for name, page in pages.items()
               if name == tab.value or mo.app_meta().mode != "run"])
