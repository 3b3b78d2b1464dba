"""Every message of the system: frozen, versioned, plain data.

Log-probs have one name each: `behaviour_logprob` sampled the token; `proximal_logprob`, `current_logprob`,
`reference_logprob` and `skill_logprob` exist inside the learner only. Arrays travel as their own frames.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from seed_async.ports import FinishReason, RequestKind, Sampling

PROTOCOL_VERSION = 5

TrajectoryStatus = Literal["won", "lost", "truncated"]
WeightsPhase = Literal["idle", "transfer", "verify", "resume"]
Refusal = Literal["", "digest", "canary"]
AckStatus = Literal["accepted", "duplicate", "fenced", "refused"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of everything that crosses a socket; the struct's name is its tag."""


# Any role, answered by any server ------------------------------------------------------------------------------


class Ack(Message, frozen=True):
    """The receiver has taken over responsibility for the message, or says why not."""

    status: AckStatus = "accepted"
    detail: str = ""


# Environment actor <-> buffer ------------------------------------------------------------------------------------


NO_HELLO = "say hello first"
"""Why a buffer that has started again refuses an actor's requests."""


class ActorHello(Message, frozen=True):
    """Sent once an incarnation, before anything else: leases of the actor's earlier incarnations return at once.

    `num_tasks` and `tasks_digest` describe the training split as this actor sees it; all actors must agree.
    """

    actor: str
    incarnation: str
    num_tasks: int
    tasks_digest: str


class LeaseRequest(Message, frozen=True):
    """Ask for up to `slots` members to play; the answer waits while back-pressure holds."""

    actor: str
    incarnation: str
    slots: int


class Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The right to play one member of a group; `task_index` is into the training split."""

    lease_id: str
    group_id: str
    member: int
    task_index: int
    seed: int


class LeaseGrant(Message, frozen=True):
    """Leases now held by the asking incarnation; empty when none could be granted within the wait."""

    leases: tuple[Lease, ...]


class Beat(Message, frozen=True):
    """An application heartbeat; `progress` counts what the playing loop did, so a hung actor does not look alive."""

    actor: str
    incarnation: str
    progress: int


class EpisodeFailed(Message, frozen=True):
    """A lease that ended without a trajectory; it is granted again, up to the retry limit."""

    lease_id: str
    incarnation: str
    reason: str


class TurnText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The readable side of one environment step.

    `opening` is the text of the user message of a turn that opens a new context, and empty where the turn continues the
    context of the one before. `whole_chat`: the context opened holds all turns before as messages too, rendered anew
    (see `contexts.opening_prompt`). `parsed`: one action was found in the response, an admissible one if the topology
    asks for that; `valid`: the environment understood it as well.
    """

    observation: str
    response: str
    action: str
    parsed: bool
    valid: bool
    opening: str = ""
    whole_chat: bool = False


