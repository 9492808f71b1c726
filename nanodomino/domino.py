"""Hide tensor parallelism's wires behind another slice's work (Domino, 2409.15241, section 3).

Tensor parallelism stops at every sum: the row-parallel matmul is done, its all-reduce travels, the processor waits.
But samples do not depend on each other. Cut the microbatch into slices, and while slice 0's sum travels compute
slice 1:

    one slice     compute  [ A  ]      [ M  ]      [ A  ]      [ M  ]          A, M: attention, MLP
                  wires          ~~~~~~      ~~~~~~      ~~~~~~      ~~~~~~

    two slices    compute  [a][b][a][b][a][b][a][b]                            a, b: the slices
                  wires       ~a~~b~~a~~b~~a~~b~~a~~b~

This is cooperative multitasking. A slice is a Python generator that *yields whenever it has put something on the
wires*, and `interleave` resumes them in turn. Every rank resumes in the same order, so every rank issues the same
collectives in the same order: no tags, no locks, no races. That order is all there is, for a collective has no name:
the n-th of one rank meets the n-th of the others in its group. With one yield too many on one rank, its slice a is
added to the others' slice b: wrong sums without a word, or, where shapes differ, an error or a hang.

Backward cannot be left to autograd. Of the nodes that are ready, its engine takes the one that was recorded last (the
highest sequence number). Once b's gradient is on the wires, ready are the wait for it and the work of a; the forward
had recorded that work first, so the wait is taken, and nothing is hidden:

    autograd      compute  [Mb]      [Ma]      [Ab]      [Aa]                  A, M of slices a, b: their backward
                  wires        ~~b~~~    ~~a~~~    ~~b~~~    ~~a~~~

    here          compute  [Ma][Mb][Aa][Ab]
                  wires        ~a~~~b~~~a~~~b~

So the forward keeps a tape, and backward is a second generator that walks it:

    forward, each sublayer                              backward, the same sublayer
      x, h = bridge(x, y)                                 g_a = g_y W2
      c = h W1^T + b1                                     g_c = core_backward(g_a)
      a = core(c)                                         g_h = g_c W1     -> all-reduce starts
      y = a W2^T  -> all-reduce starts                    weight gradients g_y^T a, g_c^T h, ...: more cover
      yield                     others compute            yield            others compute
      wait                                                wait
                                                          g_x, g_y = bridge_backward(g_x, g_h)

Every step of it is written out, but for attention's core (tape.py) and what was not kept and is computed again first
(recompute.py). Weight gradients are deferred until the input gradient's reduce is under way: nothing waits for them.
The last slice's last sum finds the others without products: backward its own weight gradients cover it, forward nothing
does. So in a microbatch's forward one slice's sum of a sublayer is exposed on every stage but the last, whose last sum
is the cross entropy's two numbers a token.

Backward has as many sums as forward, and twice its products: one of them is bound by its work, the other by the wires.
Resumed in one loop, the backward of one microbatch and the forward of another hide each other's, also where there is
one slice (a pair: schedules.py, pipeline.py).

The column split (section 3.3) works within a slice, also at batch 1: the output features of the row-parallel product,
and of the column-parallel input gradient, in chunks, each chunk's reduce under way while the next is computed.

Where the stream is cut along its tokens (sequence parallelism, stream.py), h is gathered before the first product and
y scattered behind the second, backward likewise: a yield each. The slices start a turn apart, and take one between the
products, so that one computes while another's travel.

With one slice this is Megatron's tensor parallelism: forward it blocks, backward the weight gradients are its cover.
With tp = 1 there are no wires, and nothing ever waits.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanodomino.comm.trace import NO_TRACE
from nanodomino.data import Batch
from nanodomino.layers.cross_entropy import (cross_entropy, cross_entropy_gradient, exponentials_of_rows, in_chunks,
                                             maximum_and_sum, maximum_and_sum_of_rows, parts_of_loss)
from nanodomino.layers.main_grad import add_gradients, add_weight_gradient, main_grad_of, wide
from nanodomino.layers.masks_and_positions import MasksAndPositions
from nanodomino.layers.sublayer import Sublayer, add_residual, drop
from nanodomino.model import Chunk
from nanodomino.overlap.recompute import Link, TapePolicy
from nanodomino.overlap.residual_norm import Bridge, add_residual_backward, bridge, bridge_backward
from nanodomino.overlap.sequence_parallel import Flight, all_reduce, stream_of


def interleave(generators, trace):
    """Generator: resumes each in turn until all have ended, and yields while there is more to do."""
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
def run_alone(generator):
    """Resume it until it has ended; what it returns."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


