"""What docstrings and documents say is so: bugs that they describe are put back and measured, names and links exist.

A docstring that is wrong teaches what is wrong, and no other test would notice.
"""

import ast
import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from support.harness import Outcome, build, full_tensors, random_data, reference_for, shard_spec, tiny

from nanodomino import parallel
from nanodomino.comm.trace import Trace
from nanodomino.config.config import Config
from nanodomino.domino import Domino, run_alone
from nanodomino.errors import UserError
from nanodomino.parallel import ReduceFromTensorParallel
from nanodomino.run.command_line import from_command_line


# ---- parallel.py: g's backward, written as another all-reduce

class SummedTwice(ReduceFromTensorParallel):
    """g with the bug."""

    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return ReduceFromTensorParallel.forward(ctx, partial, group)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def plain_gradients_rank(config, weights, data, g):
    """The plain forward with this g, and autograd: the gradients of a microbatch's loss sum."""
    _, model, _, _ = build(config, weights)
    kept, parallel.ReduceFromTensorParallel = parallel.ReduceFromTensorParallel, g
    try:
        batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
        losses = model(batch.tokens, batch.positions, batch.labels)
        (losses * batch.loss_mask).sum().backward()
    finally:
        parallel.ReduceFromTensorParallel = kept
    gradients = {name: (weight.grad, shard_spec(weight)) for name, weight in model.named_parameters()}
    return Outcome((0, 0, model.mesh.tp_rank), [], [], [gradients], {}, 0.0)


def wrong_against_right(pool, config, weights, data):
    """{name: (ratio of the gradients' norms, cosine of the angle between them)}."""
    wrong, right = (full_tensors(pool.run(plain_gradients_rank, config, weights, data, g, world_size=config.tp),
                          lambda outcome: outcome.gradients[0], config.tp)
                    for g in (SummedTwice, ReduceFromTensorParallel))
    return {name: (float(wrong[name].norm() / right[name].norm()),
                   float(torch.cosine_similarity(wrong[name].flatten(), right[name].flatten(), dim=0)))
                   for name in right}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_g_that_sums_backward_is_t_times_too_large_in_the_last_sublayer_alone(pool, tp):
    """Below it directions are wrong; what lies above the last g, its own sublayer's row bias too, is right."""
    config = tiny(tp, tensor_model_parallel_size=tp, micro_batch_size=4, global_batch_size=4)
    weights, data, _, _ = reference_for(config, 1)
    found = wrong_against_right(pool, config, weights, data)
    last = f"layers.{config.num_layers - 1}.mlp."
    for name, (ratio, cosine) in found.items():
        if name.startswith("final_norm") or name == last + "dense_4h_to_h.bias":
            assert (ratio, cosine) == pytest.approx((1.0, 1.0), abs=1e-12), name
        elif name.startswith(last):
            assert (ratio, cosine) == pytest.approx((tp, 1.0), abs=1e-12), name
        else:
            assert cosine < 0.995, f"{name} is still a multiple"


def test_the_table_in_parallels_docstring_is_what_is_measured(pool):
    config = Config(dtype="float64", tensor_model_parallel_size=2, pipeline_model_parallel_size=1, global_batch_size=4)
    config = config.resolve(2).with_vocabulary(257)
    found = wrong_against_right(pool, config, None, random_data(config, 1))
    layers, ratios, cosines = ([float(number)
                                for number in re.search(rf"\n +{row} +([\d. ]+)\n", parallel.__doc__)[1].split()]
                               for row in ("layer", "ratio of norms", "cosine"))
    assert sorted(layers) == list(range(config.num_layers))
    for layer, ratio, cosine in zip(layers, ratios, cosines, strict=True):
        measured = found[f"layers.{layer:.0f}.mlp.dense_h_to_4h.weight"]
        assert measured == (pytest.approx(ratio, rel=0.01), pytest.approx(cosine, abs=0.01))


# ---- domino.py: autograd's own order, and what hangs on everybody's

class Step(torch.autograd.Function):
    """A node that writes down its name when backward comes to it."""

    @staticmethod
    def forward(ctx, name, log, *inputs):
        ctx.name, ctx.log, ctx.count = name, log, len(inputs)
        return sum(inputs[1:], inputs[0].clone())

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(ctx.name)
        return None, None, *[gradient] * ctx.count


@pytest.mark.parametrize("seed", range(10))
def test_of_the_nodes_that_are_ready_autograd_takes_the_one_recorded_last(seed):
    """On random graphs of 30 nodes, each with up to three inputs."""
    choose, log, x = random.Random(seed), [], torch.ones(1, requires_grad=True)
    inputs, outputs = {0: []}, {0: Step.apply(0, log, x)}
    for node in range(1, 30):
        inputs[node] = choose.sample(range(node), min(node, choose.randint(1, 3)))
        outputs[node] = Step.apply(node, log, *[outputs[one] for one in inputs[node]])
    waited_for = {node: sum(node in used for used in inputs.values()) for node in inputs}
    ready = {node for node, users in waited_for.items() if not users}
    torch.autograd.grad([outputs[node] for node in ready], x)
    for node in log:
        assert node == max(ready)
        ready.remove(node)
        for one in inputs[node]:
            waited_for[one] -= 1
            if not waited_for[one]:
                ready.add(one)
    assert len(log) == 30


