import pytest

from nanodomino.checkpoint.load import checkpoints_of
from support.checkpoints import TP2_PP2_DP2, config_for, train_from
from support.harness import full_tensors, weights_and_data


@pytest.fixture(scope="session")
def saved(pool, tmp_path_factory):
    """(run folder with checkpoints of steps 2 and 3, full weights of step 3, data), saved by tp 2 x pp 2 x dp 2."""
    run_dir, config = tmp_path_factory.mktemp("saved"), config_for(*TP2_PP2_DP2)
    weights, data = weights_and_data(config, 4)
    pool.run(train_from, config, weights, data, 0, 2, None, str(run_dir))
    outcomes = pool.run(train_from, config, None, data, 2, 3, str(checkpoints_of(run_dir)[0]), str(run_dir))
    return run_dir, full_tensors(outcomes, lambda outcome: outcome.weights), data