class Step:
    """A sublayer, with what each slice looks up in it: a Module's attributes would take a tenth of the host's time."""

    def __init__(self, sublayer: Sublayer):
        self.sublayer, self.site, self.norm = sublayer, sublayer.site, sublayer.norm.weights
        self.core_forward, self.core_backward = sublayer.core_forward, sublayer.core_backward
        self.column, self.column_bias = sublayer.column.weight, sublayer.column.bias       # [out/t, h], [out/t]
        self.row, self.row_bias = sublayer.row.weight, sublayer.row.bias                   # [h, in/t], [h]


@dataclass
class Slice:
    """Some samples of a microbatch on their way through a chunk of the stage: inputs, tape, output."""
    index: int
    chunk: Chunk
    batch: Batch
    hidden: torch.Tensor | None                        # [b, s, h] from the layers before; of a stream that is cut,
                                                       # here and below, this rank's rows [b, s/t, h]
    around: MasksAndPositions
    training: bool
    links: list[Link] = field(default_factory=list)
    exit: Bridge | None = None                         # into the head
    head_input: torch.Tensor | None = None             # [b, s, h], all rows: small beside the logits
    logits: torch.Tensor | None = None                 # [b, s, width]
    maximum: torch.Tensor | None = None                # [b, s], of them, over all ranks
    sums: torch.Tensor | None = None                   # [2, b, s], see cross entropy in parallel.py
    output: torch.Tensor | None = None                 # loss [b, s] at the model's end, else hidden [b, s, h]
    later: list | None = None                          # (site, products, modules) that weight_backward is to do

    def keep_what_is_left(self):
        """After backward: what weight_backward is to do, and nothing else."""
        self.batch = self.around = self.maximum = self.sums = self.output = None


class Tally:
    """Tells on_gradients_ready, where there is one, of modules that all slices are through with."""

    def __init__(self, slices: int, on_gradients_ready):
        self.slices, self.on_gradients_ready, self.left = slices, on_gradients_ready, {}

    def __call__(self, *modules):
        self.left[modules] = self.left.get(modules, self.slices) - 1
        if self.on_gradients_ready and self.left[modules] == 0:
            self.on_gradients_ready(modules)


