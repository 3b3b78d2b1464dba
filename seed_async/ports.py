"""The seams of the system: Protocols of at most five methods, with the plain data that crosses them.

Implementations live with the role that runs them (engines in `actors/engines`, weight transports in
`seed_async/weights/`); the fakes of the tests implement the same Protocols.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec
import numpy as np

RequestKind = Literal["act", "analyse", "evaluate"]
FinishReason = Literal["stop", "length", "cancelled"]


class RequestRefusedError(ValueError):
    """A generation request that the engine cannot serve: empty prompt, over the context length, queue full."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample one response. Temperature 0 is greedy; `seed` makes the draw independent of the batch mix."""

    temperature: float
    max_new_tokens: int
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response.

    `token_ids` is int32 [T] as sampled, the stop token included; `logprobs` is float32 [T], the log-prob of each
    sampled token at the sampling temperature (at temperature 1 when greedy); `versions` is int32 [T], the weight
    version that sampled each token; `cached_tokens` counts prompt tokens served from the prefix cache.
    """

    request_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    cached_tokens: int


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine's load and counters since start."""

    version: int
    running: int
    waiting: int
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int


class Engine(Protocol):
    """A generation engine with continuous batching, advanced by its owner's loop. Not thread safe."""

    def submit(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, kind: RequestKind) -> None:
        """Queue a request; `prompt_ids` is int32 [P]. Raises RequestRefusedError, naming the limit."""
        ...

    def cancel(self, request_id: str) -> None:
        """Finish a request with reason `cancelled` at the next step; unknown ids are ignored."""
        ...

    def step(self) -> list[Generation]:
        """Advance every running request by one token and return those that finished; [] when idle."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Replace all weights between two steps. Running requests go on; tokens after it come from `version` alone.

        Raises KeyError for a missing or unknown tensor name and ValueError for a wrong shape or dtype; then the old
        weights are still whole.
        """
        ...

    def health(self) -> EngineHealth:
        """Return the current load and counters."""
        ...
