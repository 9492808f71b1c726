"""Exercise 13: ZeRO-2 reduces a bucket after each microbatch, while backward goes on."""

from collections import deque
from types import SimpleNamespace

import torch

from ..fake_ranks import on_ranks
from ..stages import draw

HINTS = (
    "Which report of a microbatch is the last one? The next microbatch reports again.",
    "dist.reduce_scatter(own, list of the parts, group=group, async_op=True) returns the work to wait for.",
    "own is the sum over replicas of one microbatch's gradients. Who adds it to own_grad, and when?")
LAUNCH = "in_flight.append((bucket, own, dist.reduce_scatter(own, parts, group=group, async_op=True)))"
MISTAKES = {
    "own_grad has the gradients of earlier microbatches several times: a reduce has sent them, so set bucket.grad to "
    "None.": ("        bucket.grad = None\n", ""),
    "own_grad has only the last microbatch: its sum must be added (+=) to those of the others.":
        ("bucket.own_grad += own", "bucket.own_grad.copy_(own)"),
    "own_grad has only the first microbatch: after a reduce, the count of missing reports must start again.":
        ("        bucket.missing = bucket.parameters\n", ""),
    "A bucket is reduced before its last report: one report for each parameter must come first.":
        ("if bucket.missing == 0:", "if True:"),
    "report() waits for the reduce that it has launched: leave it in in_flight, so that backward hides it.":
        (LAUNCH, LAUNCH + "; finish(in_flight)"),
    "More than two reduces are in flight, each with a whole gradient in memory: finish() the oldest first.":
        ("if len(in_flight) == 2:", "if False:"),
    "finish() waits for the newest reduce: the oldest one has had the most time to end.":
        ("in_flight.popleft()", "in_flight.pop()"),
}


@on_ranks(2)
def program(minimal):
    """Run three microbatches on two replicas with three buckets."""
    rank, in_flight, log, group = minimal.dist.get_rank(), deque(), [], minimal.dist.new_group([0, 1])
    buckets = [SimpleNamespace(parameters=count, missing=count, grad=None, own_grad=torch.zeros(count))
               for count in (3, 2, 1)]
    for name in (f"{microbatch} {i} {parameter}" for microbatch in range(3) for i in range(3)
                 for parameter in range(buckets[i].parameters)):
        _, i, parameter = map(int, name.split())
        if buckets[i].grad is None:
            buckets[i].grad = torch.zeros(2 * buckets[i].parameters)
        buckets[i].grad[2 * parameter:2 * parameter + 2] += draw(None, f"{rank} {name}", (2,))
        minimal.report(buckets[i], in_flight, group)
        waiting = [k for bucket, *_ in in_flight for k, other in enumerate(buckets) if other is bucket]
        log.append((waiting, buckets[i].grad is None))
    while in_flight:
        minimal.finish(in_flight)
    return {**{f"own_grad of bucket {i}": bucket.own_grad for i, bucket in enumerate(buckets)},
            "(The buckets in flight, whether bucket.grad is None) after each report": log}
