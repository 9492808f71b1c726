"""Pre-train a GPT over tensor x pipeline x data parallel processes. The whole story, from top to bottom.

    python train.py                                    one process
    torchrun --nproc_per_node 8 train.py               eight: tp 2 x pp 2 x dp 2 by default
    torchrun --nproc_per_node 8 train.py --model gpt2 --tp 1 --pp 1 --bf16     on a node of GPUs

Where what happens:

    config.py    flags -> Config               domino.py    a stage forward and backward, slices beside slices
    data.py      tokens -> batches             pipeline.py  which microbatch when
    mesh.py      who is where                  zero.py      gradients -> new weights
    model.py     the GPT, on parallel.py

The names of the functions are those that a reader of Megatron-LM's or DeepSpeed-Domino's training loop looks for.
"""

import dataclasses
import itertools
import json
import math
import os
import resource
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from data.prepare import DEFAULT_CORPUS, prepare_default_corpus
from nanodomino import pipeline
from nanodomino.config import Config, UserError, from_command_line, require
from nanodomino.data import Corpus, TokenDataset, load_corpus
from nanodomino.domino import Domino
from nanodomino.generate import generate
from nanodomino.mesh import Mesh, Place, find_device, find_place, make_mesh, start_world
from nanodomino.model import GPT, flops_per_token, parameter_count, stage_layers
from nanodomino.zero import ZeroOptimizer

# Dense 16-bit peak of one device in FLOP/s, from the makers' data sheets; the longest name that fits counts.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H100 PCIe": 756e12, "H800": 989e12, "B200": 2250e12, "GH200": 989e12, "A100": 312e12,
              "A800": 312e12, "A40": 150e12, "A10": 125e12, "A30": 165e12, "L4": 121e12, "L40": 181e12, "L40S": 362e12,
              "RTX 3090": 71e12, "RTX 4090": 165e12, "V100": 125e12, "T4": 65e12}


PROMPT_TOKENS = 32       # of the validation text, from which the sample at the end goes on


# ---- what Megatron-LM's user writes: the model, the data, a forward step, a loss

def model_builder(config: Config, mesh: Mesh) -> GPT:
    """This process's stage of the model, and of it this process's shards."""
    return GPT(config, mesh, pre_process=mesh.is_first_stage, post_process=mesh.is_last_stage)


def dataset_builder(config: Config, corpus: Corpus) -> dict[str, TokenDataset]:
    """train, valid and test; the last two only if they hold a window. Raises UserError if there is nothing to train on."""
    splits = [split for split in ("train", "valid", "test") if split == "train" or corpus.tokens[split] > config.seq_length]
    return {split: TokenDataset(corpus, split, config.seq_length, config.seed, config.eod_mask_loss) for split in splits}


def get_batch(dataset: TokenDataset, config: Config, mesh: Mesh, step: int, shuffle: bool, microbatch: int):
    """A microbatch of this replica: the same on all its tensor- and pipeline-parallel ranks, on the device."""
    return dataset.batch(step, microbatch, mesh.dp_rank, mesh.dp, config.micro_batch_size, config.global_batch_size,
                         shuffle=shuffle).to(mesh.device)


def forward_step(batch, stage: Domino, hidden, training: bool):
    """One microbatch through this stage -> (output, tape, loss function of the output)."""
    output, tape = stage.forward(batch, hidden, training)
    return output, tape, partial(loss_func, batch.loss_mask)


def loss_func(loss_mask, losses):
    """losses [b, s] of the tokens -> their sum where loss_mask is 1, and how many those are.

    Sums, not means: microbatches and replicas may count different numbers of tokens, and a mean of means would be wrong.
    """
    return (losses * loss_mask).sum(), loss_mask.sum()


# ---- the training

