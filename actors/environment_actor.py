"""Environment actor: plays many games at once through the policy servers and streams trajectories to the buffer.

Consumes leases (buffer) and responses (policy servers). Waits for a lease while back-pressure holds. Produces one
trajectory, or one failure, for each lease. Unblocked by the buffer's admission gate. Stops on SIGTERM: leases in play
return by the next incarnation's hello or by their deadline.
"""

import asyncio
import time

from seed_async.actors.conversations import FALLBACK_NOTE, falls_back
from seed_async.actors.policy_client import PolicyClient
from seed_async.actors.rollout import Episode, EpisodePlayer, GenerationFailedError
from seed_async.envs.contract import GameFormatError, TaskNotFoundError
from seed_async.envs.isolation import EnvironmentFailedError, Host, open_host
from seed_async.envs.registry import open_suite, tasks_digest
from seed_async.messages import (
    NO_HELLO,
    Ack,
    ActorHello,
    Beat,
    EpisodeFailed,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Trajectory,
)
from seed_async.role import RoleContext, run_until_stopped
from seed_async.text import ChatTokenizer

BUFFER_TIMEOUT_S = 60.0
BEAT_INTERVAL_S = 1.0


class SupersededError(RuntimeError):
    """Another process has taken this actor's name; this one would wait for leases for ever."""


class EnvironmentActor:
    """One actor process: `games_each` players that share one tokenizer, one policy client and one buffer socket."""

    def __init__(self, context: RoleContext) -> None:
        """Open the suite and connect; nothing is played yet."""
        topology, run_dir = context.topology, context.run_dir
        self._context = context
        self._suite = open_suite(topology.env)
        context.pulse.step()
        self._tasks = tuple(self._suite.tasks(topology.env.split))
        self._buffer = context.connect_async(run_dir.buffer_endpoint(topology), "buffer-0")
        servers = [
            context.connect_async(run_dir.policy_endpoint(topology, index), f"policy-{index}")
            for index in range(topology.roles.policy.replicas)
        ]
        self._policy = PolicyClient(
            servers, f"{context.name}:{context.incarnation}", context.metrics.counter("requests_moved_total").inc
        )
        self._progress = 0
        tokenizer = ChatTokenizer.load(run_dir.initial_model(topology))
        if falls_back(tokenizer, topology.rollout):
            context.log.warning(FALLBACK_NOTE)
        self._player = EpisodePlayer(
            tokenizer,
            self._policy,
            topology.rollout,
            temperature=topology.rollout.temperature,
            kind="act",
            on_step=self._count_step,
        )

    async def run(self) -> None:
        """Say hello, then play until cancelled; the first failure of any part ends the process."""
        context = self._context
        await self._hello()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            for _ in range(context.topology.roles.actors.games_each):
                group.create_task(self._play_games())

    async def _hello(self) -> None:
        hello = ActorHello(
            actor=self._context.name,
            incarnation=self._context.incarnation,
            num_tasks=len(self._tasks),
            tasks_digest=tasks_digest(self._tasks),
        )
        await self._buffer.call(hello, BUFFER_TIMEOUT_S)

    def close(self) -> None:
        """Close the sockets."""
        self._policy.close()
        self._buffer.close()

    async def _play_games(self) -> None:
        host = open_host(self._suite, self._context.topology.env)
        try:
            await self._play_on(host)
        finally:
            host.close()

    async def _play_on(self, host: Host) -> None:
        while True:
            request = LeaseRequest(actor=self._context.name, incarnation=self._context.incarnation, slots=1)
            grant = await self._buffer.call(request, BUFFER_TIMEOUT_S)
            if isinstance(grant, Ack) and grant.status == "fenced":
                raise SupersededError(grant.detail)
            if isinstance(grant, Ack) and grant.detail == NO_HELLO:  # the buffer has started again
                await self._hello()
            for lease in grant.leases if isinstance(grant, LeaseGrant) else ():
                await self._play_lease(host, lease)

    async def _play_lease(self, host: Host, lease: Lease) -> None:
        started_at_s = time.time()
        task_id = self._tasks[lease.task_index]
        try:
            with self._context.timeline.span("act", -1):
                episode = await self._player.play(host, task_id, lease.seed)
        except (GameFormatError, TaskNotFoundError, GenerationFailedError) as error:
            # One bad game costs one episode, never the actor; the buffer counts it and quarantines repeats.
            kind = error.kind if isinstance(error, EnvironmentFailedError) else type(error).__name__
            self._context.metrics.counter("episodes_failed_total", kind=kind).inc()
            self._context.log.warning("episode failed", task=task_id, error=str(error))
            await self._buffer.call(
                EpisodeFailed(lease_id=lease.lease_id, incarnation=self._context.incarnation, reason=str(error)),
                BUFFER_TIMEOUT_S,
            )
            return
        ack = await self._buffer.call(self._trajectory(lease, task_id, episode, started_at_s), BUFFER_TIMEOUT_S)
        if isinstance(ack, Ack) and ack.status in ("fenced", "refused"):
            self._context.log.warning(
                "trajectory not taken", lease=lease.lease_id, status=ack.status, detail=ack.detail
            )
        self._count_episode(episode, time.time() - started_at_s)

    def _trajectory(self, lease: Lease, task_id: str, episode: Episode, started_at_s: float) -> Trajectory:
        return Trajectory.of(
            episode.turns,
            trajectory_id=f"{lease.lease_id}-{self._context.incarnation}",
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            member=lease.member,
            actor=self._context.name,
            incarnation=self._context.incarnation,
            task_id=task_id,
            task=episode.task,
            task_type=episode.task_type,
            vocabulary=self._context.topology.env.vocabulary,
            task_line=episode.task_line,
            status=episode.status,
            episode_return=episode.episode_return,
            started_at_s=started_at_s,
            ended_at_s=time.time(),
        )

    async def _beat(self) -> None:
        while True:
            # The beat comes from the loop that plays: a blocked environment stops it, and waiting for a policy server
            # that starts again is no hang.
            self._progress += 1
            beat = Beat(actor=self._context.name, incarnation=self._context.incarnation, progress=self._progress)
            await self._buffer.call(beat, BUFFER_TIMEOUT_S)
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _count_step(self) -> None:
        self._progress += 1
        self._context.metrics.counter("environment_steps_total").inc()

    def _count_episode(self, episode: Episode, seconds: float) -> None:
        metrics = self._context.metrics
        metrics.counter("episodes_total", outcome=episode.status).inc()
        metrics.counter("invalid_actions_total").inc(sum(not turn.valid for turn in episode.turns))
        metrics.histogram("episode_seconds").observe(seconds)


def run(context: RoleContext) -> None:
    """Run one environment actor."""
    actor = EnvironmentActor(context)
    asyncio.run(run_until_stopped(context, actor.run()))
    actor.close()