class Domino:
    """Runs a GPT stage forward and backward, slice beside slice. Gradients are added to each parameter's main_grad.

    forward, backward and weight_backward are generators as the slices are: pipeline.run resumes those of one microbatch
    or of two; run_alone() drives one to its end.
    """

    def __init__(self, model, slices=1, columns=1, compile_backend=None, trace=NO_TRACE):
        self.model, self.mesh, self.trace = model, model.mesh, trace
        self.stream = stream_of(model.config, self.mesh)
        self.slices, self.columns = slices, columns
        self.tapes = TapePolicy(model.config, self.mesh.device, slices)
        self.steps = {chunk: [Step(sublayer) for sublayer in chunk.sublayers] for chunk in model.chunks}
        compiled = partial(torch.compile, backend=compile_backend) if compile_backend else lambda function: function
        norm = model.chunks[0].sublayers[0].norm                                                   # all are alike
        kind, epsilon, narrow = norm.normalization, norm.epsilon, model.config.fp16_lm_cross_entropy
        # lambdas: the compiler, which keeps few versions of a function, takes all of functools.partial for one
        self.bridge = compiled(lambda *inputs: bridge(*inputs, epsilon, kind))
        self.bridge_backward = compiled(lambda *inputs: bridge_backward(*inputs, kind))
        # fused by a compiler, no temporary is as large as the logits; else it is cut
        self.maximum_and_sum_of_rows, self.exponentials_of_rows = map(compiled if compile_backend else in_chunks, (
            lambda *rows: maximum_and_sum_of_rows(*rows, narrow), lambda *rows: exponentials_of_rows(*rows, narrow)))

    # ---- the stage, as the pipeline sees it

    def forward(self, batch: Batch, hidden=None, training=True, chunk=0):
        """Generator: one microbatch through a chunk. hidden: [b, s, h] from the layers before, None on the first.

        Returns (output, tape): hidden states [b, s, h] (of a stream that is cut, this rank's part), or at the model's
        end the loss of each token [b, s]; and what backward() takes. With training=False no tape is kept and nothing is
        dropped.
        """
        count = min(self.slices, len(batch.sample_ids))
        hiddens = [None] * count if hidden is None else hidden.tensor_split(count)
        pieces = [Slice(index, self.model.chunks[chunk], part, hiddens[index], self.around(part, training), training)
                  for index, part in enumerate(batch.split(count))]
        yield from interleave([self.in_turn(piece, self.forward_slice(piece)) for piece in pieces], self.trace)
        output = pieces[0].output if count == 1 else torch.cat([piece.output for piece in pieces])
        return output, pieces

    def around(self, part: Batch, training):
        """What the sublayers are told of a slice's samples."""
        return MasksAndPositions(self.model.config, self.mesh, part.sample_ids if training else None,
                                 self.tapes.keeps_masks, self.stream, None if part.in_order else part.positions,
                                 part.documents)

    def backward(self, pieces, gradient, on_gradients_ready=None, later=False):
        """Generator. gradient: of forward's output. Returns the gradient of `hidden` (None at the model's beginning).

        on_gradients_ready(modules) is called when no slice of this microbatch will add to the gradients of these
        modules any more; so their reduce over replicas can start behind the rest of backward.
        later: weight gradients are left to weight_backward(), but the head's, which would keep the logits.
        """
        for piece in pieces:
            piece.later = [] if later else None
        results, tally = [None] * len(pieces), Tally(len(pieces), on_gradients_ready)
        gradients = gradient.tensor_split(len(pieces))
        yield from interleave([self.in_turn(piece, self.backward_slice(piece, gradients[piece.index], results, tally))
                               for piece in pieces], self.trace)
        if later:
            for piece in pieces:
                piece.keep_what_is_left()
        if pieces[0].chunk.pre_process:
            return None
        return results[0] if len(results) == 1 else torch.cat(results)

    def weight_backward(self, pieces, on_gradients_ready=None):
        """Generator, since all that the pipeline resumes are; nothing goes on the wires.
        on_gradients_ready: as in backward()."""
        tally = Tally(len(pieces), on_gradients_ready)
        while pieces[0].later:
            for piece in pieces:
                site, products, modules = piece.later.pop(0)   # what is done with goes
                self.weight_gradients(piece, site, products)
                tally(*modules)
        return
        yield

    def in_turn(self, piece, generator):
        """Generator: where there are wires before the products and behind them, each slice comes a turn after the one
        before: while one waits for the first, another has work, and a third's travel behind that."""
        for _ in range(piece.index):
            yield from self.turn()
        yield from generator

    def turn(self):
        """Generator: let the others compute where the stream is cut, though nothing is under way: else two slices would
        keep in step, both be between products at once, and what leaves there have nothing to hide behind."""
        if self.stream.parts > 1:
            yield

    # ---- forward

    def forward_slice(self, piece: Slice):
        """Generator: one slice through its chunk; yields when it has put something on the wires."""
        model, chunk, x, y, before = self.model, piece.chunk, piece.hidden, None, None
        piece.hidden = None                                    # the tape keeps it, if anybody does
        if chunk.pre_process:
            words = yield from self.until_there(piece, "embedding", [self.launch(piece, "embedding", self.stream.join(
                model.embedding.word_embeddings.partial_embeddings(piece.batch.tokens)))])
            x = model.embedding.add_positions(words, self.stream.own(piece.batch.positions),
                                              piece.around.hidden_dropout_mask("embedding", words))
        for step in self.steps[chunk]:
            x, y = yield from self.forward_sublayer(piece, step, x, y, before)
            before = step
        if chunk.post_process:
            yield from self.forward_head(piece, x, y, before)
        else:
            piece.output = add_residual(x, y, *self.closing(piece, before, y))
        if not piece.training:
            piece.exit = piece.head_input = piece.logits = None

    def closing(self, piece, before, like):
        """(bias, mask) of the sublayer that a bridge closes: None, None at a stage's start."""
        if before is None:
            return None, None
        return before.row_bias, piece.around.hidden_dropout_mask(before.site + ".hidden", like)

    def open(self, piece, x, y, before, norm):
        """The bridge into what opens with a norm of these weights: (h, what backward needs)."""
        x, h, *statistics = self.bridge(x, y, *self.closing(piece, before, y), *norm)
        return h, Bridge(norm, before, x, statistics)

    def core(self, piece, step, c):
        """(the activation, what the core keeps)."""
        return step.core_forward(c, piece.around.attention_inputs(step.sublayer, c), piece.training)

    def forward_sublayer(self, piece, step, x, y, before):
        """Generator: bridge, product, core, product, wires. Returns what the next bridge needs: x, y."""
        h, opened = self.open(piece, x, y, before, step.norm)
        flights = self.spread(piece, step.site, h)
        yield from self.others(flights)
        c = self.product(piece, step.site, flights, step.column, step.column_bias)
        activation, kept = self.core(piece, step, c)
        yield from self.turn()
        flights = []
        for part in self.cut(step.row, 0):                     # W2's output features
            with self.trace.span("matmul", slice=piece.index, site=step.site):
                partial_sum = F.linear(activation, part)
            flights.append(self.launch(piece, step.site, self.stream.join(partial_sum)))
        if piece.training:
            piece.links.append(self.tapes.keep(Link(step, opened, h, c, kept, activation)))
        del h, c, kept, activation                             # the tape says what stays
        return opened.x, (yield from self.until_there(piece, step.site, flights))

    def cut(self, weight, dim):
        """The column split: a matrix in chunks along its dimension on the side of the wires."""
        return [weight] if self.columns == 1 else weight.chunk(self.columns, dim)

    def forward_head(self, piece, x, y, before):
        """Generator: final norm, logits of this rank's words, cross entropy with its two reduces on the wires."""
        model, (vocabulary,) = self.model, self.model.head
        h, piece.exit = self.open(piece, x, y, before, model.final_norm.weights)
        flights = self.spread(piece, "head", h)
        yield from self.others(flights)
        piece.logits = self.product(piece, "head", flights, vocabulary.logits_weight())
        piece.head_input = arrived(flights)
        largest, exponentials = maximum_and_sum(piece.logits, vocabulary, self.maximum_and_sum_of_rows)
        piece.maximum = largest.clone()
        yield from self.all_reduce(piece, "cross_entropy", piece.maximum, dist.ReduceOp.MAX)
        piece.sums = parts_of_loss(piece.logits, piece.batch.labels, largest, exponentials, piece.maximum, vocabulary)
        yield from self.all_reduce(piece, "cross_entropy", piece.sums)
        piece.output = cross_entropy(piece.sums)

    # ---- backward

    def backward_slice(self, piece: Slice, gradient, results, tally):
        """Generator: the tape in reverse. Each link is dropped as soon as it is done with."""
        model = self.model
        if piece.chunk.post_process:
            grad_x, grad_y = yield from self.backward_head(piece, gradient, tally)
        else:
            self.tapes.prepare(self, piece)
            bias, mask = self.closing(piece, self.steps[piece.chunk][-1], gradient)
            grad_x, grad_y, grad_bias = add_residual_backward(gradient, mask, bias is not None)
            add_gradients([bias], [grad_bias])
            yield from self.others(piece.links[-1].arriving)
            self.tapes.restore(self, piece)
        while piece.links:
            grad_x, grad_y = yield from self.backward_sublayer(piece, piece.links.pop(), grad_x, grad_y, tally)
        if piece.chunk.pre_process:
            grad_x = drop(grad_x, piece.around.hidden_dropout_mask("embedding", grad_x))
            yield from self.backward_embedding(piece, grad_x)
            self.through(piece, tally, "embedding", [], model.embedding)
        results[piece.index] = grad_x

    def backward_sublayer(self, piece, link, grad_x, grad_y, tally):
        """Generator: gradients of x' and of y, the sum -> gradients of the sublayer's own x and y.

        y is a sum over ranks, and the gradient of a sum is the gradient of each part: no sum there. h was on every
        rank, so its gradient is the sum of theirs.
        """
        step, opened, flights = link.step, link.bridge, self.spread(piece, link.step.site, grad_y)
        yield from self.others(flights)
        gradient, grad_y = self.product(piece, step.site, flights, step.row.t()), arrived(flights)
        gradient = step.core_backward(gradient, link.kept)     # of c
        yield from self.turn()
        products = [(step.row, grad_y, link.activation),
                    (step.column, gradient, self.wait(piece, step.site, link.arriving)),
                    (step.column_bias, gradient, None)]
        del link                                               # what is done with goes
        cover, later = (products, []) if piece.later is None else ([], products)
        grad_h = yield from self.input_gradient(piece, step.site, gradient, step.column, cover)
        grad_x, grad_y = self.close(piece, opened, grad_x, grad_h)
        self.through(piece, tally, step.site, later, step.sublayer)
        return grad_x, grad_y

    def through(self, piece, tally, site, later, *modules):
        """A slice is through with these modules, but for the products that are left for later."""
        if later:
            piece.later.append((site, later, modules))
        else:
            tally(*modules)

    def backward_head(self, piece, gradient, tally):
        """Generator: gradient of the losses [b, s] -> gradients of x and y before the final norm."""
        model, (vocabulary,) = self.model, self.model.head
        grad_logits = cross_entropy_gradient(piece.logits, piece.batch.labels, piece.output, piece.maximum, piece.sums,
                                             gradient, vocabulary, self.exponentials_of_rows)
        grad_h = yield from self.input_gradient(piece, "head", grad_logits, vocabulary.logits_weight(), [
            (vocabulary.weight, grad_logits, piece.head_input)])
        grad_x, grad_y = self.close(piece, piece.exit, None, grad_h)
        piece.exit = piece.head_input = piece.logits = None
        shared = model.config.tied and model.pre_process         # then the embedding will add to it, at the other end
        self.through(piece, tally, "head", [], model.final_norm, *([] if shared else [vocabulary]))
        return grad_x, grad_y

    def close(self, piece, opened: Bridge, grad_x, grad_h):
        """A bridge's backward: gradients of its x and y."""
        bias, mask = self.closing(piece, opened.before, grad_h)
        grad_x, grad_y, *gradients = self.bridge_backward(grad_x, grad_h, opened.x, opened.statistics,
                                                          *opened.weights, mask, opened.before is not None,
                                                          bias is not None)
        add_gradients((bias, *opened.weights), gradients)
        return grad_x, grad_y

    def backward_embedding(self, piece, gradient):
        """Generator. gradient: of words + positions [b, s, h]."""
        words, flights = self.model.embedding.word_embeddings, self.spread(piece, "embedding", gradient)
        self.model.embedding.add_position_gradients(gradient, self.stream.own(piece.batch.positions))
        yield from self.others(flights)
        gradient = self.wait(piece, "embedding", flights)
        row, inside = words.local_rows(piece.batch.tokens)
        gradient = (gradient.to(wide(gradient)) * inside.unsqueeze(-1)).flatten(0, 1)
        main_grad_of(words.weight).index_add_(0, row.flatten(), gradient)

    def input_gradient(self, piece, site, grad_output, weight, cover):
        """Generator: grad_output W, summed over ranks; the `cover`, weight gradients, once it is on the wires."""
        flights = []
        for part in self.cut(weight, 1):                       # W1's input features
            with self.trace.span("matmul", slice=piece.index, site=site):
                partial_sum = grad_output @ part
            flights.append(self.launch(piece, site, self.stream.join(partial_sum)))
        self.tapes.prepare(self, piece)                       # the next link needs nothing of this sum, and hides it
        self.weight_gradients(piece, site, cover)
        yield
        self.tapes.restore(self, piece)
        return self.wait(piece, site, flights)

    def weight_gradients(self, piece, site, products):
        with self.trace.span("weight_gradient", slice=piece.index, site=site):
            while products:
                weight, gradient, activation = products.pop(0)   # a head has no gradient of some rows, the padding
                if weight is not None:
                    add_weight_gradient(main_grad_of(weight)[:gradient.size(-1)], gradient, activation)

    # ---- the wires

    def launch(self, piece, site, flight: Flight) -> Flight:
        """It begins, if it goes anywhere. Its tensor must be left alone until wait()."""
        if flight.kind:
            flight.begin()
            self.trace.watch(flight.kind, flight.work, group="tp", slice=piece.index, site=site,
                             bytes=flight.sent.nbytes)
        return flight

    def spread(self, piece, site, x) -> list[Flight]:
        """All rows of x, of which this rank has some, start to come here: in chunks of features, if they do."""
        parts = self.cut(x, -1) if self.stream.parts > 1 else [x]
        return [self.launch(piece, site, self.stream.spread(part)) for part in parts]

    def product(self, piece, site, flights, weight, bias=None):
        """x W^T + bias, of an x that arrives in chunks of its features: each is multiplied as it comes."""
        total = None
        for flight, part in zip(flights, weight.chunk(len(flights), dim=1)):
            x = self.wait(piece, site, [flight])
            with self.trace.span("matmul", slice=piece.index, site=site):
                if total is None:
                    total = F.linear(x, part, bias)
                else:
                    total.flatten(0, 1).addmm_(x.flatten(0, 1), part.t())
        return total

    def others(self, flights):
        """Generator: let others compute, if something is under way."""
        if any(flight.kind for flight in flights):
            yield

    def wait(self, piece, site, flights):
        """Until all is there, in chunks of its features; as one tensor."""
        if any(flight.kind for flight in flights):
            with self.trace.span("wait", group="tp", slice=piece.index, site=site):
                for flight in flights:
                    flight.work.wait()
        return arrived(flights)

    def until_there(self, piece, site, flights):
        """Generator: let others compute, then wait."""
        yield
        return self.wait(piece, site, flights)

    def all_reduce(self, piece, site, tensor, op=dist.ReduceOp.SUM):
        """Generator: of a tensor, in place."""
        flight = all_reduce(tensor, self.mesh.tp_group, op)
        yield from self.until_there(piece, site, [self.launch(piece, site, flight)])


def arrived(flights):
    """What has been waited for, in chunks of the last dimension: one tensor."""
    chunks = [flight.land() for flight in flights]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=-1)
