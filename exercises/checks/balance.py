"""Exercise 16: a load-balancing loss that no layout changes."""

import torch

from ..fake_ranks import World
from ..judge import expect, judge
from ..stages import draw

HINTS = (
    "Count the choices of each expert in each sample: one_hot, or scatter_add_. Counts have no gradient, so an "
    "all-reduce of them is safe under autograd.",
    "Which of f and P must know all tokens of a sample before the product, and which may stay an addend?",
    "A mean over this rank's own tokens would count replicas several times: divide by `tokens`.")
REDUCE, RETURN = "    dist.all_reduce(chosen, group=group)\n", "return s * count * (shares * means).sum() / tokens"
MISTAKES = {
    "f counts only this rank's tokens of a sample, so the loss depends on the cut: all-reduce the counts over the "
    "group.": (REDUCE, "    chosen = chosen * dist.get_world_size(group)\n"),
    "f counts the choices of other replicas' samples: all-reduce the counts over the group, not over the world.":
        (REDUCE, "    dist.all_reduce(chosen)\n"),
    "f is the share of all samples of the microbatch, so the loss depends on the microbatch: count for each sample.":
        (REDUCE, REDUCE + "    chosen = chosen.mean(0, keepdim=True)\n"),
    "The loss is the mean over this rank's tokens, so the replicas' losses add up to too much: divide by the tokens of "
    "the global batch.": (RETURN, RETURN.replace("tokens", "(probabilities.size(0) * probabilities.size(1))")),
    "The loss counts each sample once, not once for each of its tokens: multiply by s.":
        (RETURN, RETURN.replace("s * count", "count")),
    "The loss misses the factor E: it must be 1 if the choice is even.": (RETURN, RETURN.replace("count * ", "")),
    "The loss is c x too large: each rank returns an addend, so divide the sum of its probabilities by the whole s.":
        ("probabilities.sum(1) / s", "probabilities.mean(1)"),
    "f is not divided by k: a token makes k choices, and the shares must sum to 1.": ("(s * experts.size(-1))", "s"),
}
B, S, E, K = 4, 6, 5, 3                              # samples of the global batch, tokens, experts, choices


def program(minimal, dp=2, cp=2):
    """Run dp replicas, each with its samples' tokens cut over cp ranks. Return the loss and the whole gradient."""
    def rank_program():
        replica, part = divmod(minimal.dist.get_rank(), cp)
        group = minimal.dist.new_group(range(replica * cp, replica * cp + cp))
        logits = 3 * draw(None, "router", (B, S, E)).chunk(dp)[replica].chunk(cp, 1)[part].requires_grad_()
        loss = minimal.balance_loss(logits.softmax(-1), logits.topk(K).indices, group, B * S)
        expect(isinstance(loss, torch.Tensor) and loss.requires_grad and loss.dim() == 0,
               "balance_loss must return a scalar tensor with autograd's graph.")
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    losses, gradients = zip(*World(dp * cp).run(rank_program))
    rows = [torch.cat(gradients[i * cp:i * cp + cp], 1) for i in range(dp)]
    return [{"The loss, added up over all ranks,": sum(losses), "The gradient of the logits": torch.cat(rows)}]


def check(answer, reference):
    judge(program, answer, MISTAKES, right=program(reference, dp=1, cp=1))
