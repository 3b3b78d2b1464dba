"""Analyzer worker: turns finished trajectories into hindsight skills with the newest weights.

Consumes finished trajectories (buffer) and weight versions (publisher). Waits for the first version, then for jobs.
Produces one skill, or the reason why there is none, for each trajectory. Unblocked by the buffer and the publisher.
Stops on SIGTERM; what it had claimed is claimed again by another. With method seed_static it keeps the initial
checkpoint, which is version 0, and asks for no weights, so that a restarted analyzer has the same ones.
"""

import time
from dataclasses import dataclass

from seed_async.actors.engines.opening import open_engine
from seed_async.actors.weight_loader import WeightLoader, open_loader
from seed_async.analysis_prompts import Outcome, StepText, analysis_prompt
from seed_async.messages import AnalysisJobs, AnalysisRequest, Skill, SkillResult, Trajectory
from seed_async.ports import Generation, RequestRefusedError, Sampling
from seed_async.reporting import report_engine
from seed_async.role import RoleContext
from seed_async.skills import parse_analysis
from seed_async.text import ChatTokenizer
from seed_async.topology import Analysis, Topology
from seed_async.weights import WeightReceiver, open_receiver

IDLE_WAIT_S = 0.05


def outcome_of(trajectory: Trajectory) -> Outcome:
    """The label of a finished trajectory."""
    return "success" if trajectory.won else "failure"


def analysis_text(
    trajectory: Trajectory, settings: Analysis, tokenizer: ChatTokenizer, max_step_skills: int = 0
) -> str | None:
    """The analyzer's user message for a trajectory, or None when it cannot be made to fit."""
    room = settings.max_context_tokens - settings.max_output_tokens
    steps = [StepText(text.observation, text.response.strip(), text.valid) for text in trajectory.texts]
    return analysis_prompt(
        settings.prompt_style,
        trajectory.task,
        outcome_of(trajectory),
        steps,
        lambda text: tokenizer.first_prompt(text).size <= room,
        step_skills=max_step_skills,
    )


def read_skill(output: str, num_steps: int, version: int, max_step_skills: int = 0) -> Skill | None:
    """The skill in an analyzer's output about a trajectory of `num_steps`, or None when it does not parse."""
    parsed = parse_analysis(output, num_steps, max_step_skills)
    return parsed and Skill(
        episode_summary=parsed.episode_summary,
        episode_skill=parsed.episode_skill,
        version=version,
        step_skills=parsed.step_skills,
    )


def first_version(topology: Topology) -> int:
    """The version of the weights that an analyzer starts with: -1, none, or 0 where it keeps the initial ones."""
    return 0 if topology.pins_analyzer else -1


@dataclass(frozen=True)
class _Job:
    trajectory: Trajectory
    version: int
    started_at_s: float


