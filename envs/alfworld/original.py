"""Runs the original engine (packages alfworld and textworld) where it is installed, to compare and to measure.

Nothing else in the project imports this module, and it imports the original only when an engine is made: the original's
planner library is GPL-licensed, so it stays an option of tests and benchmarks.
"""

import importlib
import importlib.util
import sys
import types
from typing import Any

from seed_async.envs.alfworld.vocabulary import VOCABULARIES, VocabularyName


class _AbsentJericho(types.ModuleType):
    """Stands in for jericho, which textworld imports for another kind of game and which drags spaCy along."""

    def __getattr__(self, name: str) -> object:
        """Answer any name, so that textworld's imports pass."""
        if name.startswith("__"):
            raise AttributeError(name)
        return UserWarning if name.endswith("Warning") else None


def _import(name: str) -> Any:
    try:
        importlib.import_module("jericho")
    except ImportError:
        sys.modules["jericho"] = _AbsentJericho("jericho")
    return importlib.import_module(name)


def unavailable_reason() -> str:
    """Return why the original engine cannot be used here, or nothing when it can."""
    absent = [name for name in ("textworld", "fast_downward", "alfworld") if importlib.util.find_spec(name) is None]
    if absent:
        return f"the original engine is not installed (no {', '.join(absent)}); see the optional extra `alfworld`"
    try:
        _import("alfworld.agents.utils.misc")
    except ImportError as error:
        return f"the original engine cannot be imported: {error}"
    return ""


class OriginalEngine:
    """One environment of the original engine. Make one per process: each leaks a few MB and none is thread safe."""

    def __init__(self, vocabulary: VocabularyName = "move") -> None:
        """Load the original with the words of `vocabulary`; the installed grammar is that of `move`."""
        info = _import("alfworld.info")
        with open(info.ALFRED_PDDL_PATH, encoding="utf-8") as file:
            self._domain = file.read()
        with open(info.ALFRED_TWL2_PATH, encoding="utf-8") as file:
            self._grammar = file.read()
        if vocabulary == "put":
            self._grammar = _older_grammar(self._grammar)
        self._demangler = _import("alfworld.agents.utils.misc").Demangler
        textworld = _import("textworld")
        requested = textworld.EnvInfos(won=True, admissible_commands=True)
        self._env = _import("textworld.envs.pddl.pddl").PddlEnv(requested)

    def reset(self, problem: str, task: str) -> tuple[str, tuple[str, ...], bool]:
        """Open a game; return the first observation, the admissible commands without `help`, and won."""
        grammar = self._grammar.replace("UNKNOWN GOAL", task)
        self._env.load({"pddl_domain": self._domain, "grammar": grammar, "pddl_problem": problem})
        entities = self._env._entity_infos
        names = self._demangler(game_infos=entities)
        for entity in entities.values():
            entity.name = names.demangle_alfred_name(entity.id)
        return self._seen(self._env.reset())

    def step(self, command: str) -> tuple[str, tuple[str, ...], bool]:
        """Play a command; return observation, admissible commands without `help`, and won."""
        return self._seen(self._env.step(command)[0])

    @staticmethod
    def _seen(state: Any) -> tuple[str, tuple[str, ...], bool]:
        commands = tuple(command for command in state["admissible_commands"] if command != "help")
        return state.feedback, commands, bool(state["won"])


def _older_grammar(grammar: str) -> str:
    words = VOCABULARIES["put"]
    changes = (
        ("You arrive at {r.name}", "You arrive at {lend.name}"),
        ("You move the {o.name} to the {r.name}", "You put the {o.name} in/on the {r.name}"),
        ('"move {o} to {r}"', '"put {o} in/on {r}"'),
        (VOCABULARIES["move"].help_line, words.help_line),
    )
    for new, old in changes:
        if new not in grammar:
            raise ValueError(f"the installed grammar has no {new!r}; is it not that of alfworld 0.4?")
        grammar = grammar.replace(new, old)
    return grammar
