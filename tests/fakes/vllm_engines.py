"""vLLM engines with one precaution left out, which show what it is good for. Importing this imports vLLM."""

from pathlib import Path
from typing import Any, Literal

from vllm import LLMEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from seed_async.actors.engines.vllm_engine import VllmEngine
from seed_async.actors.engines.vllm_scoring import SoloScorer
from seed_async.actors.engines.vllm_weights import ARRAYS, ArrayTransferEngine
from seed_async.topology import Lora
from seed_async.topology_roles import VllmOptions

NOT_REFRESHED = "arrays_without_refresh"
Variant = Literal["whole", "keeps prefixes", "keeps packed head"]


class KeepsPrefixes(VllmEngine):
    """Does not empty its cache when the weights change."""

    def _forget_prefixes(self) -> None:
        pass


class KeepsPackedHead(ArrayTransferEngine):
    """Does not pack the output layer again when the weights change."""

    def refresh_packed_embeddings(self) -> None:
        """Leave it."""


class Stumbles:
    """vLLM's own engine, but for its steps: every one fails, also with a request just added."""

    def __init__(self, engine: LLMEngine) -> None:
        """Wrap it."""
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        """What does not fail."""
        return getattr(self._engine, name)

    def step(self) -> None:
        """Fail."""
        raise RuntimeError("stumbled")


def scorer_of(engine: VllmEngine, *, stumbles: bool = False) -> SoloScorer:
    """What an engine scores with."""
    return SoloScorer(Stumbles(engine._engine) if stumbles else engine._engine)


def open_variant(
    variant: Variant, folder: Path, *, options: VllmOptions, lora: Lora | None = None, **limits: int
) -> VllmEngine:
    """Open an engine on a checkpoint folder."""
    transfer = NOT_REFRESHED if variant == "keeps packed head" else ARRAYS
    if transfer == NOT_REFRESHED and NOT_REFRESHED not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NOT_REFRESHED, KeepsPackedHead)
    kind = KeepsPrefixes if variant == "keeps prefixes" else VllmEngine
    return kind(folder, options=options, array_transfer=transfer, lora=lora, **limits)