class Analyzer:
    """One engine, filled with analysis jobs; each starts at the newest version known."""

    def __init__(self, context: RoleContext) -> None:
        """Load the initial checkpoint; its weights are replaced before the first job, unless the method keeps them."""
        topology, run_dir = context.topology, context.run_dir
        self._context = context
        self._settings, self._max_step_skills = topology.analysis, topology.max_step_skills
        self._tokenizer = ChatTokenizer.load(run_dir.initial_model(topology))
        self._engine = open_engine(
            topology.roles.analyzers,
            run_dir.initial_model(topology),
            self._tokenizer,
            max_context_tokens=topology.analysis.max_context_tokens,
            version=first_version(topology),
            lora=topology.model.served_adapters,
        )
        context.pulse.step()
        self._weights: WeightReceiver | None = None
        self._loader: WeightLoader | None = None
        if topology.pins_analyzer:
            context.metrics.gauge("policy_version").set(first_version(topology))
        else:
            self._weights = open_receiver(context, "analyzer")
            self._loader = open_loader(context, topology.roles.analyzers, self._engine, self._weights)
        self._buffer = context.connect(run_dir.buffer_endpoint(topology), "buffer-0")
        self._claim: int | None = None
        self._running: dict[str, _Job] = {}

    def run(self) -> None:
        """Analyse until told to stop."""
        while not self._context.stop.is_set():
            self._context.pulse.beat()
            version = self._take_weights()
            if version < 0:
                continue
            if self._weights is None or version >= self._weights.pinned:
                self._claim_jobs(version)
                for trajectory in self._claimed_jobs():
                    self._start(trajectory, version)
            for generation in self._engine.step():
                self._finish(generation)
            report_engine(self._context.metrics, self._engine.health())
        self._buffer.close()
        if self._weights is not None:
            self._weights.close()

    def _take_weights(self) -> int:
        if self._weights is None or self._loader is None:
            return self._engine.health().version
        idle = not self._running and self._loader.version < 0
        update = self._weights.poll(IDLE_WAIT_S if idle else 0.0)
        if update is not None and self._loader.load(update) and self._settings.on_new_version == "restart":
            for trajectory_id in self._running:
                self._engine.cancel(trajectory_id)
        return self._loader.version

    def _claim_jobs(self, version: int) -> None:
        free = self._context.topology.roles.analyzers.max_slots - len(self._running)
        if self._claim is None and free > 0:
            self._claim = self._buffer.submit(AnalysisRequest(analyzer=self._context.name, max_jobs=free))

    def _claimed_jobs(self) -> tuple[Trajectory, ...]:
        jobs: tuple[Trajectory, ...] = ()
        for sequence, reply in self._buffer.poll(0.0 if self._running else IDLE_WAIT_S):
            if sequence == self._claim:
                self._claim, jobs = None, reply.trajectories if isinstance(reply, AnalysisJobs) else ()
        return jobs

    def _start(self, trajectory: Trajectory, version: int) -> None:
        if trajectory.trajectory_id in self._running:
            return  # this worker is slow and was offered its own claim again
        text = analysis_text(trajectory, self._settings, self._tokenizer, self._max_step_skills)
        if text is None:
            self._submit(trajectory.trajectory_id, None, "", version, "too_long")
            return
        sampling = Sampling(
            temperature=0.0, max_new_tokens=self._settings.max_output_tokens, stop_ids=self._tokenizer.eos_ids
        )
        prompt_ids = self._tokenizer.first_prompt(text)
        try:
            self._engine.submit(trajectory.trajectory_id, prompt_ids, sampling, "analyse")
        except RequestRefusedError as error:
            self._context.log.warning("analysis refused", trajectory=trajectory.trajectory_id, error=str(error))
            self._submit(trajectory.trajectory_id, None, "", version, "refused")
        else:
            self._running[trajectory.trajectory_id] = _Job(trajectory, version, time.time())

    def _finish(self, generation: Generation) -> None:
        job = self._running.pop(generation.request_id)
        trajectory = job.trajectory
        self._context.timeline.record("analyse", job.started_at_s, time.time(), job.version)
        if generation.finish_reason == "cancelled":  # by a new version, which does it again
            self._start(trajectory, self._engine.health().version)
            return
        output = self._tokenizer.decode(generation.token_ids)
        skill = read_skill(output, len(trajectory.texts), job.version, self._max_step_skills)
        self._submit(trajectory.trajectory_id, skill, output, job.version, "" if skill else "unparsed")

    def _submit(self, trajectory_id: str, skill: Skill | None, output: str, version: int, reason: str) -> None:
        # Not waited for: the client resends it until the buffer has answered.
        self._buffer.submit(
            SkillResult(
                analyzer=self._context.name,
                trajectory_id=trajectory_id,
                skill=skill,
                output=output,
                version=version,
                reason=reason,
            )
        )


def run(context: RoleContext) -> None:
    """Run one analyzer."""
    import torch

    torch.set_num_threads(context.topology.roles.analyzers.threads)
    Analyzer(context).run()
