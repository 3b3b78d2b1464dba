"""`seed-async evaluate`: plays the panel with a checkpoint, in one process, without a run."""

import asyncio
import contextlib
import json
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from seed_async.actors.engines.opening import open_engine
from seed_async.actors.panel import choose_panel, play_panel, summarise_panel
from seed_async.actors.rollout import EpisodePlayer
from seed_async.envs.isolation import open_host
from seed_async.envs.registry import open_suite
from seed_async.messages import GenerateReply
from seed_async.placement import CUDA_VISIBLE_DEVICES, visible_devices
from seed_async.ports import Engine, RequestKind, Sampling
from seed_async.text import ChatTokenizer
from seed_async.topology import Topology
from seed_async.topology_roles import Evaluation


class LocalGenerator:
    """Generates with an engine of this process; use as an asynchronous context manager."""

    def __init__(self, engine: Engine) -> None:
        """Take over `engine`, which nobody else may advance."""
        self._engine = engine
        self._numbers = count()
        self._open: dict[str, asyncio.Future[GenerateReply]] = {}
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LocalGenerator":
        """Start advancing the engine."""
        self._pump = asyncio.create_task(self._advance())
        self._pump.add_done_callback(self._fail_open)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; open requests are abandoned."""
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, kind: RequestKind) -> GenerateReply:
        """Sample one response. Raises RequestRefusedError."""
        request_id = str(next(self._numbers))
        self._engine.submit(request_id, prompt_ids, sampling, kind)
        self._open[request_id] = asyncio.get_running_loop().create_future()
        return await self._open[request_id]

    def _fail_open(self, pump: asyncio.Task[None]) -> None:
        """Hand the engine's failure to everyone who waits: a response that never comes would hang them."""
        error = None if pump.cancelled() else pump.exception()
        for future in self._open.values():
            if error is not None and not future.done():
                future.set_exception(error)

    async def _advance(self) -> None:
        while True:
            for done in self._engine.step():
                reply = GenerateReply(
                    request_id=done.request_id,
                    token_ids=done.token_ids,
                    logprobs=done.logprobs,
                    versions=done.versions,
                    finish_reason=done.finish_reason,
                    cached_tokens=done.cached_tokens,
                )
                future = self._open.pop(done.request_id)
                if not future.done():  # its asker may be cancelled
                    future.set_result(reply)
            await asyncio.sleep(0)


def evaluate_model(topology: Topology, model: Path, out: Path | None = None) -> dict[str, Any]:
    """Play the panel of `topology` with the checkpoint folder `model`; writes the result to `out` when given."""
    settings = topology.roles.evaluation or Evaluation()
    suite = open_suite(topology.env)
    panel = choose_panel(suite.tasks(settings.split), settings.games)
    policy = topology.roles.policy
    if policy.gpus:
        os.environ[CUDA_VISIBLE_DEVICES] = visible_devices(policy.gpus[: policy.gpus_each], os.environ)
    tokenizer = ChatTokenizer.load(model)
    engine = open_engine(policy, model, tokenizer, max_context_tokens=topology.rollout.max_context_tokens + 1)
    started_at_s = time.time()

    async def play() -> dict[str, Any]:
        async with LocalGenerator(engine) as generator:
            player = EpisodePlayer(
                tokenizer,
                generator,
                topology.rollout,
                temperature=settings.temperature,
                kind="evaluate",
            )
            games = await play_panel(
                player, lambda: open_host(suite, topology.env), panel, settings.concurrency, topology.run.seed
            )
        return summarise_panel(games, engine.health().version, started_at_s, final=True)

    result = asyncio.run(play())
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
    return result
