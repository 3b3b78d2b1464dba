"""The asking side of the policy servers, for asyncio roles."""

from itertools import count

import numpy as np

from seed_async.actors.rollout import SEEDS_AN_EPISODE, GenerationFailedError
from seed_async.messages import GenerateReply, GenerateRequest
from seed_async.ports import RequestKind, Sampling
from seed_async.transport import AsyncClient

GENERATE_TIMEOUT_S = 300.0
"""A response on a busy laptop takes seconds; a server that is silent for this long is reported, not waited for."""


class PolicyClient:
    """Sends each request to one of the policy servers, in turn; a restarted server gets its open requests again."""

    def __init__(self, clients: list[AsyncClient], name: str) -> None:
        """Take over a client of every server; `name` makes request ids unique."""
        self._clients = clients
        self._name, self._numbers = name, count()

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, kind: RequestKind) -> GenerateReply:
        """Sample one response. Raises GenerationFailedError when the server refuses the request."""
        number = next(self._numbers)
        request = GenerateRequest(
            request_id=f"{self._name}:{number}", prompt_ids=prompt_ids, sampling=sampling, kind=kind
        )
        # Episodes keep to one server by the seed of their sampling, so that their prefix stays cached there.
        client = self._clients[sampling.seed // SEEDS_AN_EPISODE % len(self._clients)]
        reply = await client.call(request, GENERATE_TIMEOUT_S)
        if not isinstance(reply, GenerateReply) or reply.error or not reply.token_ids.size:
            raise GenerationFailedError(getattr(reply, "error", "") or f"unexpected answer {type(reply).__name__}")
        return reply

    def close(self) -> None:
        """Close the sockets."""
        for client in self._clients:
            client.close()
