"""Hide the communication of tensor parallelism behind the compute of another slice (Domino, 2409.15241, section 3).

Tensor parallelism stops at every all-reduce: the row-parallel matmul is done, its sum is in flight, and the processor
waits. But samples do not depend on each other. Cut the microbatch into slices, and compute slice 1 while the all-reduce
of slice 0 is in flight:

    one slice     compute  [ A  ]      [ M  ]      [ A  ]      [ M  ]          A, M: attention, MLP
                  in flight      ~~~~~~      ~~~~~~      ~~~~~~      ~~~~~~

    two slices    compute  [a][b][a][b][a][b][a][b]                            a, b: the slices
                  in flight   ~a~~b~~a~~b~~a~~b~~a~~b~

**Slices are generators.** A slice yields whenever it has launched a collective, and `interleave` resumes the slices in
turn: cooperative multitasking, on one thread. Every rank resumes them in the same order, so every rank launches the
same collectives in the same order. Only this order says which calls belong together: a collective has no name, and the
n-th call on one rank meets the n-th call on the other ranks of its group. If one rank yielded once too often, its slice
a would be added to the other ranks' slice b. The sums would be silently wrong or, if the shapes differ, there would be
an error or a hang.

**Backward walks a tape.** It cannot be left to autograd. Of all nodes that are ready, autograd's engine takes the one
that forward recorded last. Once b's gradient is in flight, two nodes are ready: the wait for it, and a's compute.
Forward recorded a's compute first, so the engine takes the wait, and nothing is hidden:

    autograd      compute  [Mb]      [Ma]      [Ab]      [Aa]                  A, M of slices a, b: their backward
                  in flight     ~~b~~~    ~~a~~~    ~~b~~~    ~~a~~~

    here          compute  [Ma][Mb][Aa][Ab]
                  in flight    ~a~~~b~~~a~~~b~

So forward keeps a tape, and backward is a second generator that walks it. (From here on, a is the output of the core,
not slice a.)

    forward, each sublayer                              backward, the same sublayer
      h = norm(x'), x' = x + dropout(y + bias)            grad_a = grad_y W2
      c = h W1^T + b1                                     grad_c = core_backward(grad_a)
      a = core(c)                                         grad_h = grad_c W1  -> launch all-reduce
      y = a W2^T  -> launch all-reduce                    weight gradients grad_y^T a, grad_c^T h: hide it too
      yield                  other slices compute         yield                  other slices compute
      wait                                                wait
                                                          grad_x, grad_y = backward of residual + norm

A residual + norm belongs to two sublayers: it adds the output of the previous one and normalizes the input of the next
(residual_norm.py). Everything between h and y is the sublayer's *inside* (layers/sublayer_inside.py); this file only
knows norms, collectives and turns. Weight gradients are deferred until the input gradient's all-reduce is in flight,
because no other rank waits for them.

**What stays exposed.** When the last slice launches the all-reduce of a chunk's last sublayer, the other slices have no
matmuls left. In backward, the slice's own weight gradients hide this all-reduce. In forward, nothing hides it: on every
stage but the last, each microbatch exposes one slice's all-reduce. On the last stage only the cross entropy's
all-reduces are exposed, three numbers per token.

Backward has as many collectives as forward but twice the matmuls. So where communication is slow, backward still has
compute to spare while forward already waits. If one loop resumes the backward of one microbatch and the forward of
another in turn, each hides the other's collectives, even with a single slice (a Pair: schedules/definitions.py,
pipeline.py).

With one slice this is Megatron's tensor parallelism: forward blocks, and weight gradients hide backward's all-reduces.
With tp = 1 nothing is in flight and nothing waits.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import torch

from nanodomino.comm.trace import NO_TRACE
from nanodomino.layers.dropout_and_positions import MasksAndPositions, add_residual
from nanodomino.layers.main_grad import add_gradients
from nanodomino.overlap.embedding_and_head import EmbeddingAndHead, HeadTape
from nanodomino.overlap.recompute import TapeEntry, TapePolicy
from nanodomino.overlap.residual_norm import ResidualNorm, bias_and_mask, residual_backward
from nanodomino.overlap.sequence_parallel import residual_stream
from nanodomino.overlap.slice_ops import SliceOps


def interleave(generators, trace):
    """Resume each generator in turn until all have ended. Yields after each turn but the last."""
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


class SublayerParts:
    """Holds, as plain attributes, the parts of a sublayer that a slice uses. Looking them up in the Module would take a
    tenth of the host's time."""

    def __init__(self, sublayer):
        self.sublayer, self.site, self.inside = sublayer, sublayer.site, sublayer.inside()
        self.norm_weights, self.output_bias = sublayer.norm.weights, self.inside.output_bias


