"""Small topologies and made-up trajectories."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from seed_async.messages import Lease, Skill, SkillResult, Trajectory, TrajectoryStatus, Turn
from seed_async.topology import Topology

VOCABULARY_SIZE = 100


def small_topology(**sections: Any) -> Topology:
    """Two groups of two, one version of staleness, skills; each section can be replaced."""
    given: dict[str, Any] = {
        "model": {"path": "model"},
        "rollout": {"groups_per_update": 2, "group_size": 2, "max_context_tokens": 64, "max_response_tokens": 8},
        "buffer": {"lease_timeout_s": 10, "max_tries": 2},
        "analysis": {"timeout_s": 20},
    }
    return Topology.model_validate(given | sections)


OPENING = "Task: find the mug.\nYou see a mug."


def make_turn(
    versions: Sequence[int], *, valid: bool = True, prompt: Sequence[int] = (1, 2, 3), **changes: Any
) -> Turn:
    """One turn with a response token for each version."""
    fields: dict[str, Any] = {
        "observation": "You see a mug.",
        "response": "<action>take mug</action>",
        "action": "take mug",
        "parsed": True,
        "valid": valid,
        "prompt_ids": np.array(prompt, dtype=np.int32),
        "response_ids": np.arange(5, 5 + len(versions), dtype=np.int32),
        "behaviour_logprob": -np.ones(len(versions), dtype=np.float32),
        "versions": np.array(versions, dtype=np.int32),
    }
    return Turn(**(fields | changes))


def make_trajectory(
    lease: Lease,
    incarnation: str,
    turns: Sequence[Turn] | None = None,
    *,
    version: int = 0,
    status: TrajectoryStatus = "won",
    **changes: Any,
) -> Trajectory:
    """Return what an actor would submit for `lease`."""
    fields: dict[str, Any] = {
        "trajectory_id": f"{lease.lease_id}-{incarnation}",
        "lease_id": lease.lease_id,
        "group_id": lease.group_id,
        "member": lease.member,
        "actor": incarnation,
        "incarnation": incarnation,
        "task_id": f"task-{lease.task_index}",
        "task": "find the mug.",
        "task_type": "find",
        "vocabulary": "move",
        "task_line": "Task: find the mug.",
        "status": status,
        "episode_return": 1.0,
        "started_at_s": 1.0,
        "ended_at_s": 2.0,
    }
    if turns is None:
        turns = (make_turn([version, version], opening=OPENING),)
    return msgspec.structs.replace(Trajectory.of(turns, **fields), **changes)


def make_lease(number: int = 0, group: str = "g0", member: int = 0) -> Lease:
    """Return a lease that no buffer has granted."""
    return Lease(lease_id=f"l{number}", group_id=group, member=member, task_index=0, seed=number)


def skill_for(trajectory: Trajectory, text: str | None = "look first", reason: str = "") -> SkillResult:
    """Return an analyzer's answer; without text the output did not parse."""
    skill = Skill(episode_summary="won", episode_skill=text, version=0) if text else None
    return SkillResult(
        analyzer="analyzer-0",
        trajectory_id=trajectory.trajectory_id,
        skill=skill,
        output=text or "",
        version=0,
        reason=reason,
    )
