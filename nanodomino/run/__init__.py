"""Does everything around the training loop: start, resume, stop, fail and report.

Read command_line.py (flags and what a run remembers), run_folder.py (a run's folder and the checkpoint to resume
from), agreement.py (the same settings on all ranks), report.py (the terminal, metrics.jsonl, loss.svg), tensorboard.py,
signals.py (Ctrl-C and SIGTERM), rank_failure.py (how a rank starts, and how an error ends all ranks), watchdog.py (ends
a rank whose GPU hangs), check_copies.py (finds parameters whose copies have drifted apart).
"""
