"""Mixture of experts: an MLP with E sets of weights (the experts), of which each token uses k (1701.06538).

With expert parallelism (ep), ep replicas share the experts: each holds E/ep of them, and the tokens travel. For example
4 experts on ep = 2 replicas, k = 2:

                        replica 0: experts 0, 1     replica 1: experts 2, 3
    tokens              A            B              C            D
    router.py chooses   A: 0, 2      B: 1, 0        C: 3, 1      D: 2, 3      k experts for each token
    rows, by expert     A B B | A                   C | D C D                 a row: a token for one expert;
       their experts    0 0 1 | 2                   1 | 2 3 3                 "|" divides the replicas they go to

    tokens_per_expert   --all-to-all->    each rank learns how many rows will arrive, from whom and for which expert
    rows                --all-to-all->    the dispatch: replica 0 now has all rows of experts 0 and 1, A B B C
                        each expert multiplies its rows: W2 activation(W1 row)
    results             --all-to-all->    the combine: every row goes back to the replica that it came from
                        y of a token = the sum of its k results, each times its weight

**Why all-to-all?** Every rank has different rows for every other rank. That is what an all-to-all sends. Its backward
is an all-to-all in the other direction, so a layer has four large ones per microbatch.

**What hides what.** A slice yields after it has launched its dispatch, and again after it has launched its combine. In
the meantime the other slice computes. Without tensor parallelism, the attention of slice b hides the dispatch of slice
a, and the experts of slice b hide its combine. With tensor parallelism the slice also yields at attention's reduce,
which leaves less to hide a dispatch. A shared expert computes while the rows are in flight, in forward and backward.

The host must read the numbers of the first all-to-all before it can launch the dispatch. In the meantime the GPU
gathers the rows that the slice will send. The slice does not yield, because the other slice's attention would then hide
this short all-to-all, and nothing would be left to hide the dispatch. The numbers have their own process group. On the
rows' group they would queue behind the other slice's rows.

**Dropless.** Some systems give each expert a capacity and drop the rows beyond it. Then the dropped rows depend on
which tokens share a microbatch, slice and replica, so the layout would show in the loss. Here every row is computed,
however unevenly the tokens choose.

**Tensor parallelism.** The features of an expert are cut over tp like those of an MLP, so a rank's y is an addend, and
the usual reduce completes it. Each rank exchanges rows with the ranks of its own tp_rank on the other replicas.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.comm.device import capability_of, on_gpu, streams_of
from nanodomino.layers.gradients import add_residual, add_weight_gradient, main_grad_of
from nanodomino.layers.sublayers import ACTIVATIONS, Sublayer
from nanodomino.optim.buckets import parameter
from nanodomino.optim.optimizers import OptimizerSpec, SignUpdate
from nanodomino.options.router import Router, Routing
from nanodomino.overlap.compute import Branch
from nanodomino.overlap.slices import Flight, prepare_all_to_all
from nanodomino.parallel import (ColumnParallelLinear, RowParallelLinear, copy_to_tensor_parallel,
                                 reduce_from_tensor_parallel)


class Dispatch:
    """Holds where the n k rows of a slice go. Row i is for token i // k. r: the number of rows that this rank receives.

    permutation, inverse_permutation   [n k]: sorts the rows by expert before they are sent, and its inverse
    splits                             (the numbers of rows to each ep rank, the numbers of rows from each ep rank)
    by_expert, unsort                  [r]: sorts the received rows by expert, and its inverse
    ends, offsets                      for each local expert, the number of received rows up to and including its own;
                                       ends on the host, offsets (int32) on the device
    """

    def __init__(self, permutation, tokens_per_expert, received_per_expert):
        """Start to copy the numbers of rows to the host. On a GPU the copy runs while the host launches more work.
        tokens_per_expert [ep, E/ep]: how many rows this rank has for each expert of each ep rank;
        received_per_expert [ep, E/ep]: how many rows each ep rank has for each local expert."""
        self.permutation, self.received_per_expert = permutation, received_per_expert
        self.offsets = received_per_expert.sum(0).cumsum(0, dtype=torch.int32)
        numbers = torch.cat([tokens_per_expert.sum(1), received_per_expert.sum(1), self.offsets])
        self.numbers = numbers.to("cpu", non_blocking=True)    # on a GPU, into pinned memory
        self.copied = streams_of(numbers.device).current_stream().record_event() if on_gpu(numbers) else None

    def read(self):
        """Set splits and ends. The host waits for the copy, but not for work that was launched after it."""
        (ep, local), rows = self.received_per_expert.shape, len(self.permutation)
        if self.offsets.is_meta:             # without numbers, assume that all experts are chosen equally often
            numbers = 2 * [rows * (i + 1) // ep - rows * i // ep for i in range(ep)]
            numbers += [rows * (i + 1) // local for i in range(local)]
        else:
            if self.copied:
                self.copied.synchronize()
            numbers = self.numbers.tolist()
        self.splits, self.ends = (numbers[:ep], numbers[ep:2 * ep]), numbers[2 * ep:]

    def sort_rows(self):
        """Set by_expert and both inverses."""
        ep, local = self.received_per_expert.shape
        expert = torch.arange(local, dtype=torch.int16, device=self.permutation.device).repeat(ep)
        expert = expert.repeat_interleave(self.received_per_expert.flatten(), output_size=self.ends[-1])
        self.by_expert = expert.argsort(stable=True)
        self.inverse_permutation, self.unsort = inverse(self.permutation), inverse(self.by_expert)


def inverse(permutation):
    """Return the inverse of a permutation of 0 .. n - 1."""
    return torch.empty_like(permutation).scatter_(0, permutation, torch.arange(
        len(permutation), device=permutation.device))


def grouped_linear(x, weights, dispatch: Dispatch):
    """Return x_e W_e^T for each local expert e. x [r, in]: rows sorted by expert; weights [experts, out, in]."""
    if has_grouped_kernel(x, weights):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=dispatch.offsets)
    ends = dispatch.ends
    return torch.cat([F.linear(x[start:end], weight) for start, end, weight in zip([0, *ends], ends, weights)])


def has_grouped_kernel(x, weights) -> bool:
    """Return whether torch's grouped_mm multiplies all groups of rows in one kernel: in bfloat16 on GPUs of compute
    capability 9 and 10, with fewer than 1,024 experts and rows aligned to 16 bytes. Elsewhere it loops over the
    experts, and the host waits for the GPU."""
    return (on_gpu(x) and x.dtype == torch.bfloat16 and len(x) > 0 and x.size(-1) % 8 == weights.size(1) % 8 == 0
            and capability_of(x.device)[0] in (9, 10) and len(weights) < 1024)


class ExchangeRows(torch.autograd.Function):
    """All-to-all of rows; backward sends the gradients back."""

    @staticmethod
    def forward(ctx, rows, input_splits, output_splits, group):
        ctx.way_back = output_splits, input_splits, group
        return run(prepare_all_to_all(rows, input_splits, output_splits, group))

    @staticmethod
    def backward(ctx, gradient):
        return run(prepare_all_to_all(gradient.contiguous(), *ctx.way_back)), None, None, None


def run(flight: Flight):
    """Launch a flight if it sends anything, wait, and return its tensor."""
    if flight.collective:
        flight.launch()
        flight.work.wait()
    return flight.result()


class MoE(Sublayer):
    """Takes the place of MLP in a layer with experts. Every token also uses the shared expert, if there is one."""

    def __init__(self, config, mesh, site: str):
        super().__init__(config, mesh, site)
        self.activation, self.mesh, self.ep = ACTIVATIONS[config.activation], mesh, mesh.axis("ep")[0]
        self.group, self.counts_group = (mesh.groups.get(name) for name in ("ep", "ep_counts"))
        experts, h, ffn = config.num_experts, config.hidden_size, config.moe_ffn_hidden_size
        replicas = "expert_dp" if self.ep > 1 else "dp"        # the group of ranks that hold the same experts
        self.router, self.experts, self.shared_expert = Router(config, mesh), nn.Module(), None
        matrices = self.activation.inputs
        stack = (matrices,) if matrices > 1 else ()            # SwiGLU's gate and up
        self.experts.dense_h_to_4h = parameter(
            (experts, *stack, ffn, h), config, mesh, cut={0: "ep", len(stack) + 1: "tp"}, replicas=replicas,
            view=(experts // self.ep, -1, h), std=config.init_method_std)
        self.experts.dense_4h_to_h = parameter(
            (experts, h, ffn), config, mesh, cut={0: "ep", 2: "tp"}, replicas=replicas,
            std=config.init_method_std / (2 * config.num_layers) ** 0.5)
        if width := config.moe_shared_expert_intermediate_size:
            self.shared_expert = nn.Module()
            self.shared_expert.dense_h_to_4h = ColumnParallelLinear(h, matrices * width, config, mesh, bias=False,
                                                                    partition_stride=matrices)
            self.shared_expert.dense_4h_to_h = RowParallelLinear(width, h, config, mesh, bias=False)

    def forward(self, x, masks_and_positions):
        """The definition, with blocking communication and plain autograd. Sets auxiliary_loss, which the caller must
        add to the loss. Generation does not set it, because not all ranks that its sums need take part."""
        router, w1, w2 = self.router, self.experts.dense_h_to_4h, self.experts.dense_4h_to_h
        h = copy_to_tensor_parallel(self.norm(x), self.mesh.tp_group)
        logits = router.logits(h)
        experts, tokens_per_expert, permutation = router.choose(logits.detach())
        if torch.is_grad_enabled():
            self.auxiliary_loss = router.loss(logits, run(router.choices(logits, experts))) * router.counts_here
        tokens_per_expert, each = tokens_per_expert.view(self.ep, -1), [1] * self.ep
        received_per_expert = run(prepare_all_to_all(tokens_per_expert, each, each, self.counts_group))
        dispatch = Dispatch(permutation, tokens_per_expert, received_per_expert)
        dispatch.read()
        dispatch.sort_rows()
        rows = h.flatten(0, 1)[permutation // experts.size(-1)]
        rows = ExchangeRows.apply(rows, *dispatch.splits, self.group)[dispatch.by_expert]
        results = grouped_linear(self.activation.function(grouped_linear(rows, w1, dispatch)), w2, dispatch)
        results = ExchangeRows.apply(results[dispatch.unsort], *reversed(dispatch.splits), self.group)
        y = combine(results, dispatch, router.weights(logits, experts).to(h.dtype))
        if shared := self.shared_expert:
            c = F.linear(h, shared.dense_h_to_4h.weight)
            y = y + F.linear(self.activation.function(c), shared.dense_4h_to_h.weight)
        y = reduce_from_tensor_parallel(y, self.mesh.tp_group)
        return add_residual(x, y, None, masks_and_positions.hidden_dropout_mask(self.site + ".hidden", x))


def combine(results, dispatch: Dispatch, weights):
    """Return y [b, s, h], the weighted sum of each token's k results. results [n k, h], in the order of sending;
    weights [b, s, k]."""
    each = results[dispatch.inverse_permutation].view(*weights.shape, -1)
    return torch.einsum("bskh,bsk->bsh", each, weights)


@dataclass
class MoETape:
    """Holds what backward needs. A field is None after a tape policy has dropped it. The second entry of a pair is the
    shared expert's, or None."""
    routing: Routing
    dispatch: Dispatch
    rows: torch.Tensor                   # [r, h], the rows that this rank received, sorted by expert
    column_output: tuple | None          # c [r, .. ffn/t], the output of W1
    core: tuple | None                   # c again: the activation's backward needs it
    activation: tuple | None             # the input of W2
    results: torch.Tensor                # [n k, h], the experts' results, in the order of sending


