"""Opens the generation engine that a role asks for. An engine's libraries are imported only then."""

import os
from pathlib import Path

from seed_async.ports import ServingEngine
from seed_async.text import ChatTokenizer
from seed_async.topology import Lora
from seed_async.topology_roles import EngineRole

VLLM_REQUIRED = {
    # LLMEngine steps in this process: nothing runs between two steps, and its scheduler can be reached.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""What the engine cannot do without; another value that is already set is overridden."""
VLLM_DEFAULTS = {
    # Workers share the cores with the other roles; how many threads they have is said by OMP_NUM_THREADS.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads that wait must not spin (docs/performance.md).
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_NO_USAGE_STATS": "1",
    # Its warnings are many and about what is as it should be: layers without weights, kernels that only GPUs have.
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""What else vLLM reads from the environment; a value that is already set stays."""


def prepare_vllm(threads: int) -> None:
    """Set the environment of vLLM, which reads it when it is imported; `threads` go to each worker on the CPU.

    Nothing else in this process uses vLLM.
    """
    os.environ.update(VLLM_REQUIRED)
    for name, value in {**VLLM_DEFAULTS, "OMP_NUM_THREADS": str(threads)}.items():
        os.environ.setdefault(name, value)


def open_engine(
    settings: EngineRole,
    model: Path,
    tokenizer: ChatTokenizer,
    *,
    max_context_tokens: int,
    max_waiting: int = 1024,
    version: int = 0,
    lora: Lora | None = None,
) -> ServingEngine:
    """Load the checkpoint folder `model` into the engine of a role; its weights are called `version`.

    With `lora` later versions are adapters of this model, else whole models. Its `tokenizer` finds stop strings, the
    folder's image processor makes pixels. Raises ValueError when the installed vLLM is for another device.
    """
    if settings.engine == "vllm":
        prepare_vllm(settings.threads)
        from vllm.platforms import current_platform

        from seed_async.actors.engines.vllm_engine import VllmEngine

        if current_platform.is_cpu() != (settings.device == "cpu"):
            raise ValueError(f"device {settings.device}: the installed vLLM is for {current_platform.device_type}")
        return VllmEngine(
            model,
            max_slots=settings.max_slots,
            max_context_tokens=max_context_tokens,
            max_waiting=max_waiting,
            options=settings.vllm,
            version=version,
            open_stream=tokenizer.text_stream,
            lora=lora,
        )
    from seed_async.actors.engines.images import open_reader
    from seed_async.actors.engines.torch_engine import TorchEngine, load_model

    return TorchEngine(
        load_model(model, device=settings.device, lora=lora),
        max_slots=settings.max_slots,
        max_context_tokens=max_context_tokens,
        max_waiting=max_waiting,
        version=version,
        open_stream=tokenizer.text_stream,
        image_reader=open_reader(model),
    )
