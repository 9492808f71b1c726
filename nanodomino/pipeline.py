"""Pipeline parallelism: runs one stage's schedule, and exchanges activations and gradients with the other stages.

The layers are spread over p stages. Each stage holds one or more *chunks* of consecutive layers. In a forward, a chunk
receives hidden states [b, s, h] from the previous chunk and sends its output to the next chunk. In a backward, it
receives the gradient of that output from the next chunk and sends the gradient of its input to the previous chunk.

A schedule gives each stage a list of actions: forwards and backwards of microbatches. After each action the stage posts
one batch of messages: the send of the action's output, and the receives that later actions need. In the steady state of
1F1B (B1 fills two columns, because a backward takes twice as long as a forward; |--F2-->| sends the output of F2):

    stage 0   B0 B0 F2 |--F2-->| B1 B1 F3 |--F3-->| B2 B2 F4        a batch: send F2, receive B1
    stage 1   F1 B1 B1 |<--B1--| F2 B2 B2 |<--B2--| F3 B3 B3        a batch: send B1, receive F2

**Why the stages cannot hang.** All messages of a pipeline share one NCCL communicator. It runs the messages of a batch
concurrently, but the batches one after another, in the order in which they were posted. A batch completes when the
partners have posted their ends of all its messages, and a send may block until its receive is posted. So a receive
must be posted at the right time. If it is posted too late, its sender blocks, and this stage may itself be waiting for
that sender. If it is posted too early, it blocks this stage's next batch until the message arrives. Hence the

    invariant: before an action that starts at time T, a stage has posted the receives of all messages sent by T, and
               of no others. Times are those of the simulated schedule (simulation.receives_to_post).

Proof. Suppose that some messages are never delivered, and that M, sent at time t, is the earliest of them.

    1  For its actions up to t, M's sender needed only messages earlier than M. They were delivered, so it posts the
       send of M.
    2  M's receiver has an action that needs M, so it has a first action that starts at t or later. Until then it needs
       only messages earlier than M. So it gets there, and before that action it posts the receive of M.
    3  The batches that both posted before contain only messages earlier than M. So none of them blocks M.

Hence M is delivered: a contradiction.

docs/pipeline-messages.md covers five special cases: a pair that sends its gradient early, receives that occupy the GPU,
ZeRO-2, the first message between two ranks, and memory. A test runs every schedule under NCCL's rules.

gloo itself has no such rules. So on CPUs a stage posts its receives one action earlier, and the input of the next
forward is in flight while the stage runs a backward.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.comm.trace import NO_TRACE
from nanodomino.comm.device import kind_of
from nanodomino.mesh import Mesh
from nanodomino.schedules.definitions import Action
from nanodomino.schedules.simulation import Placement, Timetable, message_received, message_sent, receives_to_post


ACTIONS_AHEAD = {"cuda": 0, "cpu": 1}        # a receive is posted this many actions early


class P2PCommunicator:
    """Sends and receives one stage's messages during one step. All messages have the same shape and are copied into and
    out of buffers that later steps use again. buffers: {(shape, dtype): free ones}; see docs/pipeline-messages.md."""

    def __init__(self, mesh: Mesh, table: Timetable, shape, dtype, buffers: dict, trace=NO_TRACE):
        self.mesh, self.shape, self.dtype, self.trace = mesh, shape, dtype, trace
        self.placement, self.stage = table.placement, mesh.pp_rank
        self.receives = [*receives_to_post(table, ACTIONS_AHEAD[kind_of(mesh.device)])[self.stage], []]
        self.outbox, self.inbox, self.sends_in_flight = [], {}, deque()
        self.free = buffers.setdefault((shape, dtype), [])

    def buffer(self) -> torch.Tensor:
        return self.free.pop() if self.free else torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)

    def send_later(self, action: Action, output):
        """Queue an action's output for the next batch. If another chunk of this stage is the receiver, just keep it."""
        if sent := message_sent(self.placement, self.stage, action):
            receiver, message = sent
            if receiver == self.stage:
                self.inbox[message] = (None, output)
            else:
                self.outbox.append((dist.isend, receiver, message, self.buffer().copy_(output)))

    def post(self, actions_done: int | None = None):
        """Post one batch: the queued sends, and the receives that are due after `actions_done` actions of this stage.
        If actions_done is None, post only the sends. If more than p sends are then in flight, wait for the oldest."""
        receives = [] if actions_done is None else [
            (dist.irecv, self.placement.source(self.stage, message)[0], message, self.buffer())
            for message in self.receives[actions_done]]
        batch, self.outbox = receives + self.outbox, []            # receives first: collectives.py says why
        if not batch:
            return
        works = dist.batch_isend_irecv([dist.P2POp(op, tensor, self.mesh.rank_of(pp=peer), self.mesh.pp_group,
                                                   tag=self.tag(message)) for op, peer, message, tensor in batch])
        works *= len(batch)                    # NCCL returns one work for the whole batch; zip() ignores surplus works
        for work, (op, peer, message, tensor) in zip(works, batch):
            if op is dist.isend:
                self.trace.moment("send", message=str(message), peer=self.mesh.rank_of(pp=peer), bytes=tensor.nbytes)
                self.sends_in_flight.append((work, tensor))
            else:
                self.inbox[message] = (work, tensor)
        self.wait_for_sends(self.mesh.pp)

    def tag(self, message) -> int:
        """Return the number by which gloo matches a send with its receive. NCCL matches them by their order."""
        return 2 * (message.microbatch * self.placement.chunks + message.chunk) + (message.direction < 0)

    def receive(self, action: Action):
        """Wait for an action's input and return it. Return None for the forward of the model's first chunk."""
        source = self.placement.source(self.stage, action)
        if source is None:
            return None
        message = message_received(action)
        work, tensor = self.inbox.pop(message)
        if work:
            self.wait(work, microbatch=action.microbatch)
            self.trace.moment("receive", message=str(message), peer=self.mesh.rank_of(pp=source[0]))
            self.free.append(tensor)                       # the next receive waits for the copy
            return tensor.clone()
        return tensor

    def wait_for_sends(self, max_in_flight=0):
        while len(self.sends_in_flight) > max_in_flight:
            work, buffer = self.sends_in_flight.popleft()
            self.wait(work)
            self.free.append(buffer)

    def wait(self, work, **details):
        with self.trace.span("wait", group="pp", **details):
            work.wait()


