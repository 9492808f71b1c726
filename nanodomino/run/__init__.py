"""Does everything around the training loop: start, resume, stop, fail and report.

    session.py            what comes before the first step, and happens between two steps
    command_line.py       reads flags, and the settings that a run remembers
    run_folder.py         finds a run's folder and the checkpoint to resume from
    estimates.py          estimates memory before the start
    agreement.py          checks that all ranks have the same settings
    report.py             writes to the terminal and TensorBoard, and draws loss.svg
    metrics_file.py       keeps metrics.jsonl
    signals.py            stops a run at SIGTERM, Ctrl-C or a closed terminal
    rank_failure.py       starts a rank, and ends all ranks if one of them fails
    watchdog.py           ends a rank whose GPU hangs
    kernels.py            chooses kernels
    threads.py            chooses the number of threads on a CPU
    check_copies.py       finds parameters whose copies have drifted apart
"""
