"""Stops a run gracefully: the first stop signal asks for a checkpoint, the second ends the process at once.

    SIGTERM    a scheduler or `kill`          SIGINT    Ctrl-C          SIGHUP    the terminal was closed

torchrun passes each of them on to its ranks, which do not belong to the terminal themselves.
"""

import os
import signal
import threading
import time


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run. With `nohup`, a process starts with SIGHUP ignored, and continues to ignore
    it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT] + [signal.SIGHUP] * (not ignored)


class StopSignal:
    """Records the first stop signal, in `number` and `received_at`; the second one ends the process.

    say(line): called to confirm the first signal at once, because the current step may take long.

    Python runs signal handlers only between two bytecode instructions, and a rank inside a collective executes none. So
    set_wakeup_fd makes Python write the signal's number into a pipe immediately, and a thread reads the pipe.
    """

    def __init__(self, say):
        self.say, self.number, self.received_at = say, 0, 0.0
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in stop_signals():
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self.listen, args=(reader,), name="signals", daemon=True).start()

    def listen(self, reader: int):
        while number := os.read(reader, 1):
            self.handle(number[0])

    def handle(self, number: int):
        # A terminal or a scheduler may signal the ranks and torchrun, which then signals the ranks again. So signals
        # within two seconds count as one.
        if self.number and time.monotonic() - self.received_at > 2.0:
            os._exit(128 + number)
        if not self.number:
            self.number, self.received_at = number, time.monotonic()
            again = "press Ctrl-C" if number == signal.SIGINT else f"send {signal.Signals(number).name}"
            self.say(f"stopping after this step with a checkpoint; {again} again to stop at once")
