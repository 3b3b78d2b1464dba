"""Checkpoints of verl's FSDP workers: one pickled file a rank, each with that rank's part of every tensor.

actor/model_world_size_4_rank_0.pt ...  fsdp_config.json  huggingface/ (configuration and tokenizer)
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from seed_async.learner.export import check_export, export_weights

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_MODEL_FOLDERS = ("huggingface", ".")


class ShardsError(ValueError):
    """A folder whose shards are no whole model that can be merged."""


def is_verl_checkpoint(folder: Path) -> bool:
    """Whether the folder holds shards of verl."""
    return any(_FILE.fullmatch(path.name) for path in folder.glob("model_world_size_*_rank_*.pt"))


def merge_verl_shards(folder: Path, out: Path, model_dir: Path | None = None, *, trust: bool) -> None:
    """Make a Hugging Face folder of the shards, checked by loading it again.

    The files are pickles: reading one may run code that is in it. torch's restricted reader, the one used here, allows
    tensors only, yet it is not proof against everything: nothing is read unless `trust` says so. `model_dir` has
    configuration and tokenizer; by default they lie beside the shards. Raises ShardsError.
    """
    if not trust:
        raise ShardsError(
            f"{folder} holds pickled files, which can run code when they are read: give --trust if you know their maker"
        )
    model_dir = model_dir or next(
        (folder / name for name in _MODEL_FOLDERS if (folder / name / "config.json").is_file()), None
    )
    if model_dir is None:
        raise ShardsError(f"{folder} has no huggingface/config.json: give --model with the model's configuration")
    shards = [torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in _files_by_rank(folder)]
    if different := {name for shard in shards for name in shard.keys() ^ shards[0].keys()}:
        raise ShardsError(f"{folder}: the ranks hold different tensors: {', '.join(sorted(different)[:5])}")
    weights = {name: join_shards(name, [shard[name] for shard in shards]) for name in shards[0]}
    check_export(export_weights(_untied(weights, model_dir), model_dir, out), out)


def _files_by_rank(folder: Path) -> list[Path]:
    found = {match: path for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))}
    sizes = {int(match[1]) for match in found}
    by_rank = {int(match[2]): path for match, path in found.items()}
    if len(sizes) != 1 or sorted(by_rank) != list(range(*sizes)):
        raise ShardsError(f"{folder}: files of ranks {sorted(by_rank)}, of a world size of {sorted(sizes)}")
    return [by_rank[rank] for rank in sorted(by_rank)]


def join_shards(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Put one tensor together from the parts of all ranks, in their order.

    Raises ShardsError for parts that are neither whole on each rank nor cut along one dimension over all of them.
    """
    if not any(isinstance(part, DTensor) for part in parts):
        return parts[0]
    placements = {part.placements if isinstance(part, DTensor) else None for part in parts}
    match placements.pop() if len(placements) == 1 else None:
        case (Replicate(),):
            return _local(parts[0])
        case (Shard(dim=dim),):
            joined = torch.cat([_local(part) for part in parts], dim=dim)
            if joined.shape != parts[0].shape:
                raise ShardsError(f"{name}: the parts make {list(joined.shape)}, not {list(parts[0].shape)}")
            return joined
    raise ShardsError(f"{name} is not cut along one dimension over all ranks; only plain FSDP is read")


def _local(part: torch.Tensor) -> torch.Tensor:
    # `to_local` asks the process group of the mesh, which is gone.
    local: torch.Tensor = part._local_tensor if isinstance(part, DTensor) else part
    return local


def _untied(weights: Mapping[str, torch.Tensor], model_dir: Path) -> dict[str, torch.Tensor]:
    """Without the second name of tied embeddings, which a state dictionary has and a model's parameters have not."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir, local_files_only=True).get_text_config()
    tied = getattr(config, "tie_word_embeddings", False)
    return {name: tensor for name, tensor in weights.items() if not (tied and name == "lm_head.weight")}
