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
      x, h = bridge(x, y)       graph of its own          g_a = g_y W2
      c = h W1^T + b1                                     g_c = core.backward(g_a)
      a = core(c)               graph of its own          g_h = g_c W1     -> all-reduce starts
      y = a W2^T  -> all-reduce starts                    weight gradients g_y^T a, g_c^T h, ...: more cover
      yield                     others compute            yield            others compute
      wait                                                wait
                                                          g_x, g_y = bridge.backward(g_x, g_h)

Matrix products are written out; what is between the wires and the products is a `Segment` (tape.py), a small autograd
graph cut off at its inputs. Weight gradients are deferred until the input gradient's reduce is under way: nothing waits
for them. The last slice's last sum finds the others without products: backward its own weight gradients cover it,
forward nothing does. So in a microbatch's forward one slice's sum of a sublayer is exposed on every stage but the last,
whose last sum is the cross entropy's two numbers a token.

The column split (section 3.3) works within a slice, also at batch 1: the output features of the row-parallel product,
and of the column-parallel input gradient, in chunks, each chunk's reduce under way while the next is computed.

With one slice this is Megatron's tensor parallelism: forward it blocks, backward the weight gradients are its cover.
With tp = 1 there are no wires, nothing ever waits, and a layer is one Segment, weight gradients and all.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanodomino.data import Batch
from nanodomino.model import GPT, Dropout, Layer, Norm, Sublayer, close_residual
from nanodomino.parallel import cross_entropy, cross_entropy_gradient, exponentials, logits_maximum
from nanodomino.tape import Segment
from nanodomino.trace import NO_TRACE


def interleave(generators, trace):
    """Resume each generator in turn until all have ended."""
    waiting = deque(enumerate(generators))
    while waiting:
        index, generator = waiting.popleft()
        with trace.span("resume", slice=index):
            ended = next(generator, "ended") == "ended"
        if not ended:
            waiting.append((index, generator))


def bridge(x, y, bias, mask, norm: Norm):
    """Close the sublayer before (y is its sum over ranks; None at a stage's start), open the next:
    x', h, all [b, s, h].

    So it straddles two: x, y, bias and mask belong to the sublayer before, the norm to the one that follows. A
    sublayer's row.bias gets its gradient from the bridge behind it, whose backward has run by finish(sublayer).
    """
    if y is not None:
        x = close_residual(x, y, bias, mask)
    return x, norm(x)


@dataclass
class Link:
    """What backward needs of one sublayer: two graphs and the inputs of the two products."""
    sublayer: Sublayer
    bridge: Segment               # into this sublayer, out of the one before
    h: torch.Tensor               # [b, s, h], into the column-parallel product
    core: Segment
    activation: torch.Tensor      # [b, s, .../t], into the row-parallel product


@dataclass
class Slice:
    """Some samples of a microbatch on their way through the stage: inputs, tape, output."""
    index: int
    batch: Batch
    hidden: torch.Tensor | None                        # [b, s, h] from the stage before
    masks: Dropout
    training: bool
    links: list[Link] = field(default_factory=list)
    entrance: Segment | None = None                    # word vectors + positions
    exit: Segment | None = None                        # the last bridge: into the head, or out of the stage
    head_input: torch.Tensor | None = None             # [b, s, h]
    softmax: torch.Tensor | None = None                # [b, s, width]
    output: torch.Tensor | None = None                 # loss [b, s] on the last stage, else hidden [b, s, h]


