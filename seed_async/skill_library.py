"""Static skills by task type, from a Markdown file that a user can write: the teacher of method sdar.

A section `## task_type` holds the skill of that type, as plain text; `## default` holds the one of all types without a
section. A title and any text before the first section are comments. One library ships for each environment.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seed_async.topology import Topology
from seed_async.user_files import read_user_text

BUILT_IN_FOLDER = Path(__file__).parent / "skill_libraries"
DEFAULT = "default"
MAX_SKILL_CHARACTERS = 4000
"""About a thousand tokens, in every prompt that the teacher reads."""
_HEADING = re.compile(r"(#+)\s*(.*?)\s*#*$")
_TASK_TYPE = re.compile(r"[A-Za-z0-9_.:-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class SkillLibraryError(ValueError):
    """A library that cannot be used; the message is ready to print and says where."""


def built_in_libraries() -> list[str]:
    """The names of the libraries that ship."""
    return sorted(path.stem for path in BUILT_IN_FOLDER.glob("*.md"))


@dataclass(frozen=True)
class SkillLibrary:
    """The skills of one file; each is one line of text."""

    source: str
    skills: Mapping[str, str]

    @classmethod
    def load(cls, name_or_path: str) -> "SkillLibrary":
        """Read a built-in library by its name, or a user's by its path. Raises SkillLibraryError."""
        if name_or_path in built_in_libraries():
            return parse_library(_read_text(BUILT_IN_FOLDER / f"{name_or_path}.md"), name_or_path)
        path = Path(name_or_path)
        if not path.is_file():
            raise SkillLibraryError(
                f"skill library {name_or_path!r} is neither a file nor built in ({', '.join(built_in_libraries())})"
            )
        return parse_library(_read_text(path), str(path))

    @property
    def task_types(self) -> tuple[str, ...]:
        """The task types that have a section of their own."""
        return tuple(name for name in self.skills if name != DEFAULT)

    def skill(self, task_type: str) -> str | None:
        """The skill of a task type: its own, or else the default, or else None."""
        return self.skills.get(task_type, self.skills.get(DEFAULT))

    def missing(self, task_types: Sequence[str]) -> list[str]:
        """Those of `task_types` that have no skill."""
        return [name for name in task_types if self.skill(name) is None]


def _read_text(path: Path) -> str:
    return read_user_text(path, "skill library", SkillLibraryError, "utf-8-sig")


def _task_type(line: str, where: str, started: bool) -> str | None:
    """The task type that a line opens a section for, None for text. Refuses every other heading in a section."""
    heading = _HEADING.fullmatch(line)
    if heading is None or (not started and len(heading[1]) == 1):
        return None
    if len(heading[1]) != 2:
        raise SkillLibraryError(f"{where}: a skill is plain text: the only headings are `## task_type`")
    if not _TASK_TYPE.fullmatch(heading[2]):
        raise SkillLibraryError(f"{where}: {heading[2]!r} is no task type: a heading is `## task_type`, without spaces")
    return heading[2]


def parse_library(text: str, source: str) -> SkillLibrary:
    """Build a library from Markdown text. Raises SkillLibraryError, as `source:line: ...`."""
    lines_of: dict[str, list[str]] = {}
    opened_at: dict[str, int] = {}
    section: list[str] | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        where, line = f"{source}:{number}", line.rstrip("\r")
        if _CONTROL.search(line):
            raise SkillLibraryError(f"{where}: control characters are not allowed")
        task_type = _task_type(line, where, started=section is not None)
        if task_type is None:
            if section is not None:
                section.append(line)
            continue
        if task_type in opened_at:
            raise SkillLibraryError(
                f"{where}: section `{task_type}` stands twice (first in line {opened_at[task_type]})"
            )
        opened_at[task_type], lines_of[task_type] = number, []
        section = lines_of[task_type]
    if not opened_at:
        raise SkillLibraryError(f"{source}:1: no section: write `## task_type` and its skill below")
    skills = {name: " ".join(" ".join(lines).split()) for name, lines in lines_of.items()}
    for name, skill in skills.items():
        where = f"{source}:{opened_at[name]}"
        if not skill:
            raise SkillLibraryError(f"{where}: section `{name}` is empty")
        if len(skill) > MAX_SKILL_CHARACTERS:
            raise SkillLibraryError(
                f"{where}: the skill of `{name}` has {len(skill)} characters; at most {MAX_SKILL_CHARACTERS}"
            )
    return SkillLibrary(source, skills)


def library_of(topology: Topology) -> SkillLibrary | None:
    """The library that a run's teacher reads, None when it reads none. Raises SkillLibraryError.

    Where all skills come from it, a task type of the environment without one is refused. The environment's own library
    tells which types there are; for a user's suite nothing is known before it is played.
    """
    env, known = topology.env, built_in_libraries()
    named = topology.skills.library is not None or env.id in known
    only_source = topology.skill_source == "library"
    if not topology.reads_library or not (named or only_source):
        return None
    if not named:
        raise SkillLibraryError(
            f"method {topology.method} needs skills.library: env.id {env.id!r} has no library of its own "
            f"(built in: {', '.join(known)})"
        )
    library = SkillLibrary.load(topology.skills.library or env.id)
    own = SkillLibrary.load(env.id).task_types if env.id in known else ()
    missing = library.missing(env.filter.task_types or own) if only_source else []
    if missing:
        raise SkillLibraryError(
            f"skill library {library.source} has no section for {', '.join(missing)} (task types of {env.id}), "
            f"and no `## {DEFAULT}`"
        )
    return library
