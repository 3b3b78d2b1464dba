"""Buffer server: the one place through which leases, trajectories, skills and batches pass.

Consumes hellos, lease requests, beats, trajectories, skills, batch requests and evaluation results. Waits for messages
only; a request that cannot be answered yet (no lease, no job, no batch) is held and looked at again after each message.
Produces leases, analysis jobs and batches. Unblocked by any message and by the clock. Stops on SIGTERM and then writes
the run's accounting.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from seed_async.journal import Entry, Journal, read_journal
from seed_async.learner.buffer import GroupBuffer
from seed_async.learner.ledger import Fate
from seed_async.learner.recovery import recover
from seed_async.messages import (
    NO_HELLO,
    Ack,
    ActorHello,
    AnalysisJobs,
    AnalysisRequest,
    Batch,
    BatchRequest,
    Beat,
    EpisodeFailed,
    EvaluationDone,
    Finished,
    LearnerStarted,
    LeaseGrant,
    LeaseRequest,
    Message,
    RunFinished,
    RunState,
    RunStateRequest,
    Sample,
    SkillResult,
    Trajectory,
)
from seed_async.pulse import Pulse
from seed_async.reporting import report_buffer
from seed_async.role import RoleContext
from seed_async.skill_library import library_of
from seed_async.text import read_vocabulary_size
from seed_async.transport import Request

HOLD_S = 2.0
"""How long a request without an answer is held; the asker then gets an empty answer and asks again."""
POLL_S = 0.05
ENTRIES_A_STEP = 100_000
"""Of a journal that is read again; a step takes less than a second."""
TICK_INTERVAL_S = 0.5
"""How often deadlines are looked at and metrics brought up to date."""


class BufferServer:
    """A GroupBuffer behind a socket, the run's state, and the record of every trajectory."""

    def __init__(self, context: RoleContext) -> None:
        """Bind; nothing is granted before a first version is acknowledged."""
        self._context = context
        self._server = context.serve(context.run_dir.buffer_endpoint(context.topology))
        journal = context.run_dir.journal
        recovered = recover(_with_steps(context.pulse, read_journal(journal))) if journal.is_file() else None
        self._journal = Journal(journal)
        self._buffer = GroupBuffer(
            context.topology,
            read_vocabulary_size(context.run_dir.initial_model(context.topology)),
            self._record,
            library_of(context.topology),
            self._journal.add,
            recovered,
        )
        self._records = context.run_dir.trajectories.open("ab")
        self._encoder = msgspec.json.Encoder()
        self._held: list[tuple[float, Request]] = []
        self._finished = False
        self._gate_closed = False
        self._evaluated: set[int] = recovered.evaluated if recovered else set()
        self._last_tick_s = 0.0
        self._handlers: dict[type[Message], Callable[[Any], Message | None]] = {
            ActorHello: self._hello,
            LeaseRequest: self._lease,
            Beat: self._beat,
            Trajectory: self._trajectory,
            EpisodeFailed: self._failed,
            AnalysisRequest: self._analysis,
            SkillResult: self._skill,
            LearnerStarted: self._learner_started,
            BatchRequest: self._batch,
            RunFinished: self._run_finished,
            RunStateRequest: lambda _: RunState(version=self._buffer.version, finished=self._finished),
            EvaluationDone: self._evaluation_done,
        }

    def run(self) -> None:
        """Answer until told to stop."""
        while not self._context.stop.is_set():
            self._context.pulse.beat()
            now_s = time.monotonic()
            for request in self._server.poll(POLL_S):
                self._held.append((now_s + HOLD_S, request))
            self._tick(now_s)
            self._answer_held()
        self._buffer.close()
        self._records.close()
        self._journal.close()
        self._context.run_dir.counts.write_text(json.dumps(self._buffer.accounting(), indent=2) + "\n")
        self._server.close()

    def _answer_held(self) -> None:
        """Answer what can be answered: first all of it is in the journal, in one write, then the replies leave.

        In one burst they also wake the sockets' thread once and not each for itself.
        """
        self._gate_closed = False
        answers = [
            (self._answer(request.message, deadline_s), deadline_s, request) for deadline_s, request in self._held
        ]
        self._journal.commit()
        self._held = [(deadline_s, request) for answer, deadline_s, request in answers if answer is None]
        for answer, _, request in answers:
            if answer is not None:
                request.reply(answer)

    def _answer(self, message: Message, deadline_s: float) -> Message | None:
        handler = self._handlers.get(type(message))
        if handler is None:
            return Ack(status="refused", detail=f"the buffer does not take {type(message).__name__}")
        answer = handler(message)
        if answer is None and time.monotonic() > deadline_s:
            return _EMPTY_ANSWERS[type(message)](message)
        return answer

    def _tick(self, now_s: float) -> None:
        if now_s - self._last_tick_s < TICK_INTERVAL_S:
            return
        self._last_tick_s = now_s
        self._buffer.expire(now_s)
        report_buffer(self._context.metrics, self._buffer.accounting(), self._buffer.analysis_backlog)

    # Handlers: a message in, its answer out, None for "not yet" -------------------------------------------------

    def _hello(self, message: ActorHello) -> Message:
        self._buffer.hello(message.actor, message.incarnation, message.num_tasks, message.tasks_digest)
        self._context.log.info("actor", actor=message.actor, incarnation=message.incarnation, tasks=message.num_tasks)
        return Ack()

    def _lease(self, message: LeaseRequest) -> Message | None:
        if not self._buffer.knows(message.actor):
            return Ack(status="refused", detail=NO_HELLO)
        if self._buffer.is_superseded(message.actor, message.incarnation):
            return Ack(status="fenced", detail=f"another incarnation of {message.actor} has said hello")
        # Thousands of games may wait: when one gets nothing, the others are not asked for in this turn.
        if self._gate_closed:
            return None
        leases = self._buffer.grant(message.actor, message.incarnation, message.slots, time.monotonic())
        self._gate_closed = not leases
        return LeaseGrant(leases=leases) if leases else None

    def _beat(self, message: Beat) -> Message:
        self._buffer.beat(message.incarnation, message.progress, time.monotonic())
        return Ack()

    def _trajectory(self, message: Trajectory) -> Message:
        status, detail = self._buffer.submit(message, time.monotonic())
        if status == "refused":
            self._context.log.warning("trajectory refused", trajectory=message.trajectory_id, detail=detail)
        return Ack(status=status, detail=detail)

    def _failed(self, message: EpisodeFailed) -> Message:
        self._context.log.warning("episode failed", lease=message.lease_id, reason=message.reason)
        held = self._buffer.fail(message.lease_id, message.incarnation, message.reason)
        return Ack(status="accepted" if held else "fenced")

    def _analysis(self, message: AnalysisRequest) -> Message | None:
        jobs = self._buffer.claim_analyses(message.max_jobs, time.monotonic())
        return AnalysisJobs(trajectories=jobs) if jobs else None

    def _skill(self, message: SkillResult) -> Message:
        return Ack(status=self._buffer.add_skill(message))

    def _learner_started(self, message: LearnerStarted) -> Message:
        self._buffer.expect(message.version)
        return Ack()

    def _batch(self, message: BatchRequest) -> Message | None:
        self._buffer.advance(message.version)
        # The score before training is that of version 0, so version 0 stays until it is known.
        if self._context.topology.roles.evaluation is not None and not self._evaluated:
            return None
        samples = self._buffer.take_batch(message.version)
        return Batch(version=message.version, samples=samples) if samples else None

    def _run_finished(self, message: RunFinished) -> Message | None:
        self._buffer.advance(message.version)
        self._finished = True
        if self._context.topology.roles.evaluation is None or message.version in self._evaluated:
            return Finished(done=True)
        return None

    def _evaluation_done(self, message: EvaluationDone) -> Message:
        self._evaluated.add(message.version)
        self._journal.add("evaluated", version=message.version)
        return Ack()

    # Record and metrics -----------------------------------------------------------------------------------------

    def _record(self, sample: Sample, fate: Fate, version: int, age: int) -> None:
        trajectory = sample.trajectory
        line = {
            "trajectory_id": trajectory.trajectory_id,
            "group_id": trajectory.group_id,
            "task_id": trajectory.task_id,
            "task": trajectory.task,
            "task_type": trajectory.task_type,
            "vocabulary": trajectory.vocabulary,
            "actor": trajectory.actor,
            "status": trajectory.status,
            "return": trajectory.episode_return,
            "fate": fate,
            "at_version": version,
            "age": age,
            "versions": [trajectory.oldest_version, trajectory.newest_version],
            "skill": sample.skill.episode_skill if sample.skill else None,
            "skill_summary": sample.skill.episode_summary if sample.skill else None,
            "skill_version": sample.skill.version if sample.skill else None,
            "skill_reason": sample.skill_reason,
            "turns": [
                {"observation": text.observation, "response": text.response, "valid": text.valid}
                for text in trajectory.texts
            ],
        }
        self._records.write(self._encoder.encode(line) + b"\n")
        if fate == "trained":
            ages = {
                "in_flight": trajectory.newest_version - trajectory.oldest_version,
                "in_queue": version - trajectory.newest_version,
                "total": age,
            }
            for stage, versions in ages.items():
                self._context.metrics.histogram("trajectory_age_versions", stage=stage).observe(versions)


def _with_steps(pulse: Pulse, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Pass a journal on, with signs of life: one of ten million trajectories takes minutes to read."""
    for number, entry in enumerate(entries):
        if number % ENTRIES_A_STEP == 0:
            pulse.step()
        yield entry


_EMPTY_ANSWERS: dict[type[Message], Callable[[Any], Message]] = {
    LeaseRequest: lambda _: LeaseGrant(leases=()),
    AnalysisRequest: lambda _: AnalysisJobs(trajectories=()),
    BatchRequest: lambda message: Batch(version=message.version, samples=()),
    RunFinished: lambda _: Finished(done=False),
}


def run(context: RoleContext) -> None:
    """Run the buffer."""
    BufferServer(context).run()