class Turn(TurnText, frozen=True, kw_only=True, gc=False):
    """One environment step with its tokens.

    `prompt_ids` int32 [P] are the ids appended before the response, or the whole prompt where the turn opens a context.
    `response_ids` int32 [T] are the sampled ids, `behaviour_logprob` float32 [T], `versions` int32 [T].
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    behaviour_logprob: np.ndarray
    versions: np.ndarray


class Trajectory(Message, frozen=True, gc=False):
    """A finished episode, ids kept as sampled; its first turn opens a context, and so may later ones.

    `task_line` is the line of each opening message that holds the task: where a skill is inserted. `episode_return` is
    the sum of unscaled rewards. The tokens of all turns lie side by side in one array each, int32 `prompt_ids` [P],
    int32 `response_ids`, float32 `behaviour_logprob` and int32 `versions` [R]: whoever passes trajectories on handles
    four arrays and not four a turn. `prompt_lengths` and `response_lengths` cut them into `turns`.
    """

    trajectory_id: str
    lease_id: str
    group_id: str
    member: int
    actor: str
    incarnation: str
    task_id: str
    task: str
    task_type: str
    vocabulary: str
    task_line: str
    texts: tuple[TurnText, ...]
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    behaviour_logprob: np.ndarray
    versions: np.ndarray
    status: TrajectoryStatus
    episode_return: float
    started_at_s: float
    ended_at_s: float

    @classmethod
    def of(cls, turns: Sequence[Turn], **fields: Any) -> "Trajectory":
        """Return the trajectory of `turns`; `fields` are the others. Raises ValueError without a turn."""
        return cls(
            texts=tuple(
                TurnText(**{name: getattr(turn, name) for name in TurnText.__struct_fields__}) for turn in turns
            ),
            prompt_lengths=tuple(turn.prompt_ids.size for turn in turns),
            response_lengths=tuple(turn.response_ids.size for turn in turns),
            prompt_ids=np.concatenate([turn.prompt_ids for turn in turns]),
            response_ids=np.concatenate([turn.response_ids for turn in turns]),
            behaviour_logprob=np.concatenate([turn.behaviour_logprob for turn in turns]),
            versions=np.concatenate([turn.versions for turn in turns]),
            **fields,
        )

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns, their arrays as views; made anew at each call. The buffer has seen to it that the lengths fit."""
        prompts = np.split(self.prompt_ids, np.cumsum(self.prompt_lengths)[:-1])
        ends = np.cumsum(self.response_lengths)[:-1]
        columns = (np.split(column, ends) for column in (self.response_ids, self.behaviour_logprob, self.versions))
        return tuple(
            Turn(
                **{name: getattr(text, name) for name in TurnText.__struct_fields__},
                prompt_ids=prompt,
                response_ids=response,
                behaviour_logprob=logprob,
                versions=versions,
            )
            for text, prompt, response, logprob, versions in zip(self.texts, prompts, *columns, strict=True)
        )

    @property
    def oldest_version(self) -> int:
        """The version of the oldest sampled token: what the trajectory's age counts from."""
        return int(self.versions.min())

    @property
    def newest_version(self) -> int:
        """The version of the newest sampled token."""
        return int(self.versions.max())

    @property
    def won(self) -> bool:
        """Whether the environment declared the episode won."""
        return self.status == "won"


# Analyzer <-> buffer ---------------------------------------------------------------------------------------------


class AnalysisRequest(Message, frozen=True):
    """Ask for up to `max_jobs` finished trajectories to analyse; the answer waits until there is one."""

    analyzer: str
    max_jobs: int


class AnalysisJobs(Message, frozen=True):
    """Trajectories claimed by the asking analyzer; a claim that is not answered in time is claimed again."""

    trajectories: tuple[Trajectory, ...]


class StepSkill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A skill for one step of a trajectory (method opid); `step` counts from 0."""

    step: int
    skill: str


class Skill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parsed hindsight analysis and the weight version that wrote it; -1 for a skill from a library."""

    episode_summary: str
    episode_skill: str
    version: int
    step_skills: tuple[StepSkill, ...] = ()


class SkillResult(Message, frozen=True):
    """The analyzer's answer for one trajectory; `skill` is None when the output did not parse."""

    analyzer: str
    trajectory_id: str
    skill: Skill | None
    output: str
    version: int
    reason: str = ""