def train_step(step: int, stage: Domino, optimizer: ZeroOptimizer, dataset: TokenDataset, config: Config, mesh: Mesh):
    """One optimizer step (numbered from 1) -> (loss, gradient norm) of the global batch."""
    optimizer.zero_grad()
    actions = pipeline.SCHEDULES[config.schedule](mesh.pp_rank, mesh.pp, config.microbatches)
    totals = run_actions(actions, step - 1, stage, dataset, config, mesh, on_final=optimizer.on_final)
    loss, grad_norm, _ = optimizer.step(learning_rate(step, config), totals)
    return loss, grad_norm


def evaluate(stage: Domino, dataset: TokenDataset, config: Config, mesh: Mesh) -> float:
    """Mean loss over the first eval_iters global batches of a split, every token counted once."""
    actions = pipeline.forward_only(mesh.pp_rank, mesh.pp, config.microbatches)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for step in range(min(config.eval_iters, math.ceil(dataset.windows / config.global_batch_size))):
        totals = run_actions(actions, step, stage, dataset, config, mesh, shuffle=False)
        sums += torch.stack([totals.loss_sum, totals.tokens])
    if not (mesh.is_last_stage and mesh.tp_rank == 0):         # each token once: tensor-parallel ranks have the same losses
        sums.zero_()
    dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).item()


def run_actions(actions, step: int, stage: Domino, dataset: TokenDataset, config: Config, mesh: Mesh, shuffle=True, on_final=None):
    """Run a schedule over the microbatches of global batch number `step`."""
    return pipeline.run(actions, stage, mesh, partial(get_batch, dataset, config, mesh, step, shuffle), forward_step,
                        (config.micro_batch_size, config.seq_length, config.hidden_size), getattr(torch, config.dtype), on_final)


def learning_rate(step: int, config: Config) -> float:
    """Of step 1 .. train_iters: a linear climb over the warm-up, then from lr down to min_lr at the last step."""
    warmup = int(config.lr_warmup_fraction * config.train_iters)
    if step <= warmup:
        return config.lr * step / warmup
    done = (step - warmup) / max(config.train_iters - warmup, 1)
    left = {"cosine": 0.5 * (1.0 + math.cos(math.pi * done)), "linear": 1.0 - done, "constant": 1.0}[config.lr_decay_style]
    return config.min_lr + (config.lr - config.min_lr) * left


def pretrain(config: Config, corpus: Corpus, datasets: dict[str, TokenDataset], mesh: Mesh, run_dir: Path | None):
    """Build, train, validate, test, and let the model write something. run_dir: on rank 0, where everything is kept."""
    model = model_builder(config, mesh)
    optimizer = ZeroOptimizer(model, config, mesh)
    stage = Domino(model, config.slices, config.columns, config.compile_backend if config.compile else None)
    describe(config, corpus, mesh, run_dir)
    metrics = open(run_dir / "metrics.jsonl", "w") if run_dir else None
    peak_flops = find_peak_flops(config, mesh)
    tokens_per_step = config.global_batch_size * config.seq_length
    begin = time.perf_counter()

    bar = tqdm(range(1, config.train_iters + 1), desc="train", unit="step", disable=None if run_dir else True, dynamic_ncols=True)
    for step in bar:
        step_begin = time.perf_counter()
        loss, grad_norm = train_step(step, stage, optimizer, datasets["train"], config, mesh)
        seconds = time.perf_counter() - step_begin
        speed = tokens_per_step / seconds
        mfu = speed * flops_per_token(config) / peak_flops if peak_flops else None
        record(metrics, step=step, loss=loss, grad_norm=grad_norm, lr=learning_rate(step, config), tokens=step * tokens_per_step,
               step_ms=seconds * 1000, tokens_per_second=speed, mfu=mfu)
        bar.set_postfix(loss=f"{loss:.3f}", tokens_per_second=f"{speed:,.0f}", refresh=False)
        if step % config.log_interval == 0 or step == 1:
            say(bar, f"step {step:5d} | loss {loss:.4f} {yardsticks(corpus)} | grad norm {grad_norm:.3f} | lr {learning_rate(step, config):.2e} | "
                f"{seconds * 1000:.0f} ms | {speed:,.0f} tokens/s | mfu {'n/a' if mfu is None else f'{mfu:.1%}'}")
        if "valid" in datasets and config.eval_iters and (step % config.eval_interval == 0 or step == config.train_iters):
            valid_loss = evaluate(stage, datasets["valid"], config, mesh)
            record(metrics, step=step, valid_loss=valid_loss)
            say(bar, f"step {step:5d} | valid loss {valid_loss:.4f} {yardsticks(corpus)} | perplexity {perplexity(valid_loss):.2f}")
    bar.close()

    if "test" in datasets and config.eval_iters:
        test_loss = evaluate(stage, datasets["test"], config, mesh)
        record(metrics, step=config.train_iters, test_loss=test_loss)
        print(f"test loss {test_loss:.4f} {yardsticks(corpus)} | perplexity {perplexity(test_loss):.2f}")
    print(f"{config.train_iters} steps in {time.perf_counter() - begin:.1f} s, peak memory of rank 0 {peak_memory(mesh.device) / 2**20:,.0f} MiB, "
          f"everything in {run_dir}")
    if config.sample_tokens:
        write_sample(model, config, corpus, datasets.get("valid", datasets["train"]), mesh)


