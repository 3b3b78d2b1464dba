"""One rank of a learner for the tests: the same updates on as many processes as asked for.

    python -m tests.unit.learner.rank_worker SCENARIO RANK SIZE FOLDER

Writes `FOLDER/rank-R.json` with the metrics of each update, and the leader the final weights. It goes on from a
checkpoint below FOLDER if there is one, and leaves one behind; scenarios `front` and `rear` are the halves of `whole`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from seed_async.learner.adapters import add_adapters
from seed_async.learner.checkpoint import (
    CheckpointWriter,
    newest_checkpoint,
    restore,
    take_snapshot,
    trained_parameters,
)
from seed_async.learner.ranks import Ranks
from seed_async.learner.step import update
from seed_async.topology import Lora
from tests.unit.learner.builders import LOUD, packed, random_batch, tiny_model

WHOLE: dict[str, Any] = {"num_groups": 3}
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], range]] = {
    "whole": ({}, WHOLE, range(4)),
    "front": ({}, WHOLE, range(2)),
    "rear": ({}, WHOLE, range(2, 4)),
    # Mini-batches smaller than the number of ranks, masked tokens, contexts of their own: ranks without work.
    "adapters": ({}, WHOLE, range(4)),
    "few": ({"mini_batch_trajectories": 2, "method": "opid"}, {"masked_share": 0.6, "layout": "mixed"}, range(4)),
}


def main(scenario: str, rank: int, size: int, folder: Path) -> None:
    """Train."""
    torch.set_num_threads(1)
    changes, batches, updates = SCENARIOS[scenario]
    config = type(LOUD)(**(vars(LOUD) | {"max_grad_norm": 1.0} | changes))
    ranks = Ranks.join(rank, size, "cpu", folder / f"meeting-{scenario}-{size}", "lo", lambda: None)
    policy, reference = (packed(tiny_model(seed=seed)) for seed in (0, 1))
    if scenario == "adapters":
        add_adapters(policy, Lora(rank=2), seed=0)
    policy, reference = ranks.shard(policy), ranks.shard(reference)
    optimizer = torch.optim.AdamW(trained_parameters(policy).values(), lr=1e-3)
    found = newest_checkpoint(folder / "checkpoints")
    if found is not None:
        restore(found[0], policy, optimizer)
    metrics = []
    for number in updates:
        batch = random_batch(number, **batches)
        metrics.append(update(batch, config, policy, reference, optimizer, ranks))
    writer = CheckpointWriter(folder / "checkpoints", 1, ranks.writers())
    writer.submit(take_snapshot(updates.stop, 0.0, policy, optimizer))
    writer.wait()
    weights = ranks.gather(policy)
    (folder / f"rank-{rank}.json").write_text(json.dumps(metrics))
    if ranks.leads:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "weights.safetensors")
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
