"""Saves checkpoints that any layout can load, and that are either complete or absent.

    runs/nano-001/checkpoints/step-00000100/
        manifest.json        step, counters, settings, and the size and SHA-256 of every other file; written last
        index.json           which file holds which part of which tensor
        rank-00000.bin ...   the numbers that rank 0 wrote, ...

    shards.py              finds the parts of the full tensors that a rank holds, so any layout can load any checkpoint
    tensor_index.py        writes parts to files of raw bytes, and reads any other parts
    save.py                writes each rank's share in the background; renaming the folder completes the checkpoint
    load.py                fills a model and an optimizer, or returns the full weights
    manifest.py            lists the size and SHA-256 of each file, and finds damage
    find_checkpoints.py    finds the newest intact checkpoint of a run

The data order, the dropout masks and the learning rate depend only on the settings and the step, so they need not be
saved. Weights, optimizer state and a few counters are enough to resume with the same bits.
"""
