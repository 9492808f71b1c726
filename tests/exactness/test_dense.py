"""A dense GPT, which uses no option, equals one plain process on two layouts."""

import pytest
from support.harness import FAMILIES, check_against_reference, tiny

CASES = [dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, schedule="zb-v", num_layers=5, slices=2,
              **FAMILIES["llama"]),
         dict(tensor_model_parallel_size=2, slices=3, columns=2, zero_stage=2, hidden_dropout=0.2)]


@pytest.mark.parametrize("settings", CASES, ids=["stages", "replicas"])
def test_a_dense_model_equals_one_plain_process(pool, settings):
    check_against_reference(pool, tiny(4, **settings), steps=2)
