"""Pipeline parallelism: one runner executes any schedule (schedules.py), message by message.

Stage r of p holds a run of layers, or several, its chunks. Messages follow from the actions: a forward takes hidden
states [b, s, h] from wherever the layers before are and gives to where the next ones are; a backward takes their
gradient from there and gives it back; both ways on one communicator.

**Why it can't hang.** After each action a stage makes one exchange: the action's output leaves, and input of later
actions is asked for, as one batch, on one communicator. In the steady state of 1F1B neighbours meet like this:

    stage 0   F1 --F1-->       B0       F2 --F2-->       B1        a batch: send F1, receive B0
    stage 1   F0        <--B0--   B0 F1        <--B1--             a batch: send B0, receive F1

NCCL promises three things about messages: those of one batch travel side by side, batches of one communicator follow
each other in the order in which they were made, and a batch is done when its partners have made theirs. It does not
promise that a send returns before its receive is there, nor that two communicators make progress side by side. So when
should a stage ask for a message? Too late, and its sender is held up, on whom this stage may be waiting; too early, and
this stage's own batch is held up. The schedule, played through with each action's length, gives every message a time at
which it is sent; *before an action that begins at time T a stage asks for all that has been sent by T.* Then the
messages can only be done in the order of their times, and none stops. For look at the earliest of those that are not
done, sent at time t: what its sender did up to t, and its taker before the first action that begins at t or later,
needed earlier messages, and their batches so far hold no others; so both have made the batch that it is in.

  - One message leaves before its time, in a batch of its own: a pair's gradient, while the pair's forward goes on. It
    may have to wait for the stage before to be through with such a batch, which waits for the one before that, and so
    on to the first, which has none. The forward's output stays until the pair is over: if it left early too, two
    neighbours could wait for each other.
  - While a receive is under way it occupies the device, and whatever waits for the whole device (the first load of a
    kernel, memory given back) waits for its message too. By the same reasoning that only takes time.
  - In ZeRO-2 a stage waits for its replicas in the middle of a step. They run the same actions, so that is one more
    thing that an action needs, and has needed at an earlier time.
  - The first message of two ranks connects them, on the host, and blocks both until both have come: connect() has them
    meet at the start, with one element each way.

A test plays every schedule with messages that block both sides. On CPUs, where gloo lets every message go its own way,
messages are asked for one action earlier, so that the bytes of the next forward's travel while this stage goes
backward.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.comm.trace import NO_TRACE
from nanodomino.mesh import Mesh
from nanodomino.schedules.actions import Action
from nanodomino.schedules.placement import Placement, Timetable, message_received, message_sent
from nanodomino.schedules.simulation import receives_to_post

ACTIONS_AHEAD = {"cuda": 0, "cpu": 1}        # actions by which a message is asked for earlier; see above why not more


class P2PCommunicator:
    """The messages of one stage and step."""

    def __init__(self, mesh: Mesh, table: Timetable, shape, dtype, trace=NO_TRACE):
        self.mesh, self.shape, self.dtype, self.trace = mesh, shape, dtype, trace
        self.placement, self.stage = table.placement, mesh.pp_rank
        self.receives = [*receives_to_post(table, ACTIONS_AHEAD[mesh.device.type])[self.stage], []]
        self.outbox, self.inbox, self.sends_in_flight = [], {}, deque()

    def send_later(self, action: Action, output):
        """This action's output, of hidden_shape: to leave with the next exchange, or to stay for a chunk of ours."""
        if given := message_sent(self.placement, self.stage, action):
            taker, message = given
            if taker == self.stage:
                self.inbox[message] = (None, output)
            else:
                self.outbox.append((dist.isend, taker, message, output.contiguous()))

    def post(self, done: int | None = None):
        """Send what is to leave, and once `done` actions are done ask for what belongs there, in one batch.

        A tensor is kept until it is gone; at most `stages` messages of a stage are on their way.
        """
        wanted = [] if done is None else [
            (dist.irecv, self.placement.source(self.stage, message)[0], message,
             torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)) for message in self.receives[done]]
        batch, self.outbox = wanted + self.outbox, []            # receives first: collectives.py says why
        if not batch:
            return
        works = dist.batch_isend_irecv([dist.P2POp(op, tensor, self.mesh.stage_rank(peer), self.mesh.pp_group,
                                                   tag=self.tag(message)) for op, peer, message, tensor in batch])
        works *= len(batch) // len(works)                           # NCCL has one for all of a batch
        for work, (op, peer, message, tensor) in zip(works, batch):
            if op is dist.isend:
                self.trace.moment("send", message=str(message), peer=self.mesh.stage_rank(peer), bytes=tensor.nbytes)
                self.sends_in_flight.append((work, tensor))
            else:
                self.inbox[message] = (work, tensor)
        while len(self.sends_in_flight) > self.mesh.pp:
            self.wait(self.sends_in_flight.popleft()[0])

    def tag(self, message) -> int:
        """gloo tells messages apart by it; NCCL goes by their order."""
        return 2 * (message.microbatch * self.placement.chunks + message.chunk) + (message.direction < 0)

    def receive(self, action: Action):
        """The message for this action, or None at an end."""
        source = self.placement.source(self.stage, action)
        if source is None:
            return None
        work, tensor = self.inbox.pop(message_received(action))
        if work:
            self.wait(work, microbatch=action.microbatch)
            self.trace.moment("receive", message=str(message_received(action)), peer=self.mesh.stage_rank(source[0]))
        return tensor

    def wait_for_sends(self):
        """Wait until everything that was sent is gone."""
        while self.sends_in_flight:
            self.wait(self.sends_in_flight.popleft()[0])

    def wait(self, work, **about):
        with self.trace.span("wait", group="pp", **about):
            work.wait()


