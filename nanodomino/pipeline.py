"""Pipeline parallelism: executes any schedule on one stage, message by message.

Stage r of p holds one or more chunks: runs of consecutive layers. A forward receives hidden states [b, s, h] from the
stage with the previous layers and sends its output to the stage with the next layers. A backward receives the gradient
of that output and sends the gradient of its input back. All messages share one communicator. After each action a stage
posts one batch: the send of the action's output and the receives for later actions. In the steady state of 1F1B:

    stage 0   B0 B0 F2 |--F2-->| B1 B1 F3 |--F3-->| B2 B2 F4        a batch: send F2, receive B1
    stage 1   F1 B1 B1 |<--B1--| F2 B2 B2 |<--B2--| F3 B3 B3        a batch: send B1, receive F2

**Why the stages cannot hang.** NCCL runs the messages of a batch concurrently, runs the batches of a communicator in
the order in which they were posted, and completes a batch when the partners have posted theirs. A send may block until
its receive is posted. So a receive that is posted too late holds up the sender, for which this stage may be waiting
itself; a receive that is posted too early holds up this stage's next batch. Hence the

    invariant: before an action that starts at time T, a stage has posted the receives of all messages sent by T, and
               of no others; the times are those of the simulated schedule (simulation.receives_to_post).

Suppose that some messages are never delivered, and consider the earliest of them, M, sent at time t. Two things needed
only messages earlier than M, which were delivered: everything that M's sender did up to t, and everything that M's
receiver did before its first action that starts at t or later. So both ranks get as far as posting the batch that
contains M. The batches that they posted before contain only earlier messages, too, so none of them blocks M. Hence M is
delivered: a contradiction.

docs/pipeline-messages.md covers the special cases: the early gradient of a pair, receives that occupy a GPU, ZeRO-2 and
the first message of two ranks. A test runs every schedule with messages that block both sides. On CPUs, where gloo lets
each message proceed by itself, receives are posted one action earlier: then the input of the next forward is in flight
while this stage runs a backward.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.comm.trace import NO_TRACE
from nanodomino.mesh import Mesh
from nanodomino.schedules.actions import Action
from nanodomino.schedules.placement_and_messages import Placement, Timetable, message_received, message_sent
from nanodomino.schedules.simulation import receives_to_post

ACTIONS_AHEAD = {"cuda": 0, "cpu": 1}        # by how many actions a receive is posted early


class P2PCommunicator:
    """Sends and receives the messages of one stage in one step; all have the same shape."""

    def __init__(self, mesh: Mesh, table: Timetable, shape, dtype, trace=NO_TRACE):
        self.mesh, self.shape, self.dtype, self.trace = mesh, shape, dtype, trace
        self.placement, self.stage = table.placement, mesh.pp_rank
        self.receives = [*receives_to_post(table, ACTIONS_AHEAD[mesh.device.type])[self.stage], []]
        self.outbox, self.inbox, self.sends_in_flight = [], {}, deque()

    def send_later(self, action: Action, output):
        """Queue an action's output for the next batch, or keep it if another chunk of this stage is the receiver."""
        if sent := message_sent(self.placement, self.stage, action):
            receiver, message = sent
            if receiver == self.stage:
                self.inbox[message] = (None, output)
            else:
                self.outbox.append((dist.isend, receiver, message, output.contiguous()))

    def post(self, actions_done: int | None = None):
        """Post a batch: the queued sends, and the receives that are due after the first `actions_done` actions (None:
        no receives). If more than p sends are then in flight, wait for the oldest, since each holds a tensor."""
        receives = [] if actions_done is None else [
            (dist.irecv, self.placement.source(self.stage, message)[0], message,
             torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device))
            for message in self.receives[actions_done]]
        batch, self.outbox = receives + self.outbox, []            # receives first: scatter_and_gather.py says why
        if not batch:
            return
        works = dist.batch_isend_irecv([dist.P2POp(op, tensor, self.mesh.stage_rank(peer), self.mesh.pp_group,
                                                   tag=self.tag(message)) for op, peer, message, tensor in batch])
        works *= len(batch) // len(works)                           # NCCL returns one work for the whole batch
        for work, (op, peer, message, tensor) in zip(works, batch):
            if op is dist.isend:
                self.trace.moment("send", message=str(message), peer=self.mesh.stage_rank(peer), bytes=tensor.nbytes)
                self.sends_in_flight.append((work, tensor))
            else:
                self.inbox[message] = (work, tensor)
        self.wait_for_sends(self.mesh.pp)

    def tag(self, message) -> int:
        """Return the number by which gloo matches messages; NCCL matches them by their order."""
        return 2 * (message.microbatch * self.placement.chunks + message.chunk) + (message.direction < 0)

    def receive(self, action: Action):
        """Wait for an action's input and return it, or None where the model begins or ends."""
        source = self.placement.source(self.stage, action)
        if source is None:
            return None
        message = message_received(action)
        work, tensor = self.inbox.pop(message)
        if work:
            self.wait(work, microbatch=action.microbatch)
            self.trace.moment("receive", message=str(message), peer=self.mesh.stage_rank(source[0]))
        return tensor

    def wait_for_sends(self, max_in_flight=0):
        while len(self.sends_in_flight) > max_in_flight:
            self.wait(self.sends_in_flight.popleft()[0])

    def wait(self, work, **details):
        with self.trace.span("wait", group="pp", **details):
            work.wait()