@dataclass(eq=False)
class Slice:
    """Holds some samples of a microbatch in one chunk of the stage: input, tape, output. If the residual stream is
    sharded (sequence_parallel.py), hidden states are this rank's rows [b, s/t, h]."""
    index: int
    chunk: object                                      # model.Chunk
    batch: object                                      # data.Batch
    hidden: torch.Tensor | None                        # [b, s, h] from the previous chunk; None on the first
    masks_and_positions: MasksAndPositions
    training: bool
    tape: list[TapeEntry] = field(default_factory=list)
    head: HeadTape | None = None
    output: torch.Tensor | None = None                 # hidden states [b, s, h]; at the model's end the loss [b, s]
    deferred: list | None = None                       # (site, matmuls, modules) that weight_backward will run


class GradientsReady:
    """Calls on_gradients_ready(modules), if there is one, once every slice has added its gradients of the modules."""

    def __init__(self, slices: int, on_gradients_ready):
        self.slices, self.on_gradients_ready, self.remaining = slices, on_gradients_ready, {}

    def __call__(self, *modules):
        self.remaining[modules] = self.remaining.get(modules, self.slices) - 1
        if self.on_gradients_ready and self.remaining[modules] == 0:
            self.on_gradients_ready(modules)


class Domino:
    """Runs a pipeline stage of a GPT forward and backward, its slices interleaved. Gradients are added to main_grad.

    Nearly every method is a generator. pipeline.run resumes the forward, backward or weight_backward of one microbatch,
    or of two in turn. run_to_end() runs a single generator to its end.
    """

    def __init__(self, model, slices=1, columns=1, compile_backend=None, trace=NO_TRACE):
        """Cut each microbatch into `slices`, and each communicated matmul into `columns` (slice_ops.py)."""
        self.model, self.mesh, self.slices, self.trace = model, model.mesh, slices, trace
        compiled = partial(torch.compile, backend=compile_backend) if compile_backend else None
        self.ops = SliceOps(residual_stream(model.config, self.mesh), columns, trace)
        self.residual_norm = ResidualNorm(model.chunks[0].sublayers[0].norm, compiled or (lambda function: function))
        self.ends = EmbeddingAndHead(model, self.ops, self.residual_norm, compiled)
        self.tape_policy = TapePolicy(model.config, self.mesh.device, slices, self.residual_norm)
        self.steps = {chunk: [SublayerParts(sublayer) for sublayer in chunk.sublayers] for chunk in model.chunks}

    # ---- the stage, as the pipeline sees it

    def forward(self, batch, hidden=None, training=True, chunk=0):
        """Run one microbatch (data.Batch) through a chunk of this stage.

        hidden: [b, s, h] from the previous chunk, None on the first; with a sharded stream [b, s/t, h], like the
        hidden states that are returned. training=False: no tape, no dropout.
        Returns (output, tape). output: hidden states [b, s, h], or at the model's end the loss of each token [b, s].
        tape: what backward() takes as `slices`.
        """
        count = min(self.slices, len(batch.sample_ids))
        hiddens = [None] * count if hidden is None else hidden.tensor_split(count)
        slices = [Slice(index, self.model.chunks[chunk], samples, hidden, self.masks_and_positions(samples, training),
                        training) for index, (samples, hidden) in enumerate(zip(batch.split(count), hiddens))]
        yield from interleave([self.staggered(slice, self.forward_slice(slice)) for slice in slices], self.trace)
        return slices[0].output if count == 1 else torch.cat([slice.output for slice in slices]), slices

    def masks_and_positions(self, batch, training):
        """Return the masks and positions for a slice's samples."""
        return MasksAndPositions(self.model.config, self.mesh, batch.sample_ids if training else None,
                            self.tape_policy.keeps_masks, self.ops.stream,
                            None if batch.in_order else batch.positions, batch.documents)

    def backward(self, slices, gradient, on_gradients_ready=None, defer_weights=False):
        """Turn the gradient of forward's output into the gradient of `hidden` (None if the chunk starts the model).

        on_gradients_ready(modules) is called when no slice of this microbatch will add to the gradients of `modules`
        any more, so that their reduce over the replicas can overlap the rest of backward.
        defer_weights: leave weight gradients to weight_backward(), except the head's: deferring that one would keep the
        logits in memory.
        """
        for slice in slices:
            slice.deferred = [] if defer_weights else None
        results, ready = [None] * len(slices), GradientsReady(len(slices), on_gradients_ready)
        gradients = gradient.tensor_split(len(slices))
        yield from interleave([self.staggered(slice, self.backward_slice(slice, gradients[slice.index], results, ready))
                               for slice in slices], self.trace)
        if defer_weights:
            for slice in slices:                               # weight_backward needs nothing else
                slice.batch = slice.masks_and_positions = slice.output = None
        if slices[0].chunk.pre_process:
            return None
        return results[0] if len(results) == 1 else torch.cat(results)

    def weight_backward(self, slices, on_gradients_ready=None):
        """Compute the deferred weight gradients. Never yields, but pipeline.run expects a generator."""
        ready = GradientsReady(len(slices), on_gradients_ready)
        while slices[0].deferred:
            for slice in slices:
                site, matmuls, modules = slice.deferred.pop(0)         # its tensors are freed with it
                self.ops.weight_gradients(slice, site, matmuls)
                ready(*modules)
        return
        yield

    def staggered(self, slice, generator):
        """Run the slice's generator. If the stream is sharded, first let `slice.index` turns pass, so that each slice
        starts one turn after the previous one (sequence_parallel.py says why)."""
        for _ in range(slice.index):
            yield from self.ops.yield_if_sharded()
        yield from generator

    # ---- forward

    def forward_slice(self, slice: Slice):
        """Run one slice through its chunk."""
        x, y, previous = slice.hidden, None, None
        slice.hidden = None                                    # from here on only the tape keeps it
        if slice.chunk.pre_process:
            x = yield from self.ends.embed(slice)
        for step in self.steps[slice.chunk]:
            x, y = yield from self.forward_sublayer(slice, step, x, y, previous)
            previous = step
        if slice.chunk.post_process:
            slice.output, slice.head = yield from self.ends.head(slice, x, y, previous)
        else:
            slice.output = add_residual(x, y, *bias_and_mask(slice, previous, y))
        if not slice.training:
            slice.head = None

    def forward_sublayer(self, slice, step, x, y, previous):
        """Turn x, y of the previous sublayer into x, y of this one: residual + norm, gather, inside, reduce."""
        h, norm = self.residual_norm.forward(slice, x, y, previous, step.norm_weights)
        flights = self.ops.gather(slice, step.site, h)
        yield from self.ops.yield_if_in_flight(flights)
        flights, inside = yield from step.inside.forward(self.ops, slice, flights)
        if slice.training:
            slice.tape.append(self.tape_policy.keep(TapeEntry(step, norm, h, inside)))
        del h, inside                                          # freed now, unless the tape keeps them
        return norm.x, (yield from self.ops.yield_then_wait(slice, step.site, flights))

    # ---- backward

    def backward_slice(self, slice: Slice, gradient, results, ready):
        """Walk the tape in reverse. Each entry is freed as soon as it is used."""
        if slice.chunk.post_process:
            grad_x, grad_y = yield from self.backward_head(slice, gradient, ready)
        else:
            self.start_restore(slice)
            bias, mask = bias_and_mask(slice, self.steps[slice.chunk][-1], gradient)
            grad_x, grad_y, grad_bias = residual_backward(gradient, mask, bias is not None)
            add_gradients([bias], [grad_bias])
            yield from self.ops.yield_if_in_flight(slice.tape[-1].h_flights)
            yield from self.finish_restore(slice)
        while slice.tape:
            grad_x, grad_y = yield from self.backward_sublayer(slice, slice.tape.pop(), grad_x, grad_y, ready)
        if slice.chunk.pre_process:
            yield from self.ends.embed_backward(slice, grad_x)
            ready(self.model.embedding)
        results[slice.index] = grad_x

    def backward_sublayer(self, slice, entry, grad_x, grad_y, ready):
        """Turn the gradients of this sublayer's x' and y into the gradients of the previous sublayer's x and y.

        y is a sum over ranks, and the gradient of a sum is the gradient of each addend: no all-reduce. Every rank used
        h, so the gradient of h is the sum over the ranks.
        """
        step, norm, flights = entry.step, entry.norm, self.ops.gather(slice, entry.step.site, grad_y)
        yield from self.ops.yield_if_in_flight(flights)
        flights, matmuls = yield from step.inside.backward(self.ops, slice, entry.inside, flights, entry.h_flights)
        del entry                                              # frees what the weight gradients do not need
        overlapped, deferred = (matmuls, []) if slice.deferred is None else ([], matmuls)
        grad_h = yield from self.wait_for_sum(slice, step.site, flights, overlapped)
        grad_x, grad_y = self.residual_norm.backward(slice, norm, grad_x, grad_h)
        if deferred:
            slice.deferred.append((step.site, deferred, (step.sublayer,)))
        else:
            ready(step.sublayer)
        return grad_x, grad_y

    def backward_head(self, slice, gradient, ready):
        """Turn the gradient of the losses [b, s] into the gradients of the last sublayer's x and y."""
        model, (vocabulary,) = self.model, self.model.head
        flights, matmuls = self.ends.head_backward(slice, slice.head, gradient)
        norm, slice.head = slice.head.norm, None
        grad_h = yield from self.wait_for_sum(slice, "head", flights, matmuls)
        grad_x, grad_y = self.residual_norm.backward(slice, norm, None, grad_h)
        tied_here = model.config.tied and model.pre_process    # then the embedding will add to the same matrix
        ready(model.final_norm, *([] if tied_here else [vocabulary]))
        return grad_x, grad_y

    def wait_for_sum(self, slice, site, flights, weight_gradients):
        """Return the tensor of `flights`. While it is in flight, run what does not need it: weight gradients, the other
        slices, and the recomputation of the sublayer below."""
        self.start_restore(slice)
        self.ops.weight_gradients(slice, site, weight_gradients)
        yield
        yield from self.finish_restore(slice)
        return self.ops.wait(slice, site, flights)

    def start_restore(self, slice):
        """Start to restore all rows of h of the last tape entry. Depending on the options this fetches x from the host,
        recomputes the norm, and gathers the other ranks' rows."""
        if slice.tape:
            entry, h = slice.tape[-1], self.tape_policy.bring_back_h(slice.tape)
            entry.h_flights, entry.h = self.ops.gather(slice, entry.step.site, h), None

    def finish_restore(self, slice):
        """Recompute the tensors that the inside of the last tape entry has dropped."""
        if slice.tape and self.tape_policy.recomputes:
            entry = slice.tape[-1]
            yield from entry.step.inside.restore(self.ops, slice, entry.inside, entry.h_flights)
