"""Chooses k of E experts for each token, and computes the two losses that keep the choice balanced.

    logits = h Wr^T     scores = softmax or sigmoid of the logits     experts = the k largest scores (+ expert bias)

    score function            weight of a chosen expert                             Megatron-LM's flags
    softmax, if k > 1         softmax over the k chosen logits (Mixtral)            --moe-router-score-function softmax
    softmax, pre-softmax      its probability among all E experts                   --moe-router-pre-softmax
    sigmoid                   its score / the sum of the k scores (DeepSeek-V3)     --moe-router-score-function sigmoid

**Ties.** If scores are equal, the expert with the lower number wins. torch.topk does not promise that.

**Balance.** Without a counterweight, a router soon sends most tokens to a few experts. Three remedies, where f_e is the
share of a sample's s k choices that expert e received, and P_e its mean probability over the sample:

    auxiliary loss   coefficient x E x sum over e of f_e P_e (2101.03961, section 2.2). With an even choice it equals
                     the coefficient; it grows if the experts chosen most often also have the highest probabilities.
                     Only P_e has a gradient
    z-loss           coefficient x mean over tokens of (log of the sum of exp(logits))^2 (2202.08906)
    expert bias      added to the scores for the choice only, not for the weights. After each step it grows by a fixed
                     rate for experts that were chosen less often than the mean, and shrinks for others (2408.15664)

**The layout must not show.** A mean over "the batch" would depend on how the batch is cut into microbatches, slices and
replicas. So the auxiliary loss is computed for each sample (Megatron-LM's seq_aux_loss) and weighted by s, and the
z-loss is a sum over tokens. Like the loss of the model, both are divided once, by the number of counted tokens of the
global batch. A token that the loss mask leaves out is routed too, because other tokens attend to it. So it adds to both
losses: if only half of the tokens count, both losses weigh twice as much. If no token counts, neither loss does.

The expert bias follows the global step's tokens_per_expert. Its "gradient" is their excess over the mean. The replicas
sum it like any other gradient, and zero.py updates the bias by the sign of the sum.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from nanodomino.layers.gradients import add_gradients, add_weight_gradient, main_grad_of, wide_dtype
from nanodomino.optim.buckets import parameter
from nanodomino.overlap.slices import Flight, prepare_all_reduce

# The scores of any function but softmax are divided by their sum: for the weights over the k, for the loss over all E.
SCORE_FUNCTIONS = {"softmax": partial(torch.softmax, dim=-1), "sigmoid": torch.sigmoid}


def divide_by_sum(scores):
    """Scale scores [.., n] so that each n of them add up to 1."""
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


@dataclass
class Routing:
    """Holds the router's decision for a slice, and autograd's graph from the logits to the weights and the loss."""
    logits: torch.Tensor         # [b, s, E], a leaf of autograd's graph
    experts: torch.Tensor        # [b, s, k]
    weights: torch.Tensor        # [b, s, k], with autograd's graph
    tokens_per_expert: torch.Tensor    # [E]
    permutation: torch.Tensor    # [b s k], which sorts the rows by expert
    loss: torch.Tensor | None = None    # auxiliary loss and z-loss, summed over the slice's tokens, with its graph


class Router(nn.Module):
    """Holds the router's matrix Wr [E, h] and, if enabled, the expert bias [E].

    Each tensor-parallel rank routes all tokens in the same way. But it computes only its own features' addend of an
    expert's output. So the gradients of the weights and of Wr that it computes are addends, too."""

    def __init__(self, config, mesh):
        super().__init__()
        self.config, self.num_experts, self.topk = config, config.num_experts, config.moe_router_topk
        self.softmax = config.moe_router_score_function == "softmax"
        self.scores = SCORE_FUNCTIONS[config.moe_router_score_function]      # logits [.., E] -> scores [.., E]
        self.counts_here = mesh.tp_rank == 0                   # only tp rank 0 adds losses and counts
        self.sample_parts, self.sample_group = config.cp, mesh.groups.get("cp")
        self.weight = parameter((config.num_experts, config.hidden_size), config, mesh, std=config.init_method_std,
                                addends=("tp",))
        self.expert_bias = (parameter((config.num_experts,), config, mesh, addends=("tp",), update="sign",
                                      dtype=torch.promote_types(config.params_dtype, torch.float32))
                            if config.moe_router_enable_expert_bias else None)

    def logits(self, h):
        """Return the logits [b, s, E] of h [b, s, h], in fp32 or wider."""
        wide = wide_dtype(h)
        return h.to(wide) @ self.weight.to(wide).t()

    @torch.no_grad()
    def choose(self, logits):
        """Return (experts, tokens_per_expert, permutation): the numbers of the chosen experts [b, s, k], the best
        first; how many tokens chose each expert [E]; the permutation [b s k] that sorts the experts stably."""
        scores = self.scores(logits)
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        experts = scores.sort(dim=-1, descending=True, stable=True).indices[..., :self.topk].contiguous()
        ordered, permutation = experts.flatten().short().sort(stable=True)     # 16 bits: a quarter of 64 bits' passes
        # the rows up to each expert's last, minus those before its first; bincount would make the host wait for a GPU
        numbers = torch.arange(self.num_experts, dtype=torch.int16, device=logits.device)
        first, end = (torch.searchsorted(ordered, numbers, right=after) for after in (False, True))
        return experts, end - first, permutation

    def weights(self, logits, experts):
        """Return the weights [b, s, k] of the chosen experts."""
        if self.softmax and not self.config.moe_router_pre_softmax:
            weights = logits.gather(-1, experts).softmax(dim=-1)
        else:
            weights = self.scores(logits).gather(-1, experts)
        if not self.softmax and self.topk > 1:
            weights = divide_by_sum(weights)
        return weights * self.config.moe_router_topk_scaling_factor

    @torch.no_grad()
    def choices(self, logits, experts) -> Flight:
        """Count how often the tokens of each sample chose each expert, [b, E], and prepare the sum of these counts over
        the ranks that share the samples."""
        chosen = torch.zeros_like(logits[:, 0]).scatter_add_(
            1, experts.flatten(1), torch.ones_like(logits[..., :1]).expand(experts.shape).flatten(1))
        return prepare_all_reduce(chosen, self.sample_group, name="cp") if self.sample_parts > 1 else Flight(chosen)

    def loss(self, logits, choices):
        """Return auxiliary loss + z-loss of a slice: a sum over its samples, each weighted by its s tokens.
        choices: the result of the flight that choices() has prepared"""
        (_, s, count), config, log_sum = logits.shape, self.config, logits.logsumexp(dim=-1, keepdim=True)
        probabilities = (logits - log_sum).exp() if self.softmax else divide_by_sum(self.scores(logits))
        balance = count * (choices / (self.sample_parts * s * self.topk) * probabilities.mean(dim=1)).sum()
        return config.moe_aux_loss_coeff * s * balance + config.moe_z_loss_coeff * log_sum.square().sum()

    def backward(self, routing: Routing, grad_weights, h, loss_scale: float):
        """Return this rank's addend of the gradient of h, and add the gradients of Wr and of the expert bias.
        grad_weights: this rank's addend of the gradient of routing.weights."""
        scale = torch.full_like(routing.loss, loss_scale * self.counts_here)
        (grad_logits,) = torch.autograd.grad([routing.weights, routing.loss], routing.logits, [grad_weights, scale])
        add_weight_gradient(main_grad_of(self.weight), grad_logits, h.to(grad_logits.dtype))
        if self.expert_bias is not None and self.counts_here:
            # E x (count - mean) rather than count - mean, because integers are exact (in fp32 below 2^24)
            excess = self.num_experts * routing.tokens_per_expert - routing.tokens_per_expert.sum()
            add_gradients([self.expert_bias], [excess.to(main_grad_of(self.expert_bias).dtype)])
        return (grad_logits @ self.weight.to(grad_logits.dtype)).to(h.dtype)