def connect(mesh: Mesh, placement: Placement):
    """Exchange one element between all neighbours, because the first message of two ranks blocks both hosts."""
    if mesh.pp == 1:
        return
    element = torch.zeros(1, device=mesh.device)
    dist.all_reduce(element, group=mesh.pp_group)        # a communicator's first operation needs all of its ranks
    for pair in placement.neighbours:
        if mesh.pp_rank in pair:
            (neighbour,) = (mesh.stage_rank(stage) for stage in pair if stage != mesh.pp_rank)
            for work in dist.batch_isend_irecv([dist.P2POp(op, element.clone(), neighbour, mesh.pp_group)
                                                for op in (dist.isend, dist.irecv)]):
                work.wait()


@dataclass
class Totals:
    """Sums over the microbatches of a step: float64 scalars, zero on stages without the model's end."""
    loss_sum: torch.Tensor
    tokens: torch.Tensor


def run(table: Timetable, stage, mesh: Mesh, get_batch, forward_step, residual_shape, dtype, on_gradients_ready=None,
        trace=NO_TRACE, on_action=None, loss_scale=1.0) -> Totals:
    """Execute a schedule on this stage.

    stage: a Domino.
    get_batch(microbatch, chunk): returns a Batch.
    forward_step(batch, stage, hidden, chunk, training): a generator that returns (output, tape, loss_func), where
        loss_func(output) returns (sum of the losses that count, number of tokens that count).
    residual_shape: the shape of each message, [b, s, h] or, with a sharded stream, [b, s/t, h].
    on_gradients_ready: see Domino.backward.
    on_action(done, count): called after each action, to report progress.

    Adds the gradients of loss_scale x the loss *sum* to each main_grad; zero.py divides by both the scale and the
    global number of tokens, once per step.
    """
    actions, placement = table.rows[mesh.pp_rank], table.placement
    messages = P2PCommunicator(mesh, table, residual_shape, dtype, trace)
    totals = Totals(*torch.zeros(2, dtype=torch.float64, device=mesh.device))
    training = any(half.kind != "forward" for action in actions for half in action.halves)
    tapes = {}                           # (microbatch, chunk) -> (tape, (loss sum, output) at the model's end)

    def forward(half):
        batch = get_batch(half.microbatch, half.chunk)
        output, tape, loss_func = yield from forward_step(batch, stage, messages.receive(half), half.chunk, training)
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
        messages.send_later(half, (yield from stage.backward(tape, gradient, on_gradients_ready, defer_weights)))

    def weight_backward(half):
        tape, _ = tapes.pop((half.microbatch, half.chunk))
        yield from stage.weight_backward(tape, on_gradients_ready)

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
    """Run the (half, generator) tuples of one action to their ends. The halves of a pair take strict turns, whichever
    messages have arrived. Otherwise tensor-parallel ranks could launch their all-reduces in different orders."""
    while running:
        half, generator = running.popleft()
        with torch.no_grad(), trace.span(half.kind, microbatch=half.microbatch, chunk=half.chunk):
            ended = resume(generator, to_the_end=not running)
        if not ended:
            running.append((half, generator))
        elif running and half.kind == "backward":
            messages.post()                              # the previous stage waits for this gradient


def resume(generator, to_the_end: bool) -> bool:
    """Resume a generator once, or until it ends; return whether it has ended."""
    while next(generator, "ended") != "ended":
        if not to_the_end:
            return False
    return True