class Domino:
    """Runs a GPT stage forward and backward, slice beside slice. Gradients are added to each parameter's main_grad."""

    def __init__(self, model: GPT, slices=1, columns=1, compile_backend=None, trace=NO_TRACE):
        self.model, self.mesh, self.trace = model, model.mesh, trace
        self.group = model.mesh.tp_group
        self.slices, self.columns = slices, columns
        compiled = ((lambda function: torch.compile(function, backend=compile_backend)) if compile_backend
                    else (lambda function: function))
        self.bridge, self.close_residual = compiled(bridge), compiled(close_residual)
        # without wires to hide, a layer is one graph
        self.whole_layer = compiled(Layer.forward) if self.mesh.tp == 1 else None
        self.layer_weights = {layer: list(layer.parameters()) for layer in model.layers.values()}
        self.cores = {kind: compiled(kind.core) for kind in {type(sublayer) for sublayer in model.sublayers}}

    # ---- the stage, as the pipeline sees it

    def forward(self, batch: Batch, hidden=None, training=True):
        """One microbatch. hidden: [b, s, h] from the stage before, None on the first.

        Returns (output, tape): hidden states [b, s, h], or on the last stage the loss of each token [b, s]; and what
        backward() takes. With training=False no tape is kept and nothing is dropped.
        """
        count = min(self.slices, len(batch.tokens))
        hiddens = [None] * count if hidden is None else hidden.tensor_split(count)
        pieces = [Slice(index, part, hiddens[index],
                        Dropout(self.model.config, self.mesh, part.sample_ids if training else None), training)
                  for index, part in enumerate(batch.split(count))]
        with torch.no_grad():
            interleave([self.forward_slice(piece) for piece in pieces], self.trace)
        output = pieces[0].output if count == 1 else torch.cat([piece.output for piece in pieces])
        return output, pieces

    def backward(self, pieces, gradient, on_final=None):
        """gradient: of forward's output. Returns the gradient of `hidden` (None on the first stage).

        on_final(modules) is called when no slice will add to the gradients of these modules any more: pass it for the
        last microbatch, and their reduce over replicas can start behind the rest of backward.
        """
        slices_left = {}

        def finish(*modules):
            """A slice is through with these modules; after the last slice, on_final hears of it."""
            slices_left[modules] = slices_left.get(modules, len(pieces)) - 1
            if on_final and slices_left[modules] == 0:
                on_final(modules)

        results = [None] * len(pieces)
        gradients = gradient.tensor_split(len(pieces))
        with torch.no_grad():
            interleave([self.backward_slice(piece, gradients[piece.index], results, finish) for piece in pieces],
                       self.trace)
        if self.model.pre_process:
            return None
        return results[0] if len(results) == 1 else torch.cat(results)

    # ---- forward

    def forward_slice(self, piece: Slice):
        """Generator: one slice through the stage; yields when it has put something on the wires."""
        model, x, y, bias, mask = self.model, piece.hidden, None, None, None
        if model.pre_process:
            words = model.embedding.word_embeddings.partial(piece.batch.tokens)
            yield from self.all_reduce(piece, "embedding", words)
            mask = piece.masks.hidden("embedding", words)
            piece.entrance = Segment(piece.training,
                                     lambda words: model.embedding.add_positions(words, piece.batch.positions, mask),
                                     [words], [model.embedding.position_embeddings.weight])
            (x,) = piece.entrance.outputs
        for layer in model.layers.values():
            if self.whole_layer:
                x = self.forward_whole_layer(piece, layer, x)
                continue
            for sublayer in (layer.attention, layer.mlp):
                x, y, bias, mask = yield from self.forward_sublayer(piece, sublayer, x, y, bias, mask)
        if model.post_process:
            yield from self.forward_head(piece, x, y, bias, mask)
        else:
            piece.exit = Segment(piece.training,
                                 lambda x, y: x if y is None else self.close_residual(x, y, bias, mask),
                                 [x, y], [bias])
            piece.output = piece.exit.outputs[0].detach()
        if not piece.training:
            piece.entrance = piece.exit = piece.softmax = None

    def open(self, piece, x, y, bias, mask, following):
        """The bridge into `following` (a Norm), as a Segment with outputs x', h."""
        return Segment(piece.training, lambda x, y: self.bridge(x, y, bias, mask, following), [x, y],
                       [bias, *following.parameters()])

    def forward_sublayer(self, piece, sublayer, x, y, bias, mask):
        """Generator: bridge, product, core, product, wires. Returns what the next bridge needs: x, y, bias, mask."""
        core_mask, hidden_mask = piece.masks.sublayer(sublayer, x)
        opened = self.open(piece, x, y, bias, mask, sublayer.norm)
        x, h = (output.detach() for output in opened.outputs)
        with self.trace.span("matmul", slice=piece.index, site=sublayer.site):
            c = F.linear(h, sublayer.column.weight, sublayer.column.bias)
        core = Segment(piece.training, lambda c: self.cores[type(sublayer)](sublayer, c, core_mask), [c])
        del c                                                  # the core keeps what it needs of it
        activation = core.outputs[0].detach()

        chunks, works = [], []
        for part in sublayer.row.weight.chunk(self.columns, dim=0):          # W2's output features
            with self.trace.span("matmul", slice=piece.index, site=sublayer.site):
                chunks.append(activation @ part.t())
            works.append(self.launch(piece, sublayer.site, chunks[-1]))
        yield
        self.wait(piece, sublayer.site, works)
        if piece.training:
            piece.links.append(Link(sublayer, opened, h, core, activation))
        return x, join(chunks), sublayer.row.bias, hidden_mask

    def forward_whole_layer(self, piece, layer, x):
        """tp = 1: the layer as one Segment."""
        masks = [piece.masks.sublayer(sublayer, x) for sublayer in (layer.attention, layer.mlp)]
        whole = Segment(piece.training, lambda x: self.whole_layer(layer, x, *masks), [x], self.layer_weights[layer])
        if piece.training:
            piece.links.append((layer, whole))
        return whole.outputs[0].detach()

    def forward_head(self, piece, x, y, bias, mask):
        """Generator: final norm, logits of this rank's words, cross entropy with its two reduces on the wires."""
        model, (vocabulary,) = self.model, self.model.head
        piece.exit = self.open(piece, x, y, bias, mask, model.final_norm)
        piece.head_input = piece.exit.outputs[1].detach()
        with self.trace.span("matmul", slice=piece.index, site="head"):
            logits = piece.head_input @ vocabulary.logits_weight().t()
        maximum = logits_maximum(logits, vocabulary)
        yield from self.all_reduce(piece, "cross_entropy", maximum, dist.ReduceOp.MAX)
        exponential, sums = exponentials(logits, piece.batch.labels, maximum, vocabulary)
        del logits                                             # the largest tensor of all, in long vocabularies
        yield from self.all_reduce(piece, "cross_entropy", sums)
        piece.output, piece.softmax = cross_entropy(exponential, sums)

    # ---- backward

    def backward_slice(self, piece: Slice, gradient, results, finish):
        """Generator: the tape in reverse. Each link is dropped as soon as it is done with."""
        model = self.model
        if model.post_process:
            grad_x, grad_y = yield from self.backward_head(piece, gradient, finish)
        else:
            grad_x, grad_y = with_y(piece.exit.backward(gradient))
        while piece.links:
            link = piece.links.pop()
            if self.whole_layer:
                layer, whole = link
                (grad_x,) = whole.backward(grad_x)
                finish(layer)
            else:
                grad_x, grad_y = yield from self.backward_sublayer(piece, link, grad_x, grad_y, finish)
        if model.pre_process:
            (grad_words,) = piece.entrance.backward(grad_x)
            words = model.embedding.word_embeddings
            row, inside = words.locate(piece.batch.tokens)
            grad_words = grad_words * inside.unsqueeze(-1)
            words.weight.main_grad.index_add_(0, row.flatten(),
                                              grad_words.flatten(0, 1).to(words.weight.main_grad.dtype))
            finish(model.embedding)
        results[piece.index] = grad_x

    def backward_sublayer(self, piece, link, grad_x, grad_y, finish):
        """Generator: gradients of x' and of y, the sum -> gradients of the sublayer's own x and y.

        y is a sum over ranks, and the gradient of a sum is the gradient of each part: no wires there. h was copied to
        every rank, so its gradient is the sum of theirs: the wires.
        """
        sublayer = link.sublayer
        with self.trace.span("matmul", slice=piece.index, site=sublayer.site):
            grad_activation = grad_y @ sublayer.row.weight
        (grad_columns,) = link.core.backward(grad_activation)
        grad_h = yield from self.input_gradient(piece, sublayer.site, grad_columns, sublayer.column.weight, [
            (sublayer.row.weight.main_grad, grad_y, link.activation),
            (sublayer.column.weight.main_grad, grad_columns, link.h),
            (sublayer.column.bias.main_grad, grad_columns, None)])
        grad_x, grad_y = with_y(link.bridge.backward(grad_x, grad_h))
        finish(sublayer)
        return grad_x, grad_y

    def backward_head(self, piece, gradient, finish):
        """Generator: gradient of the losses [b, s] -> gradients of x and y before the final norm."""
        model, (vocabulary,) = self.model, self.model.head
        grad_logits = cross_entropy_gradient(piece.softmax, piece.batch.labels, gradient.to(piece.softmax.dtype),
                                             vocabulary)
        grad_logits = grad_logits.to(piece.head_input.dtype)
        grad_h = yield from self.input_gradient(piece, "head", grad_logits, vocabulary.logits_weight(), [
            (vocabulary.weight.main_grad[:vocabulary.width], grad_logits, piece.head_input)])
        grad_x, grad_y = with_y(piece.exit.backward(None, grad_h))
        piece.exit = piece.softmax = None
        shared = model.config.tied and model.pre_process         # then the embedding will add to it, at the other end
        finish(model.final_norm, *([] if shared else [vocabulary]))
        return grad_x, grad_y

    def input_gradient(self, piece, site, grad_output, weight, deferred):
        """Generator: grad_output W, summed over ranks; the deferred weight gradients run once it is on the wires."""
        chunks, works = [], []
        for part in weight.chunk(self.columns, dim=1):                       # W1's input features
            with self.trace.span("matmul", slice=piece.index, site=site):
                chunks.append(grad_output @ part)
            works.append(self.launch(piece, site, chunks[-1]))
        with self.trace.span("weight_gradient", slice=piece.index, site=site):
            for main_grad, grad, activation in deferred:
                add_weight_gradient(main_grad, grad, activation)
        yield
        self.wait(piece, site, works)
        return join(chunks)

    # ---- the wires

    def launch(self, piece, site, tensor, op=dist.ReduceOp.SUM):
        """Start an all-reduce over the tensor-parallel ranks. `tensor` must be left alone until wait()."""
        if self.mesh.tp == 1:
            return None
        work = dist.all_reduce(tensor, op, group=self.group, async_op=True)
        self.trace.watch("all_reduce", work, group="tp", slice=piece.index, site=site, bytes=tensor.nbytes)
        return work

    def wait(self, piece, site, works):
        """Until these sums are there."""
        if self.mesh.tp > 1:
            with self.trace.span("wait", group="tp", slice=piece.index, site=site):
                for work in works:
                    work.wait()

    def all_reduce(self, piece, site, tensor, op=dist.ReduceOp.SUM):
        """Generator: launch, let the others compute, wait."""
        work = self.launch(piece, site, tensor, op)
        yield
        self.wait(piece, site, [work])


def with_y(gradients):
    """Gradients of a bridge's inputs as (x, y); where there was no y, at a stage's start, None."""
    return gradients if len(gradients) == 2 else (*gradients, None)


def join(chunks):
    """Chunks of the last dimension -> one tensor."""
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=-1)


def add_weight_gradient(main_grad, grad_output, activation):
    """main_grad [out, in] += grad_output^T activation, over all b x s rows; of a bias [out], whose activation is None,
    += the sum of the rows. main_grad may be of a wider type."""
    grad_output = grad_output.flatten(0, 1)
    if activation is None:
        main_grad.add_(grad_output.sum(dim=0))
    elif main_grad.dtype == grad_output.dtype:
        main_grad.addmm_(grad_output.t(), activation.flatten(0, 1))
    else:
        main_grad.add_(grad_output.t() @ activation.flatten(0, 1))
