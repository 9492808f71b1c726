"""Saves checkpoints that any layout can load, and that are either complete or absent.

    runs/nano-001/checkpoints/step-00000100/
        manifest.json        step, counters, settings, and the size and SHA-256 of every other file; written last
        index.json           which file holds which part of which tensor
        rank-00000.bin ...   the numbers that rank 0 wrote, ...

    format.py    defines these files, and finds damage in them
    save.py      writes each rank's share in the background; renaming the folder completes the checkpoint
    load.py      finds the newest intact checkpoint of a run; fills a model and an optimizer, or returns full weights

The data order, the dropout masks and the learning rate depend only on the settings and the step, so they need not be
saved. Weights, optimizer state and a few counters are enough to resume with the same bits.
"""