# Learner <-> buffer ----------------------------------------------------------------------------------------------


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trajectory as the learner consumes it. `skill_reason` says why `skill` is None."""

    trajectory: Trajectory
    skill: Skill | None
    skill_reason: str = ""


class LearnerStarted(Message, frozen=True):
    """A learner is about to publish its first version, `version`; the answer is an Ack.

    It may be several versions ahead of the last one that the buffer has heard of, when a learner before it has died.
    """

    version: int


class BatchRequest(Message, frozen=True):
    """Ask for the batch of the update from `version` to `version + 1`; the answer waits until one is ready.

    It also announces that `version` is acknowledged by the policy servers, which frees admission slots.
    """

    version: int


class Batch(Message, frozen=True):
    """Whole groups, in the order in which they were opened, within the staleness bound at `version`.

    With `on_stale: mask` a group may hold older tokens, which the learner leaves out of the loss.

    No sample means that none was ready within the wait: ask again.
    """

    version: int
    samples: tuple[Sample, ...]


class RunFinished(Message, frozen=True):
    """The learner has made its last update; answered (`Finished`) once the final evaluation is done."""

    version: int


class Finished(Message, frozen=True):
    """Whether everything that waits for the last version is done."""

    done: bool


# Evaluation <-> buffer -------------------------------------------------------------------------------------------


class RunStateRequest(Message, frozen=True):
    """Ask where the run stands."""


class RunState(Message, frozen=True):
    """The newest acknowledged version, and whether it is the last one. Version -1: nothing is published yet."""

    version: int
    finished: bool


class EvaluationDone(Message, frozen=True):
    """An evaluation that was asked for at `version` is complete, or was given up (`success` None)."""

    version: int
    success: float | None


# Anyone <-> policy server ----------------------------------------------------------------------------------------


class GenerateRequest(Message, frozen=True, omit_defaults=True):
    """Sample one response; `prompt_ids` is int32 [P], `images` are PNG or JPEG bytes, one for each placeholder in them.

    Without images their key is left out.
    """

    request_id: str
    prompt_ids: np.ndarray
    sampling: Sampling
    kind: RequestKind
    images: tuple[bytes, ...] = ()


class Cancel(Message, frozen=True):
    """Nobody waits for the response to this request any more; answered by an Ack, also when it is not known."""

    request_id: str


class Ping(Message, frozen=True):
    """Answered by an Ack in the next turn of the server's loop, whatever it generates meanwhile."""


class GenerateReply(Message, frozen=True):
    """A finished response (see `ports.Generation`), or the reason for a refusal in `error`."""

    request_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    cached_tokens: int
    error: str = ""


# Weight receiver <-> publisher -----------------------------------------------------------------------------------


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one tensor lies in a published segment; `dtype` is numpy's name (bfloat16 travels as uint16)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log-probs in nats that the learner's weights give the canary of `vocabulary` ids (`weights/canary.py`)."""

    vocabulary: int
    logprobs: tuple[float, ...]


class WeightsManifest(Message, frozen=True):
    """A published version: its tensors in one run of bytes, the digest of these, and where they are to be had.

    `segment` is a file in shared memory or the address of a broadcast. `attempt` counts how often the version was
    staged again because somebody had received damaged bytes, or could not load them. An engine that finds other numbers
    than the `canary` has does not serve the version; None: nothing is compared.
    """

    version: int
    segment: str
    num_bytes: int
    digest: str
    tensors: tuple[TensorSpec, ...]
    attempt: int = 0
    canary: Canary | None = None

    @property
    def key(self) -> str:
        """What tells this announcement from every other one: version, attempt and digest."""
        return f"{self.version}.{self.attempt}.{self.digest}"


class WeightsOrders(Message, frozen=True):
    """What the publisher wants of its receivers: the newest version, and the one in service (-1: none yet)."""

    pinned: int
    manifest: WeightsManifest | None


class WeightsPoll(Message, frozen=True):
    """A receiver's report, and over ZeroMQ at the same time its long poll for orders that it does not know.

    `version` with `digest` is in use, which acknowledges it (-1 and empty: nothing yet); `staged` is verified and about
    to be used; `seen` is the key of the newest manifest it knows; `refused` the key of one whose bytes arrived damaged
    (`refusal` digest) or with which its engine finds another canary (canary): the publisher stages it again. The
    answer is WeightsOrders, or an Ack when nothing new came within the wait.
    """

    receiver: str
    role: Literal["policy", "analyzer"]
    version: int
    digest: str
    refused: str = ""
    refusal: Refusal = ""
    staged: int = -1
    seen: str = ""
    pinned: int = -1
    phase: WeightsPhase = "idle"
