"""Requests on their way into an engine: who may enter, who is next, and who is not wanted any more."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from seed_async.actors.engines.images import ImageFaultError, ImageReader, PlacedImage, PlacedPrompt, decode_image
from seed_async.ports import Generation, RequestKind, RequestRefusedError, Sampling


@dataclass(frozen=True)
class Request:
    """A request that was accepted; its prompt is the engine's own copy."""

    request_id: str
    prompt: PlacedPrompt
    sampling: Sampling

    @property
    def prompt_ids(self) -> np.ndarray:
        """Int [P], negative at the positions of images."""
        return self.prompt.ids

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images of the prompt."""
        return self.prompt.images

    def cancelled_before_start(self) -> Generation:
        """The answer to a request that never ran."""
        nothing = np.zeros(0, dtype=np.int32)
        return Generation(
            request_id=self.request_id,
            token_ids=nothing,
            logprobs=np.zeros(0, dtype=np.float32),
            versions=nothing,
            finish_reason="cancelled",
            prompt_tokens=self.prompt_ids.size,
            cached_tokens=0,
        )


class RequestQueue:
    """A bounded queue: first come first served within a kind, one of each kind in turn between them.

    It also knows the ids of the requests that it gave out, until `close` says that they have finished.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        max_waiting: int,
        min_temperature: float,
        stop_strings: bool,
        image_reader: ImageReader | None,
    ) -> None:
        """`context` tokens hold prompt and response; `min_temperature` is the smallest that is not greedy.

        `stop_strings`: whether the engine can find them. `image_reader`: None where the model takes no images.
        """
        self._vocabulary, self._context = vocabulary, context
        self._max_waiting, self._min_temperature = max_waiting, min_temperature
        self._stop_strings, self._image_reader = stop_strings, image_reader
        self._waiting: dict[RequestKind, deque[Request]] = {kind: deque() for kind in get_args(RequestKind)}
        self._turns: deque[RequestKind] = deque(self._waiting)
        self._open: set[str] = set()
        self._cancelled: set[str] = set()

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(len(queue) for queue in self._waiting.values())

    def add(
        self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, kind: RequestKind, images: Sequence[bytes]
    ) -> None:
        """Queue a request. Raises RequestRefusedError, naming the limit."""
        fault = self._fault(request_id, prompt_ids, sampling)
        if fault is not None:
            raise RequestRefusedError(f"request {request_id}: {fault}")
        try:
            prompt = self._place(prompt_ids.astype(np.int32), images)
        except ImageFaultError as error:
            raise RequestRefusedError(f"request {request_id}: {error}") from error
        self._waiting[kind].append(Request(request_id, prompt, sampling))
        self._open.add(request_id)

    def _place(self, prompt_ids: np.ndarray, images: Sequence[bytes]) -> PlacedPrompt:
        """The prompt with its images at their places. Raises ImageFaultError, also for one that cannot be decoded."""
        if self._image_reader is None:
            if images:
                raise ImageFaultError("this model takes no images")
            return PlacedPrompt(prompt_ids)
        prompt = self._image_reader.place(prompt_ids, images)
        if prompt.ids.size >= self._context:
            raise ImageFaultError(self._too_long(prompt.ids.size))
        for image in prompt.images:
            # Waiting requests keep the bytes only: pixels are many times as many.
            decode_image(image.content)
        return prompt

    def _too_long(self, num_tokens: int) -> str:
        return f"the prompt has {num_tokens} tokens, the context of {self._context} leaves no room for a response"

    def _fault(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling) -> str | None:
        """Why a request cannot be served, or None."""
        temperature, lowest = sampling.temperature, self._min_temperature
        if request_id in self._open:
            return "an earlier request with this id has not finished"
        if len(self) >= self._max_waiting:
            return f"{self._max_waiting} requests are waiting already"
        if prompt_ids.ndim != 1 or prompt_ids.size == 0 or not np.issubdtype(prompt_ids.dtype, np.integer):
            return f"the prompt is {prompt_ids.dtype}{list(prompt_ids.shape)}, not a row of one or more integer ids"
        if prompt_ids.size >= self._context:
            return self._too_long(prompt_ids.size)
        if prompt_ids.min() < 0 or prompt_ids.max() >= self._vocabulary:
            return f"a token id is outside the vocabulary of {self._vocabulary}"
        if sampling.max_new_tokens < 1:
            return f"max_new_tokens is {sampling.max_new_tokens}, not at least 1"
        if temperature != 0 and not lowest <= temperature < np.inf:
            return f"temperature {temperature} is neither 0 nor a finite number of at least {lowest}"
        if sampling.seed < 0:
            return f"seed {sampling.seed} is negative"
        if "" in sampling.stop:
            return "a stop string is empty"
        if sampling.stop and not self._stop_strings:
            return "the engine was opened without a tokenizer and cannot find stop strings"
        return None

    def take(self, most: int) -> Iterator[Request]:
        """Give out up to `most` requests, one of each kind in turn."""
        for _ in range(min(most, len(self))):
            while not self._waiting[self._turns[0]]:
                self._turns.rotate(-1)
            request = self._waiting[self._turns[0]].popleft()
            self._turns.rotate(-1)
            yield request

    def cancel(self, request_id: str) -> None:
        """Note that a request is not wanted any more; unknown ids are ignored."""
        if request_id in self._open:
            self._cancelled.add(request_id)

    def take_cancelled(self) -> tuple[list[Generation], set[str]]:
        """Drop the cancelled requests, once: the answers for those that waited, and the ids of those that run."""
        if not self._cancelled:
            return [], set()
        answers = []
        for kind, queue in self._waiting.items():
            answers += [each.cancelled_before_start() for each in queue if each.request_id in self._cancelled]
            self._waiting[kind] = deque(each for each in queue if each.request_id not in self._cancelled)
        running = self._cancelled - {answer.request_id for answer in answers}
        self._cancelled = set()
        return answers, running

    def close(self, finished: Iterable[Generation]) -> None:
        """Free the ids of requests that have finished."""
        self._open.difference_update(generation.request_id for generation in finished)
