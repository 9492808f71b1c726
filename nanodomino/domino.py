"""Hide the communication of tensor parallelism behind the compute of another slice (Domino, 2409.15241, section 3).

Plain tensor parallelism stops at every all-reduce: while the results of the row-parallel matmul are being summed, the
processor waits. But samples do not depend on each other. So cut the microbatch into slices, and compute slice b while
the all-reduce of slice a is in flight:

    one slice     compute  [ A  ]      [ M  ]      [ A  ]      [ M  ]          A, M: attention, MLP
                  in flight      ~~~~~~      ~~~~~~      ~~~~~~      ~~~~~~    ~: an all-reduce

    two slices    compute  [a][b][a][b][a][b][a][b]                            a, b: the slices
                  in flight   ~a~~b~~a~~b~~a~~b~~a~~b~

**Slices are generators.** A slice yields whenever it has launched a collective, and `interleave` resumes the slices in
turn: cooperative multitasking, on one thread. Every rank resumes them in the same order, so every rank launches the
same collectives in the same order. Only this order matches the calls of different ranks: a collective has no
name, so the n-th call on one rank meets the n-th call on the other ranks of its group. If one rank yielded once too
often, its slice a would be added to the other ranks' slice b. With equal shapes all sums would be silently wrong; with
different shapes there would be an error or a hang.

**Backward walks a tape**, because autograd would hide nothing. Of all nodes that are ready, autograd's engine runs the
one that forward recorded last. After it has launched the all-reduce of b's gradient, two nodes are ready: the wait for
this all-reduce, and the compute of slice a. Forward recorded a before b, so the engine runs b's wait first:

    autograd      compute  [Mb]      [Ma]      [Ab]      [Aa]                  Mb: backward of slice b's MLP
                  in flight    ~~b~~~    ~~a~~~    ~~b~~~    ~~a~~~

    Domino        compute  [Ma][Mb][Aa][Ab]
                  in flight    ~a~~~b~~~a~~~b~~

So forward keeps a tape, and backward is a second generator that walks the tape in reverse. Below, x' is the residual
stream after the previous sublayer (x, y, bias: see model.py), and a is the output of the core, not slice a:

    forward of a sublayer                               backward of the same sublayer
      x' = x + dropout(y + bias)                          grad_a = grad_y W2
      h = norm(x')                                        grad_c = core_backward(grad_a)
      c = h W1^T + b1                                     grad_h = grad_c W1  -> launch all-reduce
      a = core(c)                                         weight gradients: grad_y^T a, grad_c^T h
      y = a W2^T  -> launch all-reduce
      yield                  other slices compute         yield                  other slices compute
      wait                                                wait
                                                          grad_x, grad_y = backward of residual + norm

No other rank waits for weight gradients. So backward computes them after it has launched the all-reduce of grad_h,
which they help to hide.

overlap/compute.py computes residual + norm, and everything between h and y, which is the sublayer's *branch*. An option
may give a sublayer another branch. It may also add steps to this picture: gather h before W1, or restore h, c and a in
backward.

**What stays exposed.** When the last slice launches its last all-reduce of a chunk, the other slices have no matmuls
left. In backward, the slice's own weight gradients hide this all-reduce. In forward, nothing hides it: on every
stage but the last, each microbatch exposes one slice's all-reduce. On the last stage only the cross entropy's
all-reduces are exposed, three numbers per token.

Backward has as many collectives as forward but twice the matmuls. So on a slow network, forward waits while backward
could hide still more. A Pair (schedules/definitions.py) combines the two: pipeline.py resumes the forward of one
microbatch and the backward of another in turn, so that each hides the other's collectives, even with a single slice.

With one slice this is Megatron's tensor parallelism: forward blocks, and weight gradients hide backward's all-reduces.
With tp = 1 nothing is ever in flight.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from nanodomino.comm.trace import NO_TRACE
from nanodomino.layers.gradients import add_gradients, add_residual, residual_backward
from nanodomino.overlap.compute import Branch, EmbeddingAndHead, ResidualNorm, bias_and_mask
from nanodomino.overlap.slices import GradientsReady, Slice, SliceOps, TapeEntry

if TYPE_CHECKING:                        # for annotations only: Domino calls the model without knowing it
    from nanodomino.data import Batch
    from nanodomino.model import GPT


def interleave(generators, trace):
    """Resume each generator in turn until all have ended. Yields after every turn except the last, so that pipeline.run
    can interleave two microbatches in the same way."""
    waiting = deque(enumerate(generators))
    while waiting:
        index, generator = waiting.popleft()
        with trace.span("resume", slice=index):
            ended = next(generator, "ended") == "ended"
        if not ended:
            waiting.append((index, generator))
        if waiting:
            yield


@torch.no_grad()
def run_to_end(generator):
    """Resume a generator until it ends; return its result."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


