"""Which terms of the joint loss a method uses (algorithm specification, section 6, the table of methods)."""

from dataclasses import dataclass
from typing import Literal

Teacher = Literal["none", "hindsight_skill"]


class UnknownMethodError(ValueError):
    """A method name that is not declared here."""


@dataclass(frozen=True)
class Method:
    """One row of the table of methods: where the teacher's context comes from, and how it enters the loss.

    `teacher`: the extra context under which the same response ids are scored. `gated_distillation`: whether the
    log-prob shift under that context enters as the gated loss L_opd.
    """

    name: str
    teacher: Teacher
    gated_distillation: bool


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(name="grpo", teacher="none", gated_distillation=False),
        Method(name="seed", teacher="hindsight_skill", gated_distillation=True),
    )
}


def get_method(name: str) -> Method:
    """Look a method up by name; an unknown name is refused with the list of known ones."""
    if name not in METHODS:
        raise UnknownMethodError(f"unknown method {name!r}; known: {', '.join(sorted(METHODS))}")
    return METHODS[name]
