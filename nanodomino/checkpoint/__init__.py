"""Saves checkpoints that any layout can load, and that are either complete or absent.

    runs/nano-001/checkpoints/step-00000100/
        manifest.json        step, counters, settings, size and SHA-256 of every other file; written last
        .metadata            the index of torch.distributed.checkpoint: which file holds which box of which tensor
        __0_0.distcp ...     the tensors that rank 0 wrote, ...

    shards.py                which boxes of the full tensors a rank holds: why any layout can load any checkpoint
    save.py                  each rank writes its share in the background; renaming the folder completes the checkpoint
    pinned_memory.py         host memory for the copies that save.py writes
    load.py, safe_load.py    fill a model and an optimizer; run no program that a checkpoint might contain
    manifest.py, find_checkpoints.py  find damage; find the newest intact checkpoint of a run
    export.py                one plain torch file with the full weights

The data order, the dropout masks and the learning rate are functions of (seed, step), so they need no saving: weights,
optimizer state and a few counters are enough to resume with the same bits.
"""