def connect(mesh: Mesh, placement: Placement):
    """Let neighbours meet, before the first real message: one element goes each way."""
    if mesh.pp == 1:
        return
    element = torch.zeros(1, device=mesh.device)
    dist.all_reduce(element, group=mesh.pp_group)        # the first act of a communicator needs all of its ranks
    for pair in placement.neighbours:
        if mesh.pp_rank in pair:
            (other,) = (mesh.stage_rank(stage) for stage in pair if stage != mesh.pp_rank)
            for work in dist.batch_isend_irecv([dist.P2POp(op, element.clone(), other, mesh.pp_group)
                                                for op in (dist.isend, dist.irecv)]):
                work.wait()


@dataclass
class Totals:
    """What the stage with the model's end summed over its microbatches, as 0-dimensional float64 tensors; zeros on
    other stages."""
    loss_sum: torch.Tensor
    tokens: torch.Tensor


def resume(generator, to_its_end: bool) -> bool:
    """Once, or until it has ended; whether it has."""
    while next(generator, "ended") != "ended":
        if not to_its_end:
            return False
    return True


def run(table: Timetable, stage, mesh: Mesh, get_batch, forward_step, hidden_shape, dtype, on_gradients_ready=None,
        trace=NO_TRACE, on_action=None, loss_scale=1.0) -> Totals:
    """Execute a schedule on this stage.

    stage: a Domino; get_batch(microbatch, chunk) -> Batch; forward_step(batch, stage, hidden, chunk, training), a
    generator as all of Domino's, returns (output, tape, loss_func), where loss_func(output) -> (sum of the losses that
    count, number of tokens that count); hidden_shape: [b, s, h] of a message. Gradients of loss_scale x the loss *sum*
    are added to each main_grad: the division by that and by the global number of tokens comes once, later.
    on_gradients_ready: see Domino.backward.
    on_action(done, count): told after each action, for whoever shows how far a long step has come.
    """
    actions, placement = table.rows[mesh.pp_rank], table.placement
    messages = P2PCommunicator(mesh, table, hidden_shape, dtype, trace)
    totals = Totals(*torch.zeros(2, dtype=torch.float64, device=mesh.device))
    training = any(half.kind != "forward" for action in actions for half in action.halves)
    alive = {}                           # (microbatch, chunk) -> (tape, what the loss is differentiated by)

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
            alive[half.microbatch, half.chunk] = (tape, loss)
        messages.send_later(half, output)

    def backward(half):
        tape, loss = alive.pop((half.microbatch, half.chunk))
        gradient = loss_scale * torch.autograd.grad(*loss)[0] if loss else messages.receive(half)
        later = half.kind == "input_backward"
        if later:
            alive[half.microbatch, half.chunk] = (tape, None)
        messages.send_later(half, (yield from stage.backward(tape, gradient, on_gradients_ready, later)))

    def weight_backward(half):
        tape, _ = alive.pop((half.microbatch, half.chunk))
        yield from stage.weight_backward(tape, on_gradients_ready)

    work = {"forward": forward, "backward": backward, "input_backward": backward, "weight_backward": weight_backward}
    messages.post(0)
    for done, action in enumerate(actions, start=1):
        halves = deque((half, work[half.kind](half)) for half in action.halves)
        # both of a pair in turn, until one of them is left; whatever has arrived, or tp ranks would launch their sums
        # in different orders
        while halves:
            half, generator = halves.popleft()
            with torch.no_grad(), trace.span(half.kind, microbatch=half.microbatch, chunk=half.chunk):
                ended = resume(generator, to_its_end=not halves)
            if not ended:
                halves.append((half, generator))
            elif halves and half == action.halves[0]:
                messages.post()                      # the gradient need not wait for the other half; see above
        messages.post(done)
        if on_action:
            on_action(done, len(actions))
    messages.wait_for_sends()
    return totals
