"""Exercise 9: the sharded optimizer."""

import torch

from ..fake_ranks import on_ranks
from ..judge import expect
from ..stages import fill_gradients, make_model

FACTS = """
model.grad, model.flat and model.decays [n] are whole on each replica; tensor.chunk(grid.dp) cuts
them. model.moments [2, n/dp] are this replica's moment and square. Clip by norm + 1e-6. AdamW's
epsilon is 1e-8. Leave model.grad at zero.
"""
HINTS = (
    "Two collectives over grid.dp_group suffice: one before the update, one after it. Which, and on which tensors?",
    "The word embedding is used at both ends of the pipeline. Which stages must add its gradients, before which sum?",
    "A replica has the gradient of a sum of losses. By which number do you divide, and how often?",
    "Clip by the norm of the whole model: global_sums(model, loss / tokens, own gradient) returns loss and norm.",
    "AdamW first shrinks the weight by lr * decay * decays. The moments average the gradient and its square. "
    "Both start at 0, so divide them by 1 - beta^step before weight -= lr * moment / (sqrt(square) + 1e-8).")
TIED = "if grid.pp > 1 and grid.tied_group: "
CLIP = "gradient *= min(1.0, clip / (grad_norm + 1e-6))"
DECAY = "weight *= 1.0 - lr * decay * model.decays.chunk(grid.dp)[grid.dp_rank]"
MISTAKES = {
    "The gradients of the word embedding are not added over its two stages: the first stage looks words up, the last "
    "one multiplies by the same matrix, so all-reduce its gradient over grid.tied_group first.": (TIED, "if False: "),
    "The gradient is divided by the number of replicas a second time: the tokens of the global batch already count all "
    "replicas.": ("gradient /= tokens ", "gradient /= tokens * grid.dp "),
    "The gradient is divided by this replica's tokens: divide the sum over replicas by the tokens of all replicas.":
        ("gradient /= tokens ", "gradient /= tokens / grid.dp "),
    "The gradient is never divided by the number of tokens.": ("gradient /= tokens ", "pass "),
    "The gradient is only this replica's own: reduce-scatter model.grad, so that the owner gets the sum over replicas.":
        ("dist.reduce_scatter(gradient, list(model.grad.chunk(grid.dp)), group=grid.dp_group)",
         "gradient.copy_(model.grad.chunk(grid.dp)[grid.dp_rank])"),
    "Replicas do not get the parts that others updated: all-gather the parts into model.flat.":
        ("dist.all_gather(list(model.flat.chunk(grid.dp)), weight.clone(), group=grid.dp_group)", "pass"),
    "The gradient is not clipped.": (CLIP, "pass"),
    "The gradient is scaled up to the norm `clip` if it is smaller: clipping may only make it smaller, min(1, ...).":
        (CLIP, "gradient *= clip / (grad_norm + 1e-6)"),
    "Biases and norms decay: weight decay is only for matrices, so multiply by model.decays.":
        (DECAY, "weight *= 1.0 - lr * decay"),
    "No weight decays.": (DECAY, "pass"),
    "The weight decay goes through the moments, as in Adam with L2: AdamW shrinks the weight itself.":
        (DECAY, "gradient += decay * weight * model.decays.chunk(grid.dp)[grid.dp_rank]"),
    "The moments' bias is not corrected: both start at 0, so divide by 1 - beta ^ step, or the first steps have the "
    "wrong size.": ("deviation = (square / (1.0 - beta2 ** step)).sqrt_().add_(1e-8)\n"
                    "    weight.addcdiv_(moment, deviation, value=-lr / (1.0 - beta1 ** step))",
                    "deviation = square.sqrt().add_(1e-8)\n    weight.addcdiv_(moment, deviation, value=-lr)"),
    "The gradients are not zeroed, so the next step adds to them.": ("    model.grad.zero_()\n", ""),
}


@on_ranks(4)
def program(minimal):
    """Take three steps on two stages of two replicas. In steps 1 and 3 the gradient norm exceeds `clip`."""
    model, found = make_model(minimal, tp=1, pp=2, dp=2, heads=2), {}
    for step, scale in ((1, 30.0), (2, 0.01), (3, 300.0)):
        fill_gradients(minimal, model, scale, seed=step)
        loss = torch.tensor(8.0 * model.grid.dp_rank + step) * (model.grid.pp_rank == 1)
        result = minimal.optimizer_step(model, step, 0.01 * step, loss)
        expect(isinstance(result, tuple) and len(result) == 2, "optimizer_step must return (loss, gradient norm).")
        found[f"The loss of step {step}"] = torch.as_tensor(result[0])
        found[f"The gradient norm of step {step}"] = torch.as_tensor(result[1])
        found |= {f"{name} after step {step}": weight.detach().clone() for name, weight in model.weights.items()}
        found[f"Whether model.grad is 0 after step {step}"] = not model.grad.any()
    return found
