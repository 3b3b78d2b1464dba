"""Packed scoring on a CUDA device against the CPU's loop; bfloat16 takes the varlen kernels."""

import numpy as np
import pytest
import torch

from seed_async.learner.scoring import score
from tests.unit.learner.builders import packed, random_row, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_packed_log_probs_on_cuda_equal_those_on_the_cpu(dtype: torch.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    rows = [random_row(rng, turns) for turns in (1, 4, 9)]
    model = packed(tiny_model())
    with torch.no_grad():
        expected = score(model, rows, temperature=1.0, token_budget=64).logprob
        actual = score(model.to("cuda", dtype), rows, temperature=1.0, token_budget=64).logprob.float().cpu()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
