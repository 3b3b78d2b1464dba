"""Stop strings: where the text of a response that grows by one id at a time first holds one of its request's strings.

Ids are decoded as they come and never encoded again, so the response keeps the ids that were sampled; it ends with the
one that completes the string, whatever else that token's text holds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from seed_async.ports import Generation, TextStream


@dataclass
class _Watched:
    strings: Sequence[str]
    stream: TextStream
    tail: str = ""


class StopStrings:
    """The requests of an engine that have stop strings; all others cost nothing."""

    def __init__(self, open_stream: Callable[[], TextStream] | None) -> None:
        """`open_stream` opens the text of one response; without it the engine knows ids only."""
        self._open_stream = open_stream
        self._watched: dict[str, _Watched] = {}

    @property
    def known(self) -> bool:
        """Whether requests may have stop strings."""
        return self._open_stream is not None

    @property
    def watching(self) -> bool:
        """Whether any request has stop strings."""
        return bool(self._watched)

    def watch(self, request_id: str, strings: Sequence[str]) -> None:
        """Begin with a request."""
        if strings and self._open_stream is not None:
            self._watched[request_id] = _Watched(strings, self._open_stream())

    def completed(self, request_id: str, token_id: int) -> bool:
        """Take the next sampled id; whether it completes a string."""
        watched = self._watched.get(request_id)
        if watched is None:
            return False
        text = watched.tail + watched.stream(token_id)
        longest = max(map(len, watched.strings))
        watched.tail = text[max(0, len(text) - longest + 1) :]
        return any(string in text for string in watched.strings)

    def forget(self, finished: Iterable[Generation]) -> None:
        """End with requests that have finished."""
        for generation in finished:
            self._watched.pop(generation.request_id, None)
