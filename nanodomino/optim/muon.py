"""Muon: orthogonalized momentum for the matrices of the layers, AdamW for everything else (--optimizer muon).

AdamW changes each number of a weight by itself. Muon changes a matrix as a whole: it replaces the momentum M = U S V^T
(its singular value decomposition) by U V^T. So all directions of the matrix learn at the same rate, not only those with
large gradients (github.com/KellerJordan/Muon; 2502.16982):

    m = b m + (1 - b) g     u = b m + (1 - b) g     w = (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) orthogonal(u)

The factor 0.2 sqrt(max(rows, columns)) gives the update the size of AdamW's (2502.16982, section 2.2). Five
Newton-Schulz iterations approximate U V^T by matmuls alone, in the training type. Matrices that share one weight, such
as q, k and v, are updated one by one. Word embedding, head, position embedding and vectors stay with AdamW.

**Whole matrices.** A rank holds only a shard of a matrix (tensor parallelism), and updates only its partition of a flat
bucket (ZeRO). So each step gathers twice: first the updates u of a bucket over the replicas, then the tensor-parallel
ranks' shards of each matrix that lies at least partly in this rank's partition. Each rank orthogonalizes these matrices
and keeps its part of the result, while the gathers of the next bucket and the next matrix are in flight.
"""

import torch

from nanodomino.comm.collectives import all_gather
from nanodomino.optim.buckets import Bucket

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5      # Keller Jordan's, for Newton-Schulz


def orthogonal(matrices, dtype):
    """Return about U V^T, in `dtype`, for each matrix U S V^T of a tensor [.., rows, columns]; 0 for a zero matrix."""
    a, b, c = COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    # Divide before rounding, since fp16 rounds 1e-8 to 0, and by the largest element before the norm, since fp32 rounds
    # the square of 1e-30 to 0.
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1.0)).to(dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def update_of(matrices, parts, dtype):
    """Return 0.2 sqrt(max(rows, columns)) orthogonal(part) in the rows of each of the ParameterSpec's parts."""
    split = matrices.unflatten(-2, (-1, sum(parts))).split(parts, dim=-2)
    updates = [orthogonal(part.flatten(-3, -2), dtype).to(part.dtype).reshape(part.shape)
               * (0.2 * max(part.size(-3) * part.size(-2), part.size(-1)) ** 0.5) for part in split]
    return torch.cat(updates, dim=-2).flatten(-3, -2)


def gathered_ahead(items, launch):
    """Yield (item, the tensor that launch(item) gathers) for each item. launch() returns a function that waits. While
    the caller uses a tensor, the next gather is in flight."""
    ahead = [launch(item) for item in items[:1]]
    for index, item in enumerate(items):
        tensor = ahead.pop()()
        ahead += [launch(following) for following in items[index + 1:index + 2]]
        yield item, tensor


class Muon(torch.optim.Optimizer):
    """Updates the masters of buckets of matrices. zero: the ZeroOptimizer, whose mesh and trace it uses."""

    def __init__(self, groups, config, zero):
        super().__init__(groups, dict(lr=config.lr, weight_decay=config.weight_decay))
        self.momentum, self.dtype, self.zero, self.mesh = config.muon_momentum, config.params_dtype, zero, zero.mesh

    @torch.no_grad()
    def step(self):
        buckets = [(bucket, group) for group in self.param_groups for bucket in group["buckets"]]
        for (bucket, group), updates in gathered_ahead(buckets, self.start_update):
            own = self.orthogonalize(bucket, updates)
            bucket.master.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(own, alpha=-group["lr"])

    def start_update(self, bucket_and_group):
        """Compute this rank's partition of u, for a bucket, and launch the gather of all partitions."""
        bucket, _ = bucket_and_group
        gradient, state = bucket.own_grad, self.state[bucket.master]
        moment = state.setdefault("momentum_buffer", torch.zeros_like(bucket.master))
        moment.lerp_(gradient, 1.0 - self.momentum)
        return self.gather(gradient.lerp(moment, self.momentum), bucket.kind.replicas, bucket.partitions)

    def gather(self, own, group: str, ranks: int):
        """Launch an all-gather of the flat tensor `own`. Return a function that waits for the whole tensor."""
        if ranks == 1:
            return lambda: own
        whole = own.new_empty(ranks * len(own))
        work = all_gather(whole, own, self.mesh.groups[group])
        self.zero.trace.watch("all_gather", work, group=group, bytes=whole.nbytes)

        def wait():
            self.zero.wait(group, work)
            return whole
        return wait

    def orthogonalize(self, bucket: Bucket, updates):
        """Replace the matrices in `updates`, which is laid out like the bucket, and return this rank's partition."""
        first, last = bucket.own_offset, bucket.own_offset + len(bucket.master)
        own = [weight for weight in bucket.parameters
               if bucket.offsets[weight] < last and bucket.offsets[weight] + weight.numel() > first]
        tp = self.mesh.tp if "tp" in bucket.kind.shards else 1
        for weight, flat in gathered_ahead(
                own, lambda weight: self.gather(bucket.view(weight, updates).flatten(), "tp", tp)):
            shape, offset, size = weight.spec.shape, weight.spec.offset, weight.spec.size
            cut = len(shape) - (2 if size[-2] < shape[-2] else 1)          # the dimension that tp cuts, if any
            assert tp == 1 or (size[-2] < shape[-2]) != (size[-1] < shape[-1]), f"tp must cut one dimension of {shape}"
            matrices = torch.cat([*flat.view(tp, *size)], dim=cut)
            result = update_of(matrices, weight.spec.parts, self.dtype).narrow(cut, offset[cut], size[cut])
            bucket.view(weight, updates).copy_(result.reshape(weight.shape))
        return updates[first:last] if bucket.partitions > 1 else updates
