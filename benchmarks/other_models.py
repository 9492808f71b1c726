"""Builds other implementations of nanodomino's models, with the same weights; throughput.py compares with them.

The functions plain, transformers and nanogpt take (config, ours) and return a module that maps (tokens [b, s],
labels [b, s]) to the mean loss.
"""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks.plain import Plain, mean_loss
from nanodomino.checkpoint.index import slices
from nanodomino.errors import UserError, require
from nanodomino.huggingface.families import family_of, write_config
from nanodomino.huggingface.tensor_mapping import map_tensors

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class MeanLoss(nn.Module):
    """Adds the loss to a model. logits_of(model, tokens): returns the logits [b, s, v]."""

    def __init__(self, model, logits_of):
        super().__init__()
        self.model, self.logits_of = model, logits_of

    def forward(self, tokens, labels):
        return mean_loss(self.logits_of(self.model, tokens), labels)


def require_gpt2(config, name: str):
    """Raise UserError if the model is not built like GPT-2."""
    require(config.normalization == "LayerNorm" and config.position_embedding_type == "learned_absolute"
            and not config.swiglu and config.num_query_groups == config.num_attention_heads and config.tied,
            f"{name} has only GPT-2's LayerNorm, learned positions, GELU, multi-head attention and tied head, but "
            "this model differs; try --against transformers")


def plain(config, ours) -> nn.Module:
    require_gpt2(config, "plain.py")
    return MeanLoss(Plain(config).load(ours.state_dict()), lambda model, tokens: model(tokens))


def transformers(config, ours) -> nn.Module:
    """Build Transformers' model of the same family. Raises UserError without the package."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"--against transformers needs the package transformers, which can't be imported ({error}); "
                        "pip install -r requirements-extra.txt") from None
    record = write_config(config, config.dtype)
    # from_pretrained instead of load_state_dict: it joins the tensors of the experts
    model, problems = getattr(transformers, record["architectures"][0]).from_pretrained(
        None, config=transformers.AutoConfig.for_model(**record | {"torch_dtype": None}), dtype=torch.float32,
        state_dict=huggingface_weights(config, ours), output_loading_info=True)
    require(not any(problems.values()), f"Transformers can't load what nanodomino exports ({problems}); this is a bug")
    return MeanLoss(model.train(), lambda model, tokens: model(tokens, use_cache=False).logits)


def huggingface_weights(config, ours) -> dict:
    """Return the weights of `ours` by Hugging Face's names."""
    weights, theirs = dict(ours.named_parameters()), {}
    for mapping in map_tensors(config, family_of(config).modules):
        whole = weights[mapping.name].detach().float().view(mapping.shape)
        part = whole[slices(mapping.box, (0,) * whole.dim())].view(mapping.size)
        parts = mapping.conversion.to_hf(part, config)
        theirs |= {name: part.clone() for name, part in zip(mapping.hf_shapes, parts)}
    return theirs


class NanoGPT(nn.Module):
    """nanoGPT's model, whose forward returns (logits, loss)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, labels):
        return self.model(tokens, labels.contiguous())[1]           # it calls view() on the labels


def nanogpt(config, ours, folder: Path) -> nn.Module:
    """Build the model of model.py in a clone of github.com/karpathy/nanoGPT.

    One thing is changed: its GELU is exact, ours and GPT-2's is the tanh approximation.
    """
    require_gpt2(config, "nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)       # torch.compile looks it up there
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()):                     # it prints its number of parameters
        model = module.GPT(module.GPTConfig(
            block_size=config.max_position_embeddings, vocab_size=config.vocab_size, n_layer=config.num_layers,
            n_head=config.num_attention_heads, n_embd=config.hidden_size, dropout=0.0, bias=True))
    weights = huggingface_weights(config, ours)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs = weights.get(name, weights["transformer.wte.weight"])                # the head is tied
            parameter.copy_(theirs.t() if name.endswith(TRANSPOSED) else theirs)
    for block in model.transformer.h:
        block.mlp.gelu = nn.GELU(approximate="tanh")
    return NanoGPT(model)
