"""Which kernels a run chooses."""

import os

import torch
from support.jobs import TINY, make_corpus
from support.train_in_pool import main_on_rank


def kernels_of_a_run(flags):
    """Return (exit code, torch's choices) after a run of train.py."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    code = main_on_rank(flags, ()).code
    return code, dict(strict=torch.get_deterministic_debug_mode() == 2, cudnn=torch.backends.cuda.cudnn_sdp_enabled(),
                      fills=torch.utils.deterministic.fill_uninitialized_memory,
                      workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


def test_deterministic_mode_is_strict_and_fills_no_memory(pool, tmp_path):
    """In torch's warn-only mode the backward of fused attention would stay nondeterministic."""
    make_corpus(tmp_path)
    flags = [*TINY, "--seq-length", "12", "--data-path", str(tmp_path / "tokens"), "--train-iters", "2"]
    (chosen,) = pool.run(kernels_of_a_run, [*flags, "--run-dir", str(tmp_path / "strict"), "--deterministic-mode"],
                         world_size=1)
    assert chosen == (0, dict(strict=True, cudnn=False, fills=False, workspace=":4096:8"))
    (chosen,) = pool.run(kernels_of_a_run, [*flags, "--run-dir", str(tmp_path / "usual")], world_size=1)
    assert chosen[0] == 0 and not chosen[1]["strict"] and chosen[1]["workspace"] is None
