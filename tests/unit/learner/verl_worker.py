"""Writes the shards of a random model as verl's FSDP workers do.

python -m tests.unit.learner.verl_worker FOLDER RANK SIZE
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.unit.learner.builders import tiny_model


def main(folder: Path, rank: int, size: int) -> None:
    """Shard each layer and the rest, and save the state dictionary."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    model = tiny_model("qwen2")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.save(model.state_dict(), folder / f"model_world_size_{size}_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
