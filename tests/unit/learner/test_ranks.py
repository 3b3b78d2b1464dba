"""Several ranks are one learner: the same losses, weights and messages as on one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from seed_async.learner.shares import balance, share_of
from seed_async.learner.targets import token_advantages
from tests.unit.learner.builders import LOUD, random_batch

ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run_ranks(module: str, size: int, *arguments: str) -> None:
    """Run one process a rank to its end."""
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                f"tests.unit.learner.{module}",
                *arguments[:-1],
                str(rank),
                str(size),
                arguments[-1],
            ],
            cwd=ROOT,
            env=ENVIRONMENT,
        )
        for rank in range(size)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0] * size


def updates_of(scenario: str, size: int, folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The metrics of every update, equal on all ranks, and the weights in the end."""
    folder.mkdir(exist_ok=True)
    run_ranks("rank_worker", size, scenario, str(folder))
    metrics = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
    untimed = [[{k: v for k, v in line.items() if not k.startswith("seconds_")} for line in each] for each in metrics]
    assert all(each == untimed[0] for each in untimed)
    return untimed[0], load_file(folder / "weights.safetensors")


@pytest.mark.parametrize("scenario", ["whole", "few", "adapters"])
def test_one_two_and_three_ranks_give_the_same_loss_curve_and_weights(tmp_path: Path, scenario: str) -> None:
    alone, weights = updates_of(scenario, 1, tmp_path / "1")
    for size in (2, 3):
        metrics, others = updates_of(scenario, size, tmp_path / str(size))
        for mine, theirs in zip(alone, metrics, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-6)
            # The loss is a difference of terms of the size of 1, so it is that which the error is relative to.
            assert theirs["loss_total"] == pytest.approx(mine["loss_total"], rel=1e-6, abs=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=1e-5)


def test_what_two_ranks_have_saved_one_or_three_go_on_from(tmp_path: Path) -> None:
    uninterrupted, weights = updates_of("whole", 1, tmp_path / "whole")
    for size in (1, 3):
        folder = tmp_path / str(size)
        metrics = updates_of("front", 2, folder)[0]
        more, others = updates_of("rear", size, folder)
        for mine, theirs in zip(uninterrupted, metrics + more, strict=True):
            assert theirs["loss_total"] == pytest.approx(mine["loss_total"], rel=1e-6, abs=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 500), max_size=30), st.integers(1, 5))
def test_the_load_of_the_busiest_rank_is_within_grahams_bound(num_tokens: list[int], num_ranks: int) -> None:
    owners = balance(num_tokens, num_ranks)
    loads = [sum(n for n, owner in zip(num_tokens, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    assert sum(loads) == sum(num_tokens)
    best = max([sum(num_tokens) / num_ranks, *num_tokens])  # no division can be better
    assert max(loads) <= best * (4 / 3 - 1 / (3 * num_ranks)) + max([0, *num_tokens]) * (len(num_tokens) > num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 11])
def test_the_shares_of_the_ranks_are_the_batch(num_ranks: int) -> None:
    """Each trajectory once, in the mini-batch that it belongs to, with the advantages of the whole."""
    batch = random_batch(3, num_groups=2)
    minis = [range(0, 3), range(3, 8)]
    advantages = token_advantages(batch, LOUD)
    shares = [share_of(batch, minis, advantages, rank, num_ranks) for rank in range(num_ranks)]
    starts = {id(trajectory): index for index, trajectory in enumerate(batch.trajectories)}
    for number, mini in enumerate(minis):
        own = [starts[id(s.batch.trajectories[index])] for s in shares for index in s.mini_batches[number]]
        assert sorted(own) == list(mini)
    assert sum(share.advantages.advantage.size for share in shares) == advantages.advantage.size
    for share in shares:
        assert share.advantages.advantage.size == sum(len(each.fresh) for each in share.batch.trajectories)
    if num_ranks == 1:
        assert (shares[0].advantages.advantage == advantages.advantage).all()
