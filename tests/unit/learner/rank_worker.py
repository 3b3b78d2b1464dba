"""One rank of a learner for the tests: the same updates on as many processes as asked for.

    python -m tests.unit.learner.rank_worker FOLDER SCENARIOS RANK SIZE

Writes `FOLDER/SCENARIO-SIZE-RANK.json` with the metrics of each update, and the leader the final weights. Scenario
`front` leaves a checkpoint below FOLDER, from which `rear` goes on: the halves of `whole`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from seed_async.adapters import add_adapters
from seed_async.learner.adapters import adapters_alone
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
    "adapters": ({}, WHOLE, range(4)),
    # Mini-batches smaller than the number of ranks, masked tokens, contexts of their own: ranks without work.
    "few": ({"mini_batch_trajectories": 2, "method": "opid"}, {"masked_share": 0.6, "layout": "mixed"}, range(4)),
}


def train(scenario: str, folder: Path, ranks: Ranks) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the metrics of every update and, on the leader, the final weights."""
    changes, batches, updates = SCENARIOS[scenario]
    config = type(LOUD)(**(vars(LOUD) | {"max_grad_norm": 1.0} | changes))
    policy, reference = (packed(tiny_model(seed=seed)) for seed in (0, 1))
    if scenario == "adapters":
        add_adapters(policy, Lora(rank=2), seed=0)
    policy, reference = ranks.shard(policy), ranks.shard(reference)
    optimizer = torch.optim.AdamW(trained_parameters(policy).values(), lr=1e-3)
    if scenario == "rear":
        found = newest_checkpoint(folder / "checkpoints")
        assert found is not None
        restore(found[0], policy, optimizer)
    metrics = []
    for number in updates:
        metrics.append(update(random_batch(number, **batches), config, policy, reference, optimizer, ranks))
    if scenario == "front":
        writer = CheckpointWriter(folder / "checkpoints", 1, ranks.writers())
        writer.submit(take_snapshot(updates.stop, 0.0, policy, optimizer))
        writer.wait()
    # The adapters are what `model.lora.publish: adapters` sends; the names of both differ.
    return metrics, ranks.gather(policy) | ranks.gather(policy, adapters_alone)


def main(folder: Path, scenarios: list[str], rank: int, size: int) -> None:
    """Train every scenario."""
    torch.set_num_threads(1)
    ranks = Ranks.join(rank, size, "cpu", folder / f"meeting-{size}", "lo", lambda: None)
    for scenario in scenarios:
        metrics, weights = train(scenario, folder, ranks)
        (folder / f"{scenario}-{size}-{rank}.json").write_text(json.dumps(metrics))
        if ranks.leads:
            tensors = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
            save_file(tensors, folder / f"{scenario}-{size}.safetensors")
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4]))