def test_autograd_waits_for_each_gradient_at_once():
    """Two slices, recorded in turn as Domino runs them. f is two nodes here, so that another's work would fit
    between."""
    log, x = [], {slice: torch.ones(1, requires_grad=True) for slice in "ab"}
    hidden = dict(x)
    for sublayer in ("attention 0", "mlp 0", "attention 1", "mlp 1"):
        for slice in "ab":
            h = Step.apply(f"wait {slice}", log, hidden[slice])
            h = Step.apply(f"launch {slice}", log, h)
            hidden[slice] = hidden[slice] + Step.apply(f"{sublayer} {slice}", log, h)
    torch.autograd.grad(hidden["a"] + hidden["b"], list(x.values()))
    assert log == [event for sublayer in ("mlp 1", "attention 1", "mlp 0", "attention 0") for slice in "ba"
                   for event in (f"{sublayer} {slice}", f"launch {slice}", f"wait {slice}")]


class OneYieldTooMany(Domino):
    """On tp rank 1, slice 0 lets the others go first once more than on the other ranks."""

    def forward_sublayer(self, slice, step, *arguments):
        if self.mesh.tp_rank == 1 and slice.index == 0 and step.site == "layers.1.attention":
            yield
        return (yield from super().forward_sublayer(slice, step, *arguments))


def losses_rank(config, weights, data, kind):
    _, model, _, _ = build(config, weights)
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    return run_alone(kind(model, config.slices).forward(batch, training=False))[0]


def test_with_one_yield_too_many_on_one_rank_slices_are_added_to_each_other_and_nobody_says_so(pool):
    config = tiny(2, tensor_model_parallel_size=2, micro_batch_size=4, global_batch_size=4, slices=2)
    weights, data, _, _ = reference_for(config, 1)
    right = pool.run(losses_rank, config, weights, data, Domino, world_size=2)
    wrong = pool.run(losses_rank, config, weights, data, OneYieldTooMany, world_size=2)
    assert torch.equal(right[0], right[1])
    for losses in wrong:
        assert (losses - right[0]).abs().min() > 1e-3, "every sample has met another one's numbers"


def first_stage_rank(config, data):
    """On the first stage's ranks: forward's events from the last slice's last launch on, and all events of backward."""
    _, model, _, stage = build(config, trace=Trace())
    if not model.pre_process:
        return None
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    output, tape = run_alone(stage.forward(batch))
    kinds = [event.kind for event in stage.trace.events]
    last_launch = len(kinds) - kinds[::-1].index("all_reduce")
    forward = kinds[last_launch:]
    stage.trace.events.clear()
    run_alone(stage.backward(tape, torch.ones_like(output)))
    kinds = [event.kind for event in stage.trace.events]
    return forward, kinds[len(kinds) - kinds[::-1].index("all_reduce"):]


def test_behind_the_last_slices_last_sum_there_is_no_product_forward_and_its_own_weight_gradients_backward(pool):
    """On a stage that is not the last one."""
    config = tiny(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=3)
    forward, backward = pool.run(first_stage_rank, config, random_data(config, 1), world_size=4)[0]
    assert set(forward) == {"resume", "wait"}
    assert set(backward) == {"resume", "wait", "weight_gradient"} and backward.count("weight_gradient") == 1


def final_rank(config, weights, data, later):
    """Names of the parameters whose main_grad changed after backward had called it final, and of all that it did.
    later: weight gradients are left to weight_backward."""
    _, model, _, stage = build(config, weights)
    for weight in model.parameters():
        weight.main_grad.zero_()
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    losses, tape = run_alone(stage.forward(batch))
    final = {}

    def on_gradients_ready(modules):
        final.update({weight: weight.main_grad.clone() for module in modules for weight in module.parameters()})

    run_alone(stage.backward(tape, batch.loss_mask.to(losses.dtype), on_gradients_ready, later))
    if later:
        run_alone(stage.weight_backward(tape, on_gradients_ready))
    names = {weight: name for name, weight in model.named_parameters()}
    changed = [names[weight] for weight in final if not torch.equal(final[weight], weight.main_grad)]
    return changed, sorted(names[weight] for weight in final)


@pytest.mark.parametrize("later", [False, True], ids=["together", "apart"])
def test_a_sublayers_gradients_are_all_there_when_it_is_called_final(pool, later):
    """The row bias too, though its gradient comes from another sublayer's bridge."""
    config = tiny(2, tensor_model_parallel_size=2, micro_batch_size=4, global_batch_size=4, slices=2)
    weights, data, _, _ = reference_for(config, 1)
    for changed, final in pool.run(final_rank, config, weights, data, later, world_size=2):
        assert not changed
        assert "layers.0.attention.dense.bias" in final and final == sorted(weights)


# ---- names and links

def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this copy is no git checkout")
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def text_of(path):
    return (ROOT / path).read_text(errors="replace")


