"""The seams of the system: Protocols of at most five methods, with the plain data that crosses them.

Implementations live with the role that runs them (engines in `actors/engines`, weight transports in
`seed_async/weights/`); the fakes of the tests implement the same Protocols.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

RequestKind = Literal["act", "analyse", "evaluate", "chat"]
FinishReason = Literal["stop", "length", "cancelled"]
TextStream = Callable[[int], str]
"""Takes the ids of one response one by one; returns the text that each adds, "" while a character is not whole."""


class RequestRefusedError(ValueError):
    """A request that the engine cannot serve: empty prompt, over the context, images for a text model, queue full."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample one response. Temperature 0 is greedy; `seed` makes the draw independent of the batch mix.

    The response ends with an id of `stop_ids`, or with the id whose text completes one of the strings `stop`.
    """

    temperature: float
    max_new_tokens: int
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response.

    `token_ids` is int32 [T] as sampled, the stop token included; `logprobs` is float32 [T], the log-prob of each
    sampled token at the sampling temperature (at temperature 1 when greedy); `versions` is int32 [T], the weight
    version that sampled each token; `prompt_tokens` counts the positions of the prompt, those of its images included,
    and `cached_tokens` those of them that were served from the prefix cache.
    """

    request_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine's load and counters since start."""

    version: int
    running: int
    waiting: int
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int


class Sampled(NamedTuple):
    """What a request has sampled so far: ids int32 [T] and their log-probs float32 [T], as in `Generation`."""

    token_ids: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def nothing(cls) -> "Sampled":
        """No token."""
        return cls(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))


class Streamer(Protocol):
    """An engine that shows what its requests have so far, for clients that read along."""

    def sampled(self, request_id: str) -> Sampled:
        """The tokens of a running request; none of one that waits or is unknown."""
        ...


class Scorer(Protocol):
    """An engine that tells log-probs of given tokens, so that its weights can be compared with the learner's."""

    def score(self, prompt_ids: np.ndarray, response_ids: np.ndarray) -> np.ndarray:
        """Log-probs float32 [T] at temperature 1 of `response_ids` int32 [T] after `prompt_ids` int32 [P].

        Computed by the engine's own forward pass between two steps, without any cached prefix; requests that run are
        not advanced.
        """
        ...


class Engine(Protocol):
    """A generation engine with continuous batching, advanced by its owner's loop. Not thread safe."""

    def submit(
        self,
        request_id: str,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        kind: RequestKind,
        images: Sequence[bytes] = (),
    ) -> None:
        """Queue a request; `prompt_ids` is int32 [P]. Raises RequestRefusedError, naming the limit.

        `images` are PNG or JPEG bytes in the order of their placeholders: `prompt_ids` holds exactly one placeholder id
        for each, as the chat template writes it. An image takes as many positions of the context as it has patches
        after merging.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Finish a request with reason `cancelled` at the next step; unknown ids are ignored."""
        ...

    def step(self) -> list[Generation]:
        """Advance every running request by one token and return those that finished; [] when idle."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, np.ndarray], *, rollback: bool = False) -> None:
        """Replace all weights between two steps. Running requests go on; tokens after it come from `version` alone.

        Of an engine that was opened for adapters `tensors` are all adapters, and the weights below them stay.
        Only a `rollback` may load a version that is not newer: what was loaded last has turned out wrong. Raises
        KeyError for a missing or unknown tensor name and ValueError for a wrong shape or dtype; then the old weights
        are still whole.
        """
        ...

    def health(self) -> EngineHealth:
        """Return the current load and counters."""
        ...


class ScoringEngine(Engine, Scorer, Protocol):
    """What a role needs that takes new weights."""


class ServingEngine(ScoringEngine, Streamer, Protocol):
    """What a policy server needs: what both engines are."""
