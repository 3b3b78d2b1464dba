"""Evaluation actor: plays the held-out panel through the policy servers, before, during and after training.

Consumes the run's state (buffer) and responses (policy servers). Waits for the next version that is due. Produces one
line of evaluations.jsonl each time. Unblocked by the learner's versions. Stops after the last version's evaluation, or
on SIGTERM. The learner makes no first update and does not end before the first and the last evaluation are in.
"""

import asyncio
import json
import time

from seed_async.actors.panel import choose_panel, play_panel, summarise_panel
from seed_async.actors.policy_client import PolicyClient
from seed_async.actors.rollout import EpisodePlayer, GenerationFailedError
from seed_async.envs.contract import GameFormatError, TaskNotFoundError
from seed_async.envs.isolation import open_host
from seed_async.envs.registry import open_suite
from seed_async.messages import EvaluationDone, RunState, RunStateRequest
from seed_async.role import RoleContext, run_until_stopped
from seed_async.text import ChatTokenizer
from seed_async.topology_roles import Evaluation

STATE_INTERVAL_S = 0.25
BUFFER_TIMEOUT_S = 60.0


class EvaluationActor:
    """The panel, a player with the plain prompt, and the versions that are due."""

    def __init__(self, context: RoleContext, settings: Evaluation) -> None:
        """Open the suite and choose the panel. Raises TaskNotFoundError for an unknown split."""
        topology, run_dir = context.topology, context.run_dir
        self._context, self._settings = context, settings
        self._suite = open_suite(topology.env)
        context.pulse.step()
        self._panel = choose_panel(self._suite.tasks(settings.split), settings.games)
        self._buffer = context.connect_async(run_dir.buffer_endpoint(topology), "buffer-0")
        servers = [
            context.connect_async(run_dir.policy_endpoint(topology, index), f"policy-{index}")
            for index in range(topology.roles.policy.replicas)
        ]
        self._policy = PolicyClient(
            servers, f"{context.name}:{context.incarnation}", context.metrics.counter("requests_moved_total").inc
        )
        self._player = EpisodePlayer(
            ChatTokenizer.load(run_dir.initial_model(topology)),
            self._policy,
            topology.rollout,
            temperature=settings.temperature,
            kind="evaluate",
        )
        self._evaluated = -1

    async def run(self) -> None:
        """Evaluate each version that is due until the last one is done."""
        await self._report_earlier()
        while True:
            state = await self._buffer.call(RunStateRequest(), BUFFER_TIMEOUT_S)
            if isinstance(state, RunState) and state.version >= 0:
                if self._due(state):
                    await self._evaluate(state)
                if state.finished:
                    return
            await asyncio.sleep(STATE_INTERVAL_S)

    def close(self) -> None:
        """Close the sockets."""
        self._policy.close()
        self._buffer.close()

    def _due(self, state: RunState) -> bool:
        if self._evaluated < 0 or (state.finished and state.version > self._evaluated):
            return True
        return self._settings.every > 0 and state.version >= self._evaluated + self._settings.every

    async def _evaluate(self, state: RunState) -> None:
        started_at_s = time.time()
        self._evaluated = state.version
        try:
            with self._context.timeline.span("evaluate", state.version):
                async with asyncio.timeout(self._settings.timeout_minutes * 60):
                    games = await play_panel(
                        self._player,
                        lambda: open_host(self._suite, self._context.topology.env),
                        self._panel,
                        self._settings.concurrency,
                        self._context.topology.run.seed,
                    )
        except* (TimeoutError, GenerationFailedError, GameFormatError, TaskNotFoundError) as failure:
            # Trying again would fail again, with the whole run waiting: the run goes on without this score.
            self._context.log.error(
                "evaluation given up", version=state.version, errors=list(map(str, failure.exceptions))
            )
            games = []
        if not games:
            await self._buffer.call(EvaluationDone(version=state.version, success=None), BUFFER_TIMEOUT_S)
            return
        line = summarise_panel(games, state.version, started_at_s, final=state.finished)
        with self._context.run_dir.evaluations.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._context.metrics.gauge("evaluation_success_ratio").set(line["success"])
        self._context.metrics.gauge("evaluation_games").set(line["games"])
        self._context.log.info("evaluated", version=state.version, won=line["won"], games=line["games"])
        await self._buffer.call(EvaluationDone(version=state.version, success=line["success"]), BUFFER_TIMEOUT_S)

    async def _report_earlier(self) -> None:
        """Repeat what an earlier incarnation evaluated: it may have died before the buffer knew, and the run waits."""
        path = self._context.run_dir.evaluations
        for text in path.read_text().splitlines() if path.is_file() else []:
            line = json.loads(text)
            self._evaluated = line["version"]
            await self._buffer.call(EvaluationDone(version=line["version"], success=line["success"]), BUFFER_TIMEOUT_S)


def run(context: RoleContext) -> None:
    """Run the evaluation actor."""
    settings = context.topology.roles.evaluation
    if settings is None:
        raise ValueError("roles.evaluation is null: nothing to evaluate")
    actor = EvaluationActor(context, settings)
    asyncio.run(run_until_stopped(context, actor.run()))
    actor.close()
