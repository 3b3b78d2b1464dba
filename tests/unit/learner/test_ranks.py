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
    """Run one process a rank to its end; rank and size follow the other arguments."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.unit.learner.{module}", *arguments, str(rank), str(size)],
            cwd=ROOT,
            env=ENVIRONMENT,
        )
        for rank in range(size)
    ]
    assert [process.wait(timeout=240) for process in processes] == [0] * size


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 1, 2 and 3 ranks made of every scenario; two make the `front` from which the others go on."""
    folder = tmp_path_factory.mktemp("ranks")
    for size, half in ((2, "front"), (1, "rear"), (3, "rear")):
        run_ranks("rank_worker", size, str(folder), f"whole,few,adapters,{half}")
    return folder


def curve(folder: Path, scenario: str, size: int) -> list[dict[str, Any]]:
    """The metrics of every update, which must be the same on all ranks."""
    metrics = [json.loads((folder / f"{scenario}-{size}-{rank}.json").read_text()) for rank in range(size)]
    untimed = [[{k: v for k, v in line.items() if not k.startswith("seconds_")} for line in each] for each in metrics]
    assert all(each == untimed[0] for each in untimed)
    return untimed[0]


def assert_same(folder: Path, mine: list[dict[str, Any]], theirs: list[dict[str, Any]], names: tuple[str, str]) -> None:
    """Losses to 1e-6 of the terms that they are the difference of, which are of the size of 1; weights to 1e-5."""
    for one, other in zip(mine, theirs, strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)
        assert other["loss_total"] == pytest.approx(one["loss_total"], rel=1e-6, abs=1e-6)
    one_model, other_model = (load_file(folder / f"{name}.safetensors") for name in names)
    for name, tensor in one_model.items():
        torch.testing.assert_close(other_model[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scenario", ["whole", "few", "adapters"])
def test_one_two_and_three_ranks_give_the_same_loss_curve_and_weights(trained: Path, scenario: str) -> None:
    for size in (2, 3):
        pair = (f"{scenario}-1", f"{scenario}-{size}")
        assert_same(trained, curve(trained, scenario, 1), curve(trained, scenario, size), pair)


@pytest.mark.parametrize("size", [1, 3])
def test_others_go_on_from_what_two_ranks_have_saved(trained: Path, size: int) -> None:
    resumed = curve(trained, "front", 2) + curve(trained, "rear", size)
    assert_same(trained, curve(trained, "whole", 1), resumed, ("whole-1", f"rear-{size}"))


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
