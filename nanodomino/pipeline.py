"""Pipeline parallelism: one runner executes any schedule (schedules.py), message by message.

Stage r of p holds a run of layers. Messages follow from the actions: Forward(i) takes hidden states [b, s, h] from the
stage before and gives to the next one; Backward(i) takes their gradient from the next stage and gives to the one
before. What goes down has a process group, and what comes up has another.

Nothing can deadlock, whatever the size of a message: a send does not block (it is waited for `stages` messages later,
when the other side has long asked for it), and the next receive of each direction is posted as soon as what came before
it has been passed on, so in 1F1B its bytes arrive while this stage computes the other direction.

Passed on first, since NCCL carries out the messages of one group in the order in which they were posted: a receive that
is posted before a send holds the send up. With four stages and each receive posted one send too early, 1F1B closes a
circle, though each rank sends and receives all that it should:

    F5 at stage 3   waits for stage 2 to send it, behind its receive of F6
    F6 at stage 2   waits for stage 1 to send it, behind its receive of F7
    F7 at stage 1   waits for stage 0, which runs F7 after B3
    B3 at stage 0   waits for stage 1 to send it, behind its receive of B4
    B4 at stage 1   waits for stage 2 to send it, behind its receive of B5
    B5 at stage 2   waits for stage 3, which runs B5 after F5
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.mesh import Mesh
from nanodomino.schedules import Backward, Forward
from nanodomino.trace import NO_TRACE


class Mail:
    """The messages of one stage and step: hidden states come from above and go below, gradients the other way."""

    def __init__(self, mesh: Mesh, actions, shape, dtype, trace=NO_TRACE):
        self.mesh, self.shape, self.dtype, self.trace = mesh, shape, dtype, trace
        self.sent = {kind: deque() for kind in (Forward, Backward)}
        self.expected = {kind: deque() for kind in (Forward, Backward)}
        self.arriving = {}
        for action in actions:
            if self.source(action) is not None:
                self.expected[type(action)].append(action)
        for kind in self.expected:
            self.post(kind)

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

    def group(self, kind):
        return self.mesh.pp_forward_group if kind is Forward else self.mesh.pp_backward_group

    def post(self, kind):
        """Start receiving the next message of this kind, if there is one."""
        if self.expected[kind]:
            action = self.expected[kind].popleft()
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
            work = dist.irecv(buffer, self.mesh.stage_rank(self.source(action)), group=self.group(kind),
                              tag=action.microbatch)
            self.arriving[action] = (buffer, work)

    def receive(self, action):
        """The message for this action [b, s, h], or None at an end."""
        if self.source(action) is None:
            return None
        buffer, work = self.arriving.pop(action)
        with self.trace.span("wait", group="pp", microbatch=action.microbatch):
            work.wait()
        self.trace.moment("receive", message=str(action), peer=self.mesh.stage_rank(self.source(action)))
        return buffer

    def send(self, action, tensor):
        """Start sending what the action gave, then post the next receive of its kind.

        The tensor is kept until it is gone; at most `stages` messages are under way each way.
        """
        kind = type(action)
        if self.target(action) is not None:
            tensor = tensor.contiguous()
            peer = self.mesh.stage_rank(self.target(action))
            self.trace.moment("send", message=str(action), peer=peer, bytes=tensor.nbytes)
            work = dist.isend(tensor, peer, group=self.group(kind), tag=action.microbatch)
            self.sent[kind].append((work, tensor))
            if len(self.sent[kind]) > self.mesh.pp:
                with self.trace.span("wait", group="pp"):
                    self.sent[kind].popleft()[0].wait()
        if self.source(action) is not None:
            self.post(kind)

    def finish(self):
        """Wait until everything that was sent is gone."""
        with self.trace.span("wait", group="pp"):
            for sent in self.sent.values():
                while sent:
                    sent.popleft()[0].wait()


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

    for done, action in enumerate(actions, start=1):
        message = mail.receive(action)
        kind, work = ("forward", forward) if isinstance(action, Forward) else ("backward", backward)
        with trace.span(kind, microbatch=action.microbatch):
            result = work(action.microbatch, message)
        mail.send(action, result)
        del message, result                          # or the next microbatch would find them still in memory
        if on_action:
            on_action(done, len(actions))
    mail.finish()
    return totals
