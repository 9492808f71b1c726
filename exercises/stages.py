"""Stages of a tiny model on fake ranks, with weights and gradients that differ in every number."""

import hashlib

import torch


def draw(sizes, name, shape, cut=None):
    """Draw a whole tensor, seeded by its name. Unlike minimal.py's draw(), biases are not 0 and norms not 1."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn / shape[-1] ** 0.5 + float(name.endswith("norm.weight"))


def make_model(minimal, tp, pp=1, dp=1, vocab=100, **sizes):
    """Create this fake rank's part of the model."""
    minimal.draw = draw
    sizes = dict(layers=2, hidden=8, heads=4, seq_length=3, global_batch=4 * dp, micro_batch=4) | sizes
    return minimal.make_model(minimal.Sizes(**sizes), minimal.make_grid(tp, pp, dp, torch.device("cpu")), vocab, 2)


def shard(minimal, model, name, whole):
    """Cut this rank's shard of a parameter, or of its gradient, from the whole tensor. Other tensors are not cut."""
    _, cut = minimal.declare(model.sizes, model.grid, model.sites, model.vocab).get(name, (None, None))
    return whole if cut is None else whole.chunk(model.grid.tp, cut)[model.grid.tp_rank]


def fill_gradients(minimal, model, scale=1.0, seed=""):
    """Fill every .grad. Whole gradients differ between replicas, and the tied matrix's also between stages."""
    for name, weight in model.weights.items():
        ends = f"{model.grid.pp_rank}" if name == minimal.WORDS else ""
        shape = minimal.declare(model.sizes, model.grid, model.sites, model.vocab)[name][0]
        whole = draw(model.sizes, f"{name} {ends} {model.grid.dp_rank} {seed}", shape)
        weight.grad.copy_(scale * shard(minimal, model, name, whole))
