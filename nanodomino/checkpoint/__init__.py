"""Saves checkpoints that any layout can load, and that are either complete or absent.

    runs/nano-001/checkpoints/step-00000100/
        manifest.json        step, counters, settings, and the size and SHA-256 of every other file; written last
        .metadata            the index of torch.distributed.checkpoint: which file holds which part of which tensor
        __0_0.distcp ...     the tensors that rank 0 wrote, ...

    shards.py              finds the parts of the full tensors that a rank holds, so any layout can load any checkpoint
    save.py                writes each rank's share in the background; renaming the folder completes the checkpoint
    pinned_memory.py       allocates host memory for the copies that save.py writes
    load.py                fills a model and an optimizer
    safe_load.py           reads a checkpoint without running code that it might contain
    manifest.py            finds damage
    find_checkpoints.py    finds the newest intact checkpoint of a run
    export.py              writes one plain torch file with the full weights

The data order, the dropout masks and the learning rate depend only on the settings and the step, so no state of them is
saved. Weights, optimizer state and a few counters are enough to resume with the same bits.
"""
