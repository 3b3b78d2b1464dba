"""Runs the original engine (packages alfworld and textworld) where it is installed: to compare, to measure, to play.

It imports the original only when an engine is made, and never uses its planner expert. The original's planner library
is GPL-licensed, so it stays an option.
"""

import importlib
import importlib.util
import sys
import types
from typing import Any, Final

from seed_async.envs.alfworld.engine import Seen
from seed_async.envs.alfworld.gametexts import DOMAIN, grammar_text
from seed_async.envs.alfworld.vocabulary import VOCABULARIES, VocabularyName

INSTALL_COMMANDS: Final = "make alfworld, or pip install 'seed-async[alfworld]'"
_PACKAGES: Final = ("alfworld", "textworld", "fast_downward", "tatsu")


class _AbsentJericho(types.ModuleType):
    """Stands in for jericho, which textworld imports for another kind of game and which drags spaCy along."""

    def __getattr__(self, name: str) -> object:
        """Answer any name, so that textworld's imports pass."""
        if name.startswith("__"):
            raise AttributeError(name)
        return UserWarning if name.endswith("Warning") else None


def import_original(name: str) -> Any:
    """Import a module of the original, without jericho where that is not installed."""
    try:
        importlib.import_module("jericho")
    except ImportError:
        sys.modules["jericho"] = _AbsentJericho("jericho")
    return importlib.import_module(name)


def missing_reason() -> str:
    """Return which packages of the original are not installed and how to get them, or nothing; imports none."""
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    return f"the original engine is not installed (no {', '.join(absent)}): {INSTALL_COMMANDS}" if absent else ""


def unavailable_reason() -> str:
    """Return why the original engine cannot be used here, or nothing when it can; imports it."""
    reason = missing_reason()
    if reason:
        return reason
    try:
        import_original("alfworld.agents.utils.misc")
    except ImportError as error:
        return f"the original engine cannot be imported: {error}"
    return ""


class OriginalEngine:
    """One environment of the original engine. Make one per process: each leaks a few MB and none is thread safe."""

    def __init__(self, vocabulary: VocabularyName = "move", *, own_texts: bool = False) -> None:
        """Load the original with the words of `vocabulary`.

        Domain and grammar are the installed ones (`move`; `put` is made of it), or with `own_texts` those that this
        project writes into game files.
        """
        self._vocabulary, self._own_texts = vocabulary, own_texts
        info = import_original("alfworld.info")
        with open(info.ALFRED_PDDL_PATH, encoding="utf-8") as file:
            self._domain = file.read()
        with open(info.ALFRED_TWL2_PATH, encoding="utf-8") as file:
            self._grammar = file.read()
        if vocabulary == "put":
            self._grammar = _older_grammar(self._grammar)
        self._demangler = import_original("alfworld.agents.utils.misc").Demangler
        textworld = import_original("textworld")
        requested = textworld.EnvInfos(won=True, admissible_commands=True)
        self._env = import_original("textworld.envs.pddl.pddl").PddlEnv(requested)

    def reset(self, problem: str, task: str) -> Seen:
        """Open a game."""
        if self._own_texts:
            domain, grammar = DOMAIN, grammar_text(task, self._vocabulary)
        else:
            domain, grammar = self._domain, self._grammar.replace("UNKNOWN GOAL", task)
        self._env.load({"pddl_domain": domain, "grammar": grammar, "pddl_problem": problem})
        entities = self._env._entity_infos
        names = self._demangler(game_infos=entities)
        for entity in entities.values():
            entity.name = names.demangle_alfred_name(entity.id)
        return self._seen(self._env.reset(), valid=True)

    def step(self, command: str) -> Seen:
        """Play a command."""
        state = self._env.step(command)[0]
        return self._seen(state, valid=state["_last_action"] is not None)

    @staticmethod
    def _seen(state: Any, *, valid: bool) -> Seen:
        commands = tuple(command for command in state["admissible_commands"] if command != "help")
        return Seen(state.feedback, commands, bool(state["won"]), valid)


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
