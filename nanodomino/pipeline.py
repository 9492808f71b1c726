"""Pipeline parallelism: schedules are data, and one runner executes them.

Stage r of p holds a run of layers. A global batch is cut into m microbatches, and what a stage does in a step is a list
of actions, Forward(i) and Backward(i), made by a pure function of (stage, stages, microbatches): it can be printed,
counted and tested without a process. p = 4, m = 6, a backward twice as long as a forward:

    stage 0 |F0 F1 F2 F3                   B0 B0 F4 B1 B1 F5 B2 B2    B3 B3    B4 B4    B5 B5
    stage 1 |   F0 F1 F2             B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3    B4 B4    B5 B5            1F1B: at most p - r
    stage 2 |      F0 F1       B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4    B5 B5                  microbatches alive
    stage 3 |         F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5                        on stage r

GPipe runs all forwards before the first backward: simpler, and all m are alive at once.

Both leave the same bubble, (p - 1)(F + B) of idle time per step, that is (p - 1)/m of the ideal time. 1F1B
(PipeDream-flush, 2006.09503; 2104.04473, section 2.2) has three phases on stage r:

    warm-up    w = min(p - r - 1, m) forwards
    steady     a forward, a backward, in turn: one activation comes, one goes
    cool-down  the w backwards that are left

Messages follow from the actions: Forward(i) takes hidden states from the stage before and gives to the next one;
Backward(i) takes a gradient from the next stage and gives to the one before. Nothing can deadlock, whatever the size of
a message: a send does not block (it is waited for `stages` messages later, when the other side has long asked for it),
and the next receive of each direction is posted as soon as what came before it has been passed on, so in 1F1B its bytes
arrive while this stage computes the other direction. Passed on first: NCCL carries out the messages of one group in the
order in which they were posted, and a receive posted before a send would hold it up, all the way round from stage to
stage.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.mesh import Mesh
from nanodomino.trace import NO_TRACE


@dataclass(frozen=True)
class Forward:
    microbatch: int

    def __str__(self):
        return f"F{self.microbatch}"


@dataclass(frozen=True)
class Backward:
    microbatch: int

    def __str__(self):
        return f"B{self.microbatch}"


def forward_only(stage: int, stages: int, microbatches: int) -> list:
    """Evaluation: every microbatch forward."""
    return [Forward(i) for i in range(microbatches)]


def gpipe(stage: int, stages: int, microbatches: int) -> list:
    """All forwards, then all backwards (1811.06965)."""
    return forward_only(stage, stages, microbatches) + [Backward(i) for i in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list:
    """One forward, one backward, after a warm-up that is the longer the earlier the stage."""
    warm_up = min(stages - stage - 1, microbatches)
    actions = [Forward(i) for i in range(warm_up)]
    for i in range(microbatches - warm_up):
        actions += [Forward(warm_up + i), Backward(i)]
    return actions + [Backward(i) for i in range(microbatches - warm_up, microbatches)]


SCHEDULES = {"1f1b": one_f_one_b, "gpipe": gpipe}


# ---- a schedule, looked at

def most_alive(actions) -> int:
    """The most microbatches whose activations are held at once."""
    alive = most = 0
    for action in actions:
        alive += 1 if isinstance(action, Forward) else -1
        most = max(most, alive)
    return most


def timeline(schedule, stages: int, microbatches: int, forward=1, backward=2) -> list[list[tuple]]:
    """When each stage would do what, were messages free: for each stage a list of (action, begin, end).

    Raises ValueError if the schedule can't be executed (somebody waits for a message that is never sent).
    """
    queues = [deque(schedule(stage, stages, microbatches)) for stage in range(stages)]
    rows, done = [[] for _ in range(stages)], {}
    while any(queues):
        before = len(done)
        for stage, queue in enumerate(queues):
            while queue:
                action = queue[0]
                up = isinstance(action, Forward)
                source = stage - 1 if up else stage + 1
                needed = [(source, action)] if 0 <= source < stages else []
                if not up:
                    needed.append((stage, Forward(action.microbatch)))
                if not all(need in done for need in needed):
                    break
                begin = max([done[need] for need in needed] + [rows[stage][-1][2] if rows[stage] else 0])
                done[stage, action] = begin + (forward if up else backward)
                rows[stage].append((queue.popleft(), begin, done[stage, action]))
        if len(done) == before:
            raise ValueError(f"the schedule stops with {[str(queue[0]) for queue in queues if queue]} waiting for "
                             "each other")
    return rows


def bubble(rows) -> float:
    """Idle time of a timeline as a part of the ideal time, the time a stage is busy: (p - 1)/m for 1F1B and GPipe."""
    busy = sum(end - begin for _, begin, end in rows[0])
    return (max(end for row in rows for _, _, end in row) - busy) / busy


def picture(name: str, stages: int, microbatches: int, shown=8) -> str:
    """The schedule as text, a column per unit of time; at most `shown` microbatches are drawn."""
    drawn = min(microbatches, shown)
    rows = timeline(SCHEDULES[name], stages, drawn)
    width = len(str(drawn - 1)) + 2
    lines = [f"schedule {name}: {microbatches} microbatches"
             + (f" (the first {drawn} drawn)" if drawn < microbatches else "")
             + f", bubble {(stages - 1) / microbatches:.0%} of the ideal time"]
    for stage, row in enumerate(rows):
        cells = [""] * row[-1][2]
        for action, begin, end in row:
            cells[begin:end] = [str(action)] * (end - begin)
        lines.append(f"  stage {stage} |" + "".join(f"{cell:{width}}" for cell in cells).rstrip())
    return "\n".join(lines)


# ---- a schedule, executed

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
        trace=NO_TRACE) -> Totals:
    """Execute a schedule on this stage.

    stage: a Domino; get_batch(microbatch) -> Batch; forward_step(batch, stage, hidden, training) -> (output, tape,
    loss_func), where loss_func(output) -> (sum of the losses that count, number of tokens that count); hidden_shape:
    [b, s, h] of a message. Gradients of the loss *sum* are added to each main_grad: the division by the global number
    of tokens comes once, later.
    on_final: see Domino.backward; it is handed to the stage's last backward, which is the schedule's to know.
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

    for action in actions:
        message = mail.receive(action)
        kind, work = ("forward", forward) if isinstance(action, Forward) else ("backward", backward)
        with trace.span(kind, microbatch=action.microbatch):
            result = work(action.microbatch, message)
        mail.send(action, result)
        del message, result                          # or the next microbatch would find them still in memory
    mail.finish()
    return totals
