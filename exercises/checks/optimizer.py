"""Exercise 9: the sharded optimizer."""

import torch

from ..fake_ranks import World
from ..judge import expect, judge
from ..stages import fill_gradients, make_stage

HINT = """
stage.grad [n], stage.flat [n] and stage.decays [n] are whole on each replica;
tensor.chunk(grid.dp) cuts n into the replicas' parts. stage.moments [2, n/dp] are this
replica's moment and square.
1. Add the two stages' gradients of the word embedding, stage.weights[WORDS].grad, over
   grid.tied_group, if there are several stages and this one has it.
2. Reduce-scatter stage.grad over grid.dp_group; divide by the tokens of the whole batch.
3. loss, norm = global_sums(stage, loss / tokens, own gradient); scale by min(1, clip / (norm
   + 1e-6)).
4. AdamW on the own part of stage.flat: weight *= 1 - lr * decay * decays; moment and square
   are moving averages of gradient and gradient^2; weight -= lr * moment' / (sqrt(square') +
   1e-8), where moment' = moment / (1 - beta1^step) and square' = square / (1 - beta2^step).
5. All-gather the parts into stage.flat, and zero stage.grad for the next step. Return loss,
   norm.
"""
TIED = "if grid.pp > 1 and grid.tied_group: "
CLIP = "gradient *= min(1.0, clip / (grad_norm + 1e-6))"
DECAY = "weight *= 1.0 - lr * decay * stage.decays.chunk(grid.dp)[grid.dp_rank]"
MISTAKES = {
    "The gradients of the word embedding are not added over its two stages: the first stage looks words up, the last "
    "one multiplies by the same matrix, so all-reduce its gradient over grid.tied_group first.": (TIED, "if False: "),
    "The gradient is divided by the number of replicas a second time: the tokens of the global batch already count all "
    "replicas.": ("gradient /= tokens ", "gradient /= tokens * grid.dp "),
    "The gradient is divided by this replica's tokens: divide the sum over replicas by the tokens of all replicas.":
        ("gradient /= tokens ", "gradient /= tokens / grid.dp "),
    "The gradient is never divided by the number of tokens.": ("gradient /= tokens ", "pass "),
    "The gradient is only this replica's own: reduce-scatter stage.grad, so that the owner gets the sum over replicas.":
        ("dist.reduce_scatter(gradient, list(stage.grad.chunk(grid.dp)), group=grid.dp_group)",
         "gradient.copy_(stage.grad.chunk(grid.dp)[grid.dp_rank])"),
    "The loss is not divided by the number of tokens.": ("loss / tokens, gradient)", "loss, gradient)"),
    "Replicas do not get the parts that others updated: all-gather the parts into stage.flat.":
        ("dist.all_gather(list(stage.flat.chunk(grid.dp)), weight.clone(), group=grid.dp_group)", "pass"),
    "The gradient is not clipped.": (CLIP, "pass"),
    "The gradient is scaled up to the norm `clip` if it is smaller: clipping may only make it smaller, min(1, ...).":
        (CLIP, "gradient *= clip / (grad_norm + 1e-6)"),
    "Biases and norms decay: weight decay is only for matrices, so multiply by stage.decays.":
        (DECAY, "weight *= 1.0 - lr * decay"),
    "No weight decays.": (DECAY, "pass"),
    "The weight decay goes through the moments, as in Adam with L2: AdamW shrinks the weight itself.":
        (DECAY, "gradient += decay * weight * stage.decays.chunk(grid.dp)[grid.dp_rank]"),
    "The weight decay is not multiplied by the learning rate: a step shrinks a matrix by lr * decay.":
        (DECAY, DECAY.replace("lr * ", "")),
    "The moments' bias is not corrected: both start at 0, so divide by 1 - beta ^ step, or the first steps have the "
    "wrong size.": ("deviation = (square / (1.0 - beta2 ** step)).sqrt_().add_(1e-8)\n"
                    "    weight.addcdiv_(moment, deviation, value=-lr / (1.0 - beta1 ** step))",
                    "deviation = square.sqrt().add_(1e-8)\n    weight.addcdiv_(moment, deviation, value=-lr)"),
    "The gradients are not zeroed, so the next step adds to them.": ("    stage.grad.zero_()\n", ""),
}


def program(minimal):
    """Take three steps on two stages of two replicas. In steps 1 and 3 the gradient norm exceeds `clip`."""
    def rank_program():
        stage, found = make_stage(minimal, tp=1, pp=2, dp=2, heads=2), {}
        for step, scale in ((1, 30.0), (2, 0.01), (3, 300.0)):
            fill_gradients(minimal, stage, scale, seed=step)
            loss = torch.tensor(8.0 * stage.grid.dp_rank + step) * (stage.grid.pp_rank == 1)
            result = minimal.optimizer_step(stage, step, 0.01 * step, loss)
            expect(isinstance(result, tuple) and len(result) == 2, "optimizer_step must return (loss, gradient norm).")
            found[f"The loss of step {step}"] = torch.as_tensor(result[0])
            found[f"The gradient norm of step {step}"] = torch.as_tensor(result[1])
            found |= {f"{name} after step {step}": weight.detach().clone() for name, weight in stage.weights.items()}
            found[f"Whether stage.grad is 0 after step {step}"] = not stage.grad.any()
        return found

    return World(4).run(rank_program)


def check(answer, reference):
    judge(program, answer, MISTAKES)
