"""Settings of the tests of the learner's math."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors are faster on one thread, and threads that wait take the cores of other processes."""
    torch.set_num_threads(1)