def documents():
    return [path for path in tracked_files() if path.suffix == ".md"]


def test_no_file_cites_a_document_that_is_not_here():
    """A reader has the repository and nothing else."""
    files = tracked_files()
    names = [name for name in ("DESIGN", "PITFALLS", "STYLE") if not any(path.stem == name for path in files)]
    cited = re.compile(rf"\b({'|'.join(names)})\b|\b[Pp]itfalls? \d")
    found = [f"{path}: {match[0]}" for path in files if path.name != Path(__file__).name
             for match in cited.finditer(text_of(path))]
    assert not found


def headings_of(path):
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading():
    dead = []
    for path in documents():
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text_of(path)):
            target = path.parent / link if link else path
            if "://" in link:
                continue
            if not (ROOT / target).exists() or (anchor and target.suffix == ".md" and not named_anchor(target, anchor)):
                dead.append(f"{path}: {link}#{anchor}")
    assert not dead


def named_anchor(path, anchor):
    return anchor in headings_of(path) or f'name="{anchor}"' in text_of(path) or f'id="{anchor}"' in text_of(path)


def test_every_python_file_that_is_named_exists():
    """By its path from the root or from nanodomino/, or by its name alone; in documents, and in all code except
    tests."""
    files = tracked_files()
    known = {str(path) for path in files} | {path.name for path in files}
    known |= {str(path.relative_to("nanodomino")) for path in files if path.parts[0] == "nanodomino"}
    sources = [path for path in files if path.suffix == ".py" and path.parts[0] not in ("tests", "data")]
    gone = [f"{path}: {name}" for path in documents() + sources
            for name in re.findall(r"(?<![\w/.])[\w-][\w/-]*\.py\b", text_of(path)) if name not in known]
    assert not gone


def names_defined_in(path):
    """The classes, functions and variables at a file's top, and methods as Class.method."""
    for node in ast.parse(text_of(path)).body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
            yield from (f"{node.name}.{method.name}" for method in getattr(node, "body", ())
                        if isinstance(method, ast.FunctionDef))


def test_every_name_that_a_document_places_in_a_file_is_defined_there():
    """Documents write `Mesh` in `mesh.py`, or `one_f_one_b`, `interleaved` in `schedules/definitions.py`."""
    wrong = []
    for path in documents():
        for names, file in re.findall(r"((?:`[\w.]+`(?:\s\([fg]\))?(?:,\s|\sand\s)?)+)\s+in\s+`([\w/]+\.py)`",
                                      text_of(path)):
            sources = [folder / file for folder in (Path("nanodomino"), Path()) if (ROOT / folder / file).exists()]
            defined = {name for source in sources for name in names_defined_in(source)}
            wrong += [f"{path}: {name} in {file}" for name in re.findall(r"`([\w.]+)`", names) if name not in defined]
    assert not wrong


def test_every_test_that_a_document_names_exists():
    tests = " ".join(text_of(path) for path in tracked_files() if path.parts[0] == "tests" and path.suffix == ".py")
    gone = [f"{path}: {name}" for path in documents() for name in re.findall(r"`(test_\w+_\w+_\w+)`", text_of(path))
            if f"def {name}(" not in tests]
    assert not gone


def commands():
    """(document, command without its comment) of each line in a document's shell blocks, joined where a line goes
    on."""
    for path in documents():
        for block in re.findall(r"```sh\n(.*?)```", text_of(path), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if command := line.partition("  #")[0].strip():
                    yield path, command


def test_every_module_and_flag_of_a_command_in_a_document_exists():
    sources = " ".join(text_of(path) for path in tracked_files() if path.suffix == ".py")
    settings = text_of("docs/settings.md")
    wrong = []
    for path, command in commands():
        own = re.split(r"(?=train\.py|-m nanodomino|data/prepare\.py|bench\.py|tests/)", command, maxsplit=1)[1:]
        wrong += [f"{path}: {flag}" for flag in re.findall(r"--[\w-]+", own[0] if own else "")
                  if f"`{flag}`" not in settings and f'"{flag}"' not in sources]
        wrong += [f"{path}: {module}" for module in re.findall(r"-m (nanodomino\.\w+)", command)
                  if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
                  and not (ROOT / module.replace(".", "/") / "__main__.py").exists()]
    assert not wrong


def test_every_training_command_in_a_document_is_accepted(tmp_path, monkeypatch):
    """Flags and sizes go together for that number of processes. Commands that load a checkpoint are left out."""
    monkeypatch.chdir(tmp_path)
    for path, command in commands():
        found = re.search(r"(?:torchrun .*?--nproc_per_node (\d+) .*?|python )train\.py\b(.*)", command)
        if found and "--load" not in command:
            hosts = re.search(r"--nnodes (\d+)", command)
            arguments = shlex.split(found[2].replace("NAME", "1f1b").strip(" `'"))
            try:
                from_command_line(arguments, int(found[1] or 1) * int(hosts[1] if hosts else 1))
            except UserError as error:
                pytest.fail(f"{path}: {command}: {error}")


def test_the_readme_is_a_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
