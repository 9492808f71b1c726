"""Stops a run gracefully: the first SIGTERM or Ctrl-C asks for a checkpoint, the second ends the process at once."""

import os
import signal
import threading
import time


class StopSignal:
    """Records the first SIGTERM or SIGINT, in `number` and `received_at`; the second one ends the process.

    say(line): called to confirm the first signal at once, because the current step may take long.

    Python runs signal handlers only between two bytecode instructions, and a rank inside a collective executes none. So
    set_wakeup_fd makes Python write the signal's number into a pipe immediately, and a thread reads the pipe.
    """

    def __init__(self, say):
        self.say, self.number, self.received_at = say, 0, 0.0
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self.listen, args=(reader,), name="signals", daemon=True).start()

    def listen(self, reader: int):
        while number := os.read(reader, 1):
            self.handle(number[0])

    def handle(self, number: int):
        # A terminal sends Ctrl-C to the ranks and to torchrun, which then signals the ranks again. So signals within
        # two seconds count as one.
        if self.number and time.monotonic() - self.received_at > 2.0:
            os._exit(128 + number)
        if not self.number:
            self.number, self.received_at = number, time.monotonic()
            again = "press Ctrl-C" if number == signal.SIGINT else "send SIGTERM"
            self.say(f"stopping after this step with a checkpoint; {again} again to stop at once")
