"""One rank of a learner for the tests: the same updates on as many processes as asked for.

    python -m tests.unit.learner.rank_worker SCENARIO RANK SIZE FOLDER

Writes `FOLDER/rank-R.json` with the metrics of each update, and the leader the final weights.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from seed_async.learner.ranks import Ranks
from seed_async.learner.step import update
from tests.unit.learner.builders import LOUD, packed, random_batch, tiny_model

NUM_UPDATES = 4
SCENARIOS = {
    "whole": ({}, {"num_groups": 3}),
    # Mini-batches smaller than the number of ranks, masked tokens, contexts of their own: ranks without work.
    "few": ({"mini_batch_trajectories": 2, "method": "opid"}, {"masked_share": 0.6, "layout": "mixed"}),
}


def main(scenario: str, rank: int, size: int, folder: Path) -> None:
    """Train."""
    torch.set_num_threads(1)
    changes, batches = SCENARIOS[scenario]
    config = type(LOUD)(**(vars(LOUD) | {"max_grad_norm": 1.0} | changes))
    ranks = Ranks.join(rank, size, "cpu", folder / f"meeting-{size}", "lo", lambda: None)
    policy, reference = (ranks.shard(packed(tiny_model(seed=seed))) for seed in (0, 1))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    metrics = []
    for number in range(NUM_UPDATES):
        batch = random_batch(number, **batches)
        metrics.append(update(batch, config, policy, reference, optimizer, ranks))
    weights = {name: ranks.whole(parameter.detach()) for name, parameter in policy.named_parameters()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(metrics))
    if ranks.leads:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "weights.safetensors")
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
