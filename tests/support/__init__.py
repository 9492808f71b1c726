"""What the tests are built from. No file here is a test, except that of the pool.

    harness            tiny models, fixed data, and train_step on every rank; put the shards of all ranks together again
    reference          the plain model in torch.nn, which imports nothing from nanodomino
    pool               eight processes that live as long as the test session, for tests that need ranks
    train_in_pool      all of train.py in the pool's workers, from its flags to its exit code
    fork_server        real processes without the seconds that `import torch` takes
    jobs               a tiny training under torchrun or the fork server: start it, kill it, compare two runs
    benchmark          ask bench.py a question
    clusters           models of published size and imaginary machines, for formulas
    delayed_collectives  all-reduces that are carried out late or early
    fake_world         one rank alone: collectives that move nothing, for tests that look at operations
    fake_cuda          one training step on a GPU that does not exist, and what it would ask of the GPU
    pitfall_runner     a training with a bug beside the right one, for ../pitfalls.py
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