class Domino:
    """Runs the forward and backward of a pipeline stage with interleaved slices. Gradients are added to main_grad.

    Nearly every method is a generator, which yields while a collective is in flight. pipeline.run resumes the forward,
    backward or weight_backward of one microbatch, or of two microbatches in turn. run_to_end() runs one by itself."""

    def __init__(self, model: GPT, slices=1, columns=1, compiled=None, trace=NO_TRACE):
        """Cut each microbatch into `slices` slices, and each matmul with a collective into `columns` parts (slices.py).
        compiled: a function such as torch.compile, which makes a function faster; None: run all functions as they are.
        """
        self.model, self.mesh, self.slices, self.trace = model, model.mesh, slices, trace
        config, fused = model.config, compiled or (lambda function: function)
        self.ops = SliceOps(config.residual_stream(self.mesh), columns, trace, model.statistics_of,
                            always_yields=self.mesh.tp > 1 or not config.sent_by_branches)
        self.residual_norm = ResidualNorm(model.chunks[0].sublayers[0].norm, fused)
        self.ends = EmbeddingAndHead(model, self.ops, self.residual_norm, compiled if config.fuses else None)
        self.tape_policy = config.tape_policy(self.mesh.device, slices, self.residual_norm)
        self.behind_head = config.behind_head.runner(self)
        self.message_buffers = {}                              # see pipeline.P2PCommunicator
        self.branches = {chunk: [config.branch(sublayer, layer.number, self.mesh, self.ops, fused)
                                 for layer in chunk.layers for sublayer in layer.children()]
                         for chunk in [*model.chunks, *model.chunks_behind_head]}

    # ---- called by pipeline.py for each microbatch

    def forward(self, batch: Batch, hidden=None, training=True, chunk=0):
        """Run one microbatch through a chunk of this stage.

        hidden: hidden states [b, s, h] from the previous chunk; None for the first chunk
        training: if False, nothing is dropped and no tape is kept

        Returns (output, slices). output: hidden states [b, s, h], or from the last chunk the loss of each token [b, s].
        slices: the tape, for backward(). If the stream is sharded, all hidden states are [b, s/t, h].
        """
        count = min(self.slices, len(batch.sample_ids))
        hiddens = [None] * count if hidden is None else hidden.tensor_split(count)
        slices = []
        for index, (samples, hidden) in enumerate(zip(batch.split(count), hiddens)):
            masks_and_positions = self.model.masks_and_positions(
                samples.sample_ids if training else None, None if samples.in_order else samples.positions,
                samples.extras, self.tape_policy.keeps_masks, self.ops.stream)
            slices.append(Slice(index, self.model.chunks[chunk], samples, hidden, masks_and_positions, training))
        yield from interleave([self.staggered(slice, self.forward_slice(slice)) for slice in slices], self.trace)
        return slices[0].output if count == 1 else torch.cat([slice.output for slice in slices]), slices

    def backward(self, slices, gradient, on_gradients_ready=None, defer_weights=False, loss_scale=1.0):
        """Turn the gradient of forward's output into the gradient of `hidden` (None for the model's first chunk).

        slices: the tape that forward() returned
        on_gradients_ready: a function that is called with modules as soon as their gradients contain all slices, so
            that the replicas can reduce these gradients during the rest of backward
        defer_weights: leave the weight gradients to weight_backward(), except the gradient of the head, because
            deferring it would keep the logits in memory
        loss_scale: the scale that `gradient` contains
        """
        for slice in slices:
            slice.deferred, slice.loss_scale = [] if defer_weights else None, loss_scale
        results, ready = [None] * len(slices), GradientsReady(len(slices), on_gradients_ready)
        gradients = gradient.tensor_split(len(slices))
        yield from interleave([self.staggered(slice, self.backward_slice(slice, gradients[slice.index], results, ready))
                               for slice in slices], self.trace)
        if defer_weights:
            for slice in slices:                               # free what weight_backward does not need
                slice.batch = slice.masks_and_positions = slice.output = None
        if slices[0].chunk.pre_process:
            return None
        return results[0] if len(results) == 1 else torch.cat(results)

    def weight_backward(self, slices, on_gradients_ready=None):
        """Compute the weight gradients that backward() deferred."""
        yield from ()                                          # pipeline.run expects a generator
        ready = GradientsReady(len(slices), on_gradients_ready)
        while slices[0].deferred:
            for slice in slices:
                site, matmuls, modules = slice.deferred.pop(0)         # pop, to free the tensors after use
                self.ops.weight_gradients(slice, site, matmuls)
                ready(*modules)

    def staggered(self, slice, generator):
        """Run the slice's generator. If the stream is sharded, let `slice.index` turns pass first, so that each slice
        starts one turn after the previous slice: then the gather of one is hidden by the other's matmul."""
        for _ in range(slice.index):
            yield from self.ops.yield_if_sharded()
        yield from generator

    # ---- forward

    def forward_slice(self, slice: Slice):
        """Run one slice through its chunk. x is the residual stream; y is the output of the branch `previous`, which
        the next residual + norm adds to x."""
        x, y, previous = slice.hidden, None, None
        slice.hidden = None                                    # so that only the tape keeps this tensor
        if slice.chunk.pre_process:
            x = yield from self.ends.embed(slice)
        for branch in self.branches[slice.chunk]:
            x, y = yield from self.forward_sublayer(slice, branch, x, y, previous)
            previous = branch
        if slice.chunk.post_process:
            slice.output, slice.head = yield from self.ends.head(slice, x, y, previous)
            yield from self.behind_head.forward(slice)
        else:
            slice.output = add_residual(x, y, *bias_and_mask(slice, previous, y))

    def forward_sublayer(self, slice: Slice, branch: Branch, x, y, previous: Branch | None):
        """Turn x, y of the previous sublayer into x, y of this sublayer: residual + norm, gather, branch, reduce."""
        h, norm = self.residual_norm.forward(slice, x, y, previous, branch.norm_weights)
        h = branch.keep(h)
        flights = self.ops.gather(slice, branch.site, h)
        yield from self.ops.yield_if_in_flight(flights)
        flights, branch_tape = yield from branch.forward(slice, flights)
        if slice.training:
            slice.tape.append(self.tape_policy.keep(TapeEntry(branch, norm, h, branch_tape)))
        del h, branch_tape                                     # free both now, unless the tape keeps them
        return norm.x, (yield from self.ops.yield_then_wait(slice, branch.site, flights))

    # ---- backward

    def backward_slice(self, slice: Slice, gradient, results, ready):
        """Walk the tape in reverse and free each entry after use. Put the gradient of `hidden` into `results`."""
        if slice.chunk.post_process:
            grad_x = yield from self.behind_head.backward(slice, ready)
            grad_x, grad_y = yield from self.backward_head(slice, grad_x, gradient, ready)
        else:
            self.start_restore(slice)
            bias, mask = bias_and_mask(slice, self.branches[slice.chunk][-1], gradient)
            grad_x, grad_y, grad_bias = residual_backward(gradient, mask, bias is not None)
            add_gradients([bias], [grad_bias])
            yield from self.ops.yield_if_in_flight(slice.tape[-1].h_flights)
            yield from self.finish_restore(slice)
        while slice.tape:
            grad_x, grad_y = yield from self.backward_sublayer(slice, slice.tape.pop(), grad_x, grad_y, ready)
        if slice.chunk.pre_process:
            yield from self.ends.embed_backward(slice, grad_x)
            ready(*slice.chunk.parts["embedding"])
        results[slice.index] = grad_x

    def backward_sublayer(self, slice, entry: TapeEntry, grad_x, grad_y, ready):
        """Turn the gradients of this sublayer's x' and y into the gradients of the previous sublayer's x and y.

        y is a sum over the ranks, so each rank's addend has the gradient grad_y, without an all-reduce. Every rank used
        h for its own features, so grad_h is the sum of all ranks' gradients of h.
        """
        branch, norm, flights = entry.branch, entry.norm, self.ops.gather(slice, entry.branch.site, grad_y)
        yield from self.ops.yield_if_in_flight(flights)
        flights, matmuls = yield from branch.backward(slice, entry.branch_tape, flights, entry.h_flights)
        del entry                                              # free what the weight gradients do not need
        overlapped, deferred = (matmuls, []) if slice.deferred is None else ([], matmuls)
        grad_h = yield from self.wait_for_sum(slice, branch.site, flights, overlapped)
        grad_x, grad_y = self.residual_norm.backward(slice, norm, grad_x, grad_h)
        part = slice.chunk.parts[branch.site]
        if deferred:
            slice.deferred.append((branch.site, deferred, part))
        else:
            ready(*part)
        return grad_x, grad_y

    def backward_head(self, slice, grad_x, gradient, ready):
        """Turn the gradient of the losses [b, s] into the gradients of the last sublayer's x and y. grad_x: the
        gradient of x' from what an option runs behind the head, or None"""
        flights, matmuls = self.ends.head_backward(slice, slice.head, gradient)
        norm, slice.head = slice.head.norm, None
        grad_h = yield from self.wait_for_sum(slice, "head", flights, matmuls)
        grad_x, grad_y = self.residual_norm.backward(slice, norm, grad_x, grad_h)
        ready(*slice.chunk.parts["head"])
        return grad_x, grad_y

    def wait_for_sum(self, slice, site, flights, weight_gradients):
        """Wait for `flights` and return their tensor. In the meantime, run what does not need this tensor: weight
        gradients, the other slices, and what restores the previous sublayer."""
        if len(weight_gradients) > 1:   # with one hardware queue, the gather below blocks matmuls until the reduce ends
            self.ops.weight_gradients(slice, site, [weight_gradients.pop(0)])
        self.start_restore(slice)
        self.ops.weight_gradients(slice, site, weight_gradients)
        yield from self.ops.yield_once(flights)
        yield from self.finish_restore(slice)
        return self.ops.wait(slice, site, flights)

    def start_restore(self, slice):
        """Start to restore h [b, s, h] of the last tape entry, because backward needs this entry next: get h as the
        tape policy kept it, and gather the other ranks' rows."""
        if slice.tape:
            entry, h = slice.tape[-1], self.tape_policy.bring_back_h(slice.tape)
            entry.h_flights, entry.h = self.ops.gather(slice, entry.branch.site, entry.branch.keep(h)), None

    def finish_restore(self, slice):
        """Restore the tensors that forward dropped from the branch of the last tape entry."""
        if slice.tape and self.tape_policy.restores:
            entry = slice.tape[-1]
            yield from entry.branch.restore(slice, entry.branch_tape, entry.h_flights)
