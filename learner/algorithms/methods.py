"""The methods, each composed of small parts (algorithm specification, section 6, the table of methods).

A part is a name here and a pure function elsewhere: what the advantage consists of (`advantage.py`, `terms.py`), which
distillation term the loss has (`terms.py`), and where the teacher's context comes from. A new method out of known parts
is one entry of `METHODS`.
"""

from dataclasses import dataclass
from typing import Literal

Teacher = Literal["none", "hindsight", "library", "hindsight_or_library"]
AdvantageTerm = Literal["episode", "step_groups", "skill_shift"]
DistillationTerm = Literal["none", "gated", "reverse_kl"]


class UnknownMethodError(ValueError):
    """A method name that is not declared here."""


@dataclass(frozen=True)
class Method:
    """One row of the table of methods.

    `teacher`: the source of the skill under which the same response ids are scored a second time. `hindsight` is the
    analysis of that very trajectory, `library` a static file by task type, `hindsight_or_library` the first where there
    is one and the second elsewhere. `step_skills`: a hindsight step skill replaces the episode's on its step.
    `advantage`: what is added up. `episode` compares returns within the group, `step_groups` step returns over equal
    observations, `skill_shift` adds the log-prob shift of the skill token by token. Nothing: no policy term.
    `optional_advantage`: the same, when the configuration asks for a policy term that the method itself lacks.
    `distillation`: how the shift enters as a term of its own.
    """

    name: str
    teacher: Teacher = "none"
    step_skills: bool = False
    advantage: tuple[AdvantageTerm, ...] = ("episode",)
    optional_advantage: tuple[AdvantageTerm, ...] = ()
    distillation: DistillationTerm = "none"

    @property
    def has_teacher(self) -> bool:
        """Whether a second context is scored at all."""
        return self.teacher != "none"

    @property
    def uses_library(self) -> bool:
        """Whether the teacher's skill may come from the static library."""
        return self.teacher in ("library", "hindsight_or_library")

    @property
    def uses_hindsight(self) -> bool:
        """Whether the teacher's skill may come from the analysis of the trajectory."""
        return self.teacher in ("hindsight", "hindsight_or_library")

    def advantage_terms(self, with_optional: bool) -> tuple[AdvantageTerm, ...]:
        """The terms of the advantage, with the optional ones where they were asked for."""
        return self.advantage + (self.optional_advantage if with_optional else ())


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("grpo"),
        Method("seed", teacher="hindsight", distillation="gated"),
        # The analyzer keeps the first weights; the learner does the same as for seed.
        Method("seed_static", teacher="hindsight", distillation="gated"),
        Method("sdar", teacher="library", distillation="gated"),
        Method("opid", teacher="hindsight", step_skills=True, advantage=("episode", "skill_shift")),
        Method(
            "opsd",
            teacher="hindsight_or_library",
            advantage=(),
            optional_advantage=("episode",),
            distillation="reverse_kl",
        ),
        Method("gigpo", advantage=("episode", "step_groups")),
    )
}


def get_method(name: str) -> Method:
    """Look a method up by name; an unknown name is refused with the list of known ones."""
    if name not in METHODS:
        raise UnknownMethodError(f"unknown method {name!r}; known: {', '.join(sorted(METHODS))}")
    return METHODS[name]