def connect(mesh: Mesh, placement: Placement):
    """Exchange one element between all neighbouring stages, in both directions, before training starts.

    The first message between two ranks sets up their connection, and NCCL blocks both ranks until both have arrived. In
    the middle of a schedule that could be a deadlock."""
    if mesh.pp == 1:
        return
    element = torch.zeros(1, device=mesh.device)
    dist.all_reduce(element, group=mesh.pp_group)        # a communicator's first operation needs all of its ranks
    for pair in placement.neighbours:
        if mesh.pp_rank in pair:
            (neighbour,) = (mesh.rank_of(pp=stage) for stage in pair if stage != mesh.pp_rank)
            for work in dist.batch_isend_irecv([dist.P2POp(op, element.clone(), neighbour, mesh.pp_group)
                                                for op in (dist.isend, dist.irecv)]):
                work.wait()


@dataclass
class Totals:
    """Sums over the microbatches of a step: float64 scalars, zero on stages that do not compute the loss."""
    loss_sum: torch.Tensor
    tokens: torch.Tensor                 # the number of tokens whose loss counts


def run(table: Timetable, domino, mesh: Mesh, get_batch, forward_step, residual_shape, dtype, on_gradients_ready=None,
        trace=NO_TRACE, on_action=None, loss_scale=1.0) -> Totals:
    """Execute this stage's actions of one step, without the optimizer.

    table: the actions of all stages. If it has only forwards, this is an evaluation: no tape, no dropout.
    domino: the Domino that runs this stage's layers.
    get_batch(microbatch, chunk): returns a Batch.
    forward_step(batch, domino, hidden, chunk, training): a generator that returns (output, tape, loss_func). On the
        last chunk, loss_func(output) returns (sum of the losses that count, number of tokens that count).
    residual_shape: the shape of each message: [b, s, h], or less if ranks share the residual stream.
    on_gradients_ready: called by Domino.backward, whose docstring explains it.
    on_action(done, count): called after each action. done: the actions finished so far; count: all actions.

    Adds to each main_grad the gradient of loss_scale times the *sum* of the losses. Once per step, zero.py divides by
    the scale and by the number of tokens in the global batch."""
    actions, placement = table.rows[mesh.pp_rank], table.placement
    messages = P2PCommunicator(mesh, table, residual_shape, dtype, domino.message_buffers, trace)
    totals = Totals(*torch.zeros(2, dtype=torch.float64, device=mesh.device))
    training = any(half.kind != "forward" for action in actions for half in action.halves)
    tapes = {}                           # (microbatch, chunk) -> (tape, (loss sum, output) on the last chunk or None)

    def forward(half):
        batch = get_batch(half.microbatch, half.chunk)
        output, tape, loss_func = yield from forward_step(batch, domino, messages.receive(half), half.chunk, training)
        loss = None
        if placement.virtual_stage(mesh.pp_rank, half.chunk) == placement.last:
            with torch.enable_grad():
                output = output.detach().requires_grad_()
                loss_sum, tokens = loss_func(output)
            totals.loss_sum += loss_sum.detach()
            totals.tokens += tokens
            loss = (loss_sum, output)
        if training:
            tapes[half.microbatch, half.chunk] = (tape, loss)
        messages.send_later(half, output)

    def backward(half):
        tape, loss = tapes.pop((half.microbatch, half.chunk))
        gradient = loss_scale * torch.autograd.grad(*loss)[0] if loss else messages.receive(half)
        defer_weights = half.kind == "input_backward"
        if defer_weights:
            tapes[half.microbatch, half.chunk] = (tape, None)
        output = yield from domino.backward(tape, gradient, on_gradients_ready, defer_weights, loss_scale)
        messages.send_later(half, output)

    def weight_backward(half):
        tape, _ = tapes.pop((half.microbatch, half.chunk))
        yield from domino.weight_backward(tape, on_gradients_ready)

    passes = {"forward": forward, "backward": backward, "input_backward": backward, "weight_backward": weight_backward}
    messages.post(0)
    for done, action in enumerate(actions, start=1):
        run_halves(deque((half, passes[half.kind](half)) for half in action.halves), messages, trace)
        messages.post(done)
        if on_action:
            on_action(done, len(actions))
    messages.wait_for_sends()
    return totals


def run_halves(running: deque, messages: P2PCommunicator, trace):
    """Run one action to its end. running: one (half, generator) tuple, or two if the action is a pair.

    The halves of a pair take strict turns, no matter which messages have arrived. Otherwise tensor-parallel ranks could
    launch their all-reduces in different orders."""
    while running:
        half, generator = running.popleft()
        with torch.no_grad(), trace.span(half.kind, microbatch=half.microbatch, chunk=half.chunk):
            ended = not any(running for _ in generator)  # alone, a half runs to its end; in a pair, to its next yield
        if not ended:
            running.append((half, generator))
        elif running and half.kind == "backward":
            messages.post()                              # the previous stage waits for this gradient
