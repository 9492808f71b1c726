"""Pipeline parallelism: one runner executes any schedule (schedules.py), message by message.

Stage r of p holds a run of layers. Messages follow from the actions: Forward(i) takes hidden states [b, s, h] from the
stage before and gives to the next one; Backward(i) takes their gradient from the next stage and gives to the one
before; both ways on one communicator.

**Why it can't hang.** After each action a stage makes one exchange: the action's output leaves, and the next action's
input is asked for, as one batch, on one communicator. In the steady state of 1F1B neighbours meet like this:

    stage 0   F1 --F1-->       B0       F2 --F2-->       B1        a batch: send F1, receive B0
    stage 1   F0        <--B0--   B0 F1        <--B1--             a batch: send B0, receive F1

NCCL promises three things about messages: those of one batch travel side by side, batches of one communicator follow
each other in the order in which they were made, and a batch is done when its partners have made theirs. It does not
promise that a send returns before its receive is there, nor that two communicators make progress side by side. So:

  - a stage never waits for anything but the very next action's input, and has sent by then all that it had to send:
    whoever owes that input has all that it needs, and is itself never further ahead than one action;
  - a receive is never posted where its sender could be waiting for us. While it is under way it occupies the device,
    and whatever waits for the whole device (the first load of a kernel, memory given back) waits for its message too;
  - the first message of two ranks connects them, on the host, and blocks both until both have come: connect() has them
    meet at the start, with one element down the stages and one up.

A test plays every schedule with messages that block both sides. On CPUs, where gloo lets every message go its own way,
inputs are asked for two actions ahead, so that the bytes of the next forward's travel while this stage goes backward.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.mesh import Mesh
from nanodomino.schedules import Backward, Forward
from nanodomino.trace import NO_TRACE


AHEAD = {"cuda": 1, "cpu": 2}        # actions whose input is asked for before it is needed; see above why not more


class Mail:
    """The messages of one stage and step: hidden states come from above and go below, gradients the other way."""

    def __init__(self, mesh: Mesh, actions, shape, dtype, trace=NO_TRACE):
        self.mesh, self.shape, self.dtype, self.trace = mesh, shape, dtype, trace
        self.actions, self.asked = actions, 0           # the first `asked` of them have asked for their input
        self.arriving, self.sent = {}, deque()

    def source(self, action):
        """Stage from which this action takes its input; None at the ends."""
        if isinstance(action, Forward):
            return None if self.mesh.is_first_stage else self.mesh.pp_rank - 1
        return None if self.mesh.is_last_stage else self.mesh.pp_rank + 1

    def target(self, action):
        """Stage to which this action gives its output; None at the ends."""
        if isinstance(action, Forward):
            return None if self.mesh.is_last_stage else self.mesh.pp_rank + 1
        return None if self.mesh.is_first_stage else self.mesh.pp_rank - 1

    def exchange(self, done: int, output=None):
        """`done` actions are done, and the last of them gave `output`: send it, and ask for what the next ones need.

        The tensor is kept until it is gone; at most `stages` messages of a stage are on their way.
        """
        operations, expected = [], []
        if done and (target := self.target(self.actions[done - 1])) is not None:
            output, peer = output.contiguous(), self.mesh.stage_rank(target)
            self.trace.moment("send", message=str(self.actions[done - 1]), peer=peer, bytes=output.nbytes)
            operations.append(self.operation(dist.isend, output, peer, self.actions[done - 1]))
        for action in self.actions[self.asked:done + AHEAD[self.mesh.device.type]]:
            self.asked += 1
            if (source := self.source(action)) is not None:
                buffer = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
                operations.append(self.operation(dist.irecv, buffer, self.mesh.stage_rank(source), action))
                expected.append(action)
        if not operations:
            return
        works = dist.batch_isend_irecv(operations)
        works *= len(operations) // len(works)                      # NCCL has one for all of a batch
        for operation, work in zip(operations, works):
            if operation.op is dist.isend:
                self.sent.append((work, output))
            else:
                self.arriving[expected.pop(0)] = (work, operation.tensor)
        if len(self.sent) > self.mesh.pp:
            self.wait(self.sent.popleft()[0])

    def operation(self, op, tensor, peer: int, action) -> dist.P2POp:
        """tag: gloo tells messages apart by it; NCCL goes by their order."""
        return dist.P2POp(op, tensor, peer, self.mesh.pp_group, tag=action.microbatch)

    def receive(self, action):
        """The message for this action [b, s, h], or None at an end."""
        if self.source(action) is None:
            return None
        work, buffer = self.arriving.pop(action)
        self.wait(work, microbatch=action.microbatch)
        self.trace.moment("receive", message=str(action), peer=self.mesh.stage_rank(self.source(action)))
        return buffer

    def finish(self):
        """Wait until everything that was sent is gone."""
        while self.sent:
            self.wait(self.sent.popleft()[0])

    def wait(self, work, **about):
        with self.trace.span("wait", group="pp", **about):
            work.wait()


def connect(mesh: Mesh):
    """Let the stages meet, before the first real message: one element goes down all of them, and one comes up."""
    if mesh.pp == 1:
        return
    element = torch.zeros(1, device=mesh.device)
    dist.all_reduce(element, group=mesh.pp_group)        # the first act of a communicator needs all of its ranks
    for step in (1, -1):
        before, after = mesh.pp_rank - step, mesh.pp_rank + step
        for op, peer in ((dist.irecv, before), (dist.isend, after)):
            if 0 <= peer < mesh.pp:
                for work in dist.batch_isend_irecv([dist.P2POp(op, element, mesh.stage_rank(peer), mesh.pp_group)]):
                    work.wait()


@dataclass
class Totals:
    """What the last stage summed over its microbatches, as 0-dimensional float64 tensors; zeros on other stages."""
    loss_sum: torch.Tensor
    tokens: torch.Tensor


def run(actions, stage, mesh: Mesh, get_batch, forward_step, hidden_shape, dtype, on_final=None,
        trace=NO_TRACE, on_action=None) -> Totals:
    """Execute a schedule on this stage.

    stage: a Domino; get_batch(microbatch) -> Batch; forward_step(batch, stage, hidden, training) -> (output, tape,
    loss_func), where loss_func(output) -> (sum of the losses that count, number of tokens that count); hidden_shape:
    [b, s, h] of a message. Gradients of the loss *sum* are added to each main_grad: the division by the global number
    of tokens comes once, later.
    on_final: see Domino.backward; it is handed to the stage's last backward, which is the schedule's to know.
    on_action(done, count): told after each action, for whoever shows how far a long step has come.
    """
    mail = Mail(mesh, actions, hidden_shape, dtype, trace)
    totals = Totals(*torch.zeros(2, dtype=torch.float64, device=mesh.device))
    last_backward = next((action for action in reversed(actions) if isinstance(action, Backward)), None)
    alive = {}                                       # microbatch -> (tape, what the loss is differentiated by)

    def forward(i, hidden):
        output, tape, loss_func = forward_step(get_batch(i), stage, hidden, last_backward is not None)
        loss = None
        if mesh.is_last_stage:
            output = output.detach().requires_grad_()
            loss_sum, tokens = loss_func(output)
            totals.loss_sum += loss_sum.detach()
            totals.tokens += tokens
            loss = (loss_sum, output)
        if last_backward is not None:
            alive[i] = (tape, loss)
        return output

    def backward(i, gradient):
        tape, loss = alive.pop(i)
        if mesh.is_last_stage:
            (gradient,) = torch.autograd.grad(*loss)
        return stage.backward(tape, gradient, on_final if Backward(i) == last_backward else None)

    mail.exchange(0)
    for done, action in enumerate(actions, start=1):
        message = mail.receive(action)
        kind, work = ("forward", forward) if isinstance(action, Forward) else ("backward", backward)
        with trace.span(kind, microbatch=action.microbatch):
            result = work(action.microbatch, message)
        mail.exchange(done, result)
        del message, result                          # or the next microbatch would find them still in memory
        if on_action:
            on_action(done, len(actions))
    mail.finish()
    return totals
