import os
import signal
import threading
import time


# ---- told to stop

class StopSignal:
    """SIGTERM and Ctrl-C: the first asks for a checkpoint after the step, a second one ends the process at once. `say`
    tells it, with a line, on this thread: a step may take long.

    Python runs a handler between two of its own instructions, and a rank that waits for a silent one runs none. So a
    thread listens, to which the C library's handler passes the signal's number through a pipe.
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
        # A terminal sends Ctrl-C to torchrun too, which sends its own signal after it: the same wish.
        if self.number and time.monotonic() - self.received_at > 2.0:
            os._exit(128 + number)
        if not self.number:
            self.number, self.received_at = number, time.monotonic()
            self.say("stopping after this step, with a checkpoint; a second Ctrl-C ends at once")
