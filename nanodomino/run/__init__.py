"""Does everything around the training loop: start, resume, stop, fail and report.

    session.py         the command line, what comes before the first step, and what happens between two steps
    folder.py          finds a run's folder and the checkpoint to resume from
    report.py          writes to the terminal, metrics.jsonl and TensorBoard, and draws loss.svg
    failures.py        starts a rank, stops it at a signal, and ends all ranks if one fails or hangs
    determinism.py     chooses kernels and threads, and finds parameters whose copies have drifted apart
"""
