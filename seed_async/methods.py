"""The names of the methods, where each takes its skills from, and which keys of the topology belong to which."""

from typing import Literal

MethodName = Literal["grpo", "seed", "seed_static", "sdar", "opid", "opsd", "gigpo"]
SkillSource = Literal["none", "hindsight", "library"]

MAX_STEP_SKILLS = 5
"""Method opid (algorithm specification, section 6)."""
SKILL_SOURCES: dict[MethodName, SkillSource] = {
    "grpo": "none",
    "seed": "hindsight",
    "seed_static": "hindsight",
    "sdar": "library",
    "opid": "hindsight",
    "opsd": "hindsight",
    "gigpo": "none",
}
"""Where a method's teacher takes its skill from (algorithm specification, section 6, the table of methods)."""
METHODS_OF_KEY: dict[str, tuple[MethodName, ...]] = {
    "loss.opid_coef": ("opid",),
    "loss.opsd_coef": ("opsd",),
    "loss.opsd_rl": ("opsd",),
    "loss.gigpo_discount": ("gigpo",),
    "loss.gigpo_step_weight": ("gigpo",),
    "skills.library": ("sdar", "opsd"),
}
"""Keys of some methods only: with another one a value that is not the default is refused."""
_GATED: tuple[MethodName, ...] = ("seed", "seed_static", "sdar")
_HINDSIGHT: tuple[MethodName, ...] = ("seed", "seed_static", "opid", "opsd")
IDLE_KEYS: dict[str, tuple[MethodName, ...]] = {
    "loss.opd_coef": _GATED,
    "loss.opd_beta": _GATED,
    "loss.opd_gate": _GATED,
    "analysis.timeout_s": _HINDSIGHT,
    **{
        f"roles.analyzers.{key}": _HINDSIGHT
        for key in ("replicas", "engine", "device", "gpus", "max_slots", "threads", "vllm")
    },
}
"""Keys of several methods: with another one they do nothing and the launcher says so, since comparing methods by
`--set method=...` takes one file."""