class MoEBranch(Branch):
    """Runs router, dispatch, experts and combine."""

    def __init__(self, sublayer: MoE, ops, compiled):
        """compiled: see Sublayer. Only the router is compiled, because the experts' numbers of rows often change."""
        super().__init__(sublayer)
        self.ops, self.activation, shared = ops, sublayer.activation, sublayer.shared_expert
        self.router = router = sublayer.router
        self.choose, self.weights, self.loss = map(compiled, (router.choose, router.weights, router.loss))
        self.ep, self.statistics = sublayer.ep, ops.statistics_of[self.site]
        self.w1, self.w2 = sublayer.experts.dense_h_to_4h, sublayer.experts.dense_4h_to_h
        self.shared = (shared.dense_h_to_4h.weight, shared.dense_4h_to_h.weight) if shared else None

    def keep(self, h):
        return h

    def exchange(self, slice, rows, input_splits, output_splits, group):
        """Launch an all-to-all of rows; see prepare_all_to_all()."""
        return [self.ops.launch(slice, self.site, prepare_all_to_all(rows, input_splits, output_splits, group))]

    def matmul(self, slice, function, *operands):
        """Return function(*operands), which the trace records as a matmul."""
        with self.ops.trace.span("matmul", slice=slice.index, site=self.site):
            return function(*operands)

    def forward(self, slice, h):
        ops, sublayer = self.ops, self.sublayer
        h = ops.wait(slice, self.site, h)
        routing = self.matmul(slice, self.route, h)
        tokens_per_expert, each = routing.tokens_per_expert.view(self.ep, -1), [1] * self.ep
        flights = self.exchange(slice, tokens_per_expert, each, each, sublayer.counts_group)
        choices = self.router.choices(routing.logits, routing.experts) if slice.training else Flight(None)
        ops.launch(slice, self.site, choices)
        dispatch = Dispatch(routing.permutation, tokens_per_expert, ops.wait(slice, self.site, flights))
        rows = h.flatten(0, 1)[routing.permutation // routing.experts.size(-1)]
        dispatch.read()
        flights = self.exchange(slice, rows, *dispatch.splits, sublayer.group)
        dispatch.sort_rows()
        shared_c = self.matmul(slice, F.linear, h, self.shared[0]) if self.shared else None
        yield from ops.yield_if_in_flight(flights)
        rows = ops.wait(slice, self.site, flights)[dispatch.by_expert]
        del flights                                            # free the rows that were sent
        c = self.matmul(slice, grouped_linear, rows, self.w1, dispatch), shared_c
        activation = self.activate(c)
        yield from ops.yield_if_sharded()
        results = self.matmul(slice, grouped_linear, activation[0], self.w2, dispatch)[dispatch.unsort]
        flights = self.exchange(slice, results, *reversed(dispatch.splits), sublayer.group)
        shared_y = self.matmul(slice, F.linear, activation[1], self.shared[1]) if self.shared else None
        if slice.training:
            self.add_loss(routing, ops.wait(slice, self.site, [choices]))
        tape = MoETape(routing, dispatch, rows, c, c, activation, results=flights[0].tensor)

        def complete(results):
            y = combine(results, dispatch, routing.weights.detach().to(h.dtype))
            return y if shared_y is None else y + shared_y
        return (yield from self.finish_then_reduce(slice, flights, complete)), tape

    def route(self, h) -> Routing:
        """Route h [b, s, h]. add_loss() computes the loss once the sum of the choices has arrived."""
        logits = self.router.logits(h)
        experts, *counted = self.choose(logits)
        with torch.enable_grad():                              # in evaluation too, which shares training's graphs
            logits = logits.detach().requires_grad_()
            return Routing(logits, experts, self.weights(logits, experts), *counted)

    def activate(self, c: tuple) -> tuple:
        """Apply the activation function to the experts' c and, if there is one, to the shared expert's."""
        return tuple(x if x is None else self.activation.function(x) for x in c)

    def add_loss(self, routing: Routing, choices):
        """Compute the loss of the router, and add it and the counts to the statistics."""
        with torch.enable_grad():
            routing.loss = self.loss(routing.logits, choices)
        if self.router.counts_here:
            self.statistics[:-1] += routing.tokens_per_expert
            self.statistics[-1] += routing.loss.detach()

    def finish_then_reduce(self, slice, flights, complete):
        """Return the flights of the sum over tp of complete(tensor). A generator. flights: the all-to-all that delivers
        `tensor`. Without tensor parallelism they are returned, so that the caller yields while they are in flight."""
        ops = self.ops
        if ops.stream.group.size() == 1:
            flights[0].complete = complete
            return flights
        yield from ops.yield_if_in_flight(flights)
        addend = complete(ops.wait(slice, self.site, flights))
        return [ops.launch(slice, self.site, ops.stream.reduce(part.contiguous()))
                for part in ops.column_parts(addend, -1)]

    def restore(self, slice, tape: MoETape, h):
        """Recompute the activations from c, or c from the received rows. No row travels again."""
        yield from ()
        c = tape.column_output
        if c is None:
            h = self.ops.wait(slice, self.site, h)
            shared_c = self.matmul(slice, F.linear, h, self.shared[0]) if self.shared else None
            c = self.matmul(slice, grouped_linear, tape.rows, self.w1, tape.dispatch), shared_c
        tape.column_output, tape.core, tape.activation = None, c, self.activate(c)

    def backward(self, slice, tape: MoETape, grad_y, h):
        ops, group, routing, dispatch = self.ops, self.sublayer.group, tape.routing, tape.dispatch
        grad_y, weights = ops.wait(slice, self.site, grad_y), routing.weights.detach().to(tape.rows.dtype)
        rows = (grad_y.unsqueeze(2) * weights.unsqueeze(-1)).flatten(0, 2)[dispatch.permutation]
        flights = self.exchange(slice, rows, *dispatch.splits, group)
        results = tape.results[dispatch.inverse_permutation].view(*weights.shape, -1)
        grad_weights = torch.einsum("bskh,bsh->bsk", results, grad_y).to(routing.weights.dtype)
        h = ops.wait(slice, self.site, h)
        grad_h = self.router.backward(routing, grad_weights, h, slice.loss_scale)
        matmuls = []
        if self.shared:
            w1, w2 = self.shared
            grad_c = self.activation.backward(self.matmul(slice, F.linear, grad_y, w2.t()), tape.core[1])
            grad_h = grad_h + self.matmul(slice, F.linear, grad_c, w1.t())
            matmuls = [(w2, grad_y, tape.activation[1]), (w1, grad_c, h)]
        yield from ops.yield_if_in_flight(flights)
        grad_out = ops.wait(slice, self.site, flights)[dispatch.by_expert]
        del flights
        gradient = self.matmul(slice, grouped_linear, grad_out, self.w2.transpose(1, 2), dispatch)
        grad_c = self.activation.backward(gradient, tape.core[0])
        yield from ops.yield_if_sharded()
        rows = self.matmul(slice, grouped_linear, grad_c, self.w1.transpose(1, 2), dispatch)[dispatch.unsort]
        flights = self.exchange(slice, rows, *reversed(dispatch.splits), group)
        matmuls += [(ExpertWeight(self.w2, dispatch.ends), grad_out, tape.activation[0]),
                    (ExpertWeight(self.w1, dispatch.ends), grad_c, tape.rows)]

        def complete(rows):
            return grad_h + rows[dispatch.inverse_permutation].view(*weights.shape, -1).sum(dim=2)
        return (yield from self.finish_then_reduce(slice, flights, complete)), matmuls


@dataclass
class ExpertWeight:
    """Stands for the weights of all local experts [experts, out, in] in a list of weight gradients."""
    weight: nn.Parameter
    ends: list[int]                      # see Dispatch

    def add_gradient(self, grad_output, rows):
        """Add grad_output^T rows of each expert to its main_grad. Both are sorted by expert."""
        for start, end, expert in zip([0, *self.ends], self.ends, main_grad_of(self.weight)):
            add_weight_gradient(expert, grad_output[None, start:end], rows[None, start:end])


# The expert bias follows the load of the experts (router.py). Its "gradient" does not belong to the global norm.
SIGN = OptimizerSpec(lambda groups, config, zero: SignUpdate(groups, config.moe_router_bias_update_rate), moments=(),
                     counts_in_norm=False)


def expert_groups(ep: int, rows: dict) -> dict:
    """Return the rows of the groups for experts; see make_mesh(). Neighbours in the dp group share the experts."""
    if ep == 1:
        return {}
    neighbours = [row[i:i + ep] for row in rows["dp"] for i in range(0, len(row), ep)]
    same = [row[i::ep] for row in rows["dp"] for i in range(ep)]
    return {"ep": neighbours, "ep_counts": neighbours, "expert_dp": same}


def report(counts: dict, tokens: int) -> tuple[dict, str]:
    """Return (what metrics.jsonl records, words for the progress line) of a step's statistics: docs/running.md#experts.
    counts: {name of a layer's MoE: [how many tokens chose each expert, .., the sum of the router's losses]}
    tokens: the number of tokens that the step's loss counts"""
    rows = {name.removesuffix(".mlp"): row for name, row in counts.items() if name.endswith(".mlp")}
    if not rows:
        return {}, ""
    loads = {layer: [round(count * len(chosen) / sum(chosen), 4) for count in chosen]
             for layer, (*chosen, _) in rows.items()}
    loss, busiest = sum(row[-1] for row in rows.values()) / (tokens or math.inf), max(map(max, loads.values()))
    return (dict(auxiliary_loss=loss, busiest_expert=busiest, expert_load=loads),
            f" | auxiliary loss {loss:.4f} | busiest expert {busiest:.2f} x")