# ---- what a person sees

def describe(config: Config, corpus: Corpus, mesh: Mesh, run_dir: Path | None):
    """The model, the rank grid and the schedule, before the first step; and config.json."""
    if run_dir:
        (run_dir / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    print(f"nanodomino: model {config.model}, {parameter_count(config):,} parameters, {config.dtype} on {mesh.device.type}; "
          f"{corpus.tokens['train']:,} training tokens from {corpus.path}")
    print(f"global batch {config.global_batch_size} x {config.seq_length} tokens = {config.microbatches} microbatches of "
          f"{config.micro_batch_size} on each of {config.dp} replicas; slices {config.slices}, columns {config.columns}, ZeRO stage {config.zero_stage}")
    held = []
    for stage in range(mesh.pp):
        layers = stage_layers(config.num_layers, stage, mesh.pp)
        held.append(("embedding, " if stage == 0 else "") + f"layers {layers[0]} to {layers[-1]}" + (", head" if stage == mesh.pp - 1 else ""))
    print(mesh.picture(held))
    print(pipeline.picture(config.schedule, mesh.pp, config.microbatches), flush=True)


def yardsticks(corpus: Corpus) -> str:
    """What a model reaches that knows how often tokens come, and one that also sees the token before; nats per token."""
    return f"(unigram {corpus.unigram_entropy:.2f}, bigram {corpus.bigram_entropy:.2f})"


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def say(bar, line: str):
    """A line on the screen above the bar."""
    bar.write(line, file=sys.stdout)
    sys.stdout.flush()


def record(metrics, **values):
    """A line of metrics.jsonl; only rank 0 has one."""
    if metrics:
        metrics.write(json.dumps(values) + "\n")
        metrics.flush()


def write_sample(model: GPT, config: Config, corpus: Corpus, dataset: TokenDataset, mesh: Mesh):
    """Let the first replica go on from the first words of a split."""
    if mesh.dp_rank == 0:
        prompt = dataset.batch(0, 0, 0, 1, 1, 1, shuffle=False).tokens[0, :PROMPT_TOKENS].tolist()
        tokens = generate(model, mesh, prompt, config.sample_tokens, corpus.vocab_size, config.temperature, config.top_k,
                          config.seed)
        text = corpus.tokenizer()
        print(f"---- a sample (temperature {config.temperature}, top-k {config.top_k}); the first {len(prompt)} tokens are the prompt\n"
              f"{text.decode(prompt)}|{text.decode(tokens[len(prompt):])}\n----", flush=True)


def find_peak_flops(config: Config, mesh: Mesh) -> float | None:
    """Of all devices together, in the run's dtype; None where it is not known."""
    if mesh.device.type != "cuda" or config.dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(mesh.device)
    known = [one for one in PEAK_FLOPS if one in name]
    return PEAK_FLOPS[max(known, key=len)] * config.world_size if known else None


def peak_memory(device) -> int:
    """Bytes: of this device's allocator, or of this process where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- from the command line to the first collective

def find_corpus(config: Config, place: Place) -> Corpus:
    """The prepared folder; the default one is made on first use by one process of each host while the others wait."""
    folder = Path(config.data_path or DEFAULT_CORPUS)
    if config.data_path is None and not folder.exists():
        if place.local_rank == 0:
            prepare_default_corpus(folder)
        waited = 0.0
        while not folder.exists():
            require(waited < 600, f"{folder} was not prepared within 10 minutes; run python data/prepare.py first")
            time.sleep(0.2)
            waited += 0.2
    return load_corpus(folder)


def make_run_dir(config: Config) -> Path:
    """A new folder for this run: --run-dir, or the next free runs/MODEL-NUMBER. Raises UserError if it holds a run already."""
    run_dir = Path(config.run_dir or "runs")
    try:
        require(not run_dir.is_file(), f"--run-dir {run_dir} is a file; choose another name")
        run_dir.mkdir(parents=True, exist_ok=True)
        if config.run_dir is None:
            run_dir = next_folder(run_dir, config.model)
        require(not (run_dir / "metrics.jsonl").exists(), f"--run-dir {run_dir} holds a run already; choose another folder or remove it")
        tempfile.TemporaryFile(dir=run_dir).close()            # can files be made there? better asked now than at the first write
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} can't be written to ({error.strerror}); choose another folder") from None
    return run_dir


def next_folder(parent: Path, name: str) -> Path:
    """Make parent/NAME-NUMBER with the first number that is free, also where other runs start at the same moment."""
    for number in itertools.count(1):
        folder = parent / f"{name}-{number:03d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            pass


def main(arguments: list[str], place: Place):
    """Everything that can be wrong is found before a process group forms, by every rank alike."""
    config = from_command_line(arguments).resolve(place.world_size)
    device = find_device(config, place)
    corpus = find_corpus(config, place)
    config = config.with_vocabulary(corpus.vocab_size)
    config = dataclasses.replace(config, compile=device.type == "cuda" if config.compile is None else config.compile)
    datasets = dataset_builder(config, corpus)
    if config.sample_tokens:
        corpus.tokenizer()                                     # the sample at the end needs it: if it fails, then now
    run_dir = make_run_dir(config) if place.rank == 0 else None

    start_world(place, device)
    if config.deterministic_mode:
        torch.use_deterministic_algorithms(True, warn_only=True)
    pretrain(config, corpus, datasets, make_mesh(config.pp, config.dp, config.tp, device), run_dir)
    dist.barrier()                                             # nobody hangs up while another still talks
    dist.destroy_process_group()


def fail(place: Place, error: Exception):
    """End this process. torchrun ends all as soon as one has ended, so whoever has nothing new to say keeps still a while."""
    sys.stdout.flush()
    if isinstance(error, UserError):
        if place.local_rank > 0:                               # the others have most likely found the same:
            time.sleep(5 + place.local_rank)                   # the first one speaks, the next only if nobody has
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    if isinstance(error, RuntimeError) and any(word in str(error) for word in ("peer", "remote", "Broken pipe", "NCCL")):
        time.sleep(5)                                          # another rank died: let that one be heard first
    print(f"rank {place.rank} failed:\n{''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
    os._exit(1)


def run(arguments: list[str]):
    """What a launcher starts on every rank: main(), of which the screen shows rank 0's words alone, or a clear end."""
    place = Place()
    try:
        place = find_place()
        if place.rank != 0:
            sys.stdout = open(os.devnull, "w")
        main(arguments, place)
    except Exception as error:
        fail(place, error)


if __name__ == "__main__":
    run(sys.argv[1:])
