"""Opens the suite that a topology's `env` section names: a built-in one or `module:Class` of the user's own."""

import importlib
import os
import sys
from collections.abc import Callable
from hashlib import sha256

from seed_async.envs.contract import Suite
from seed_async.topology import Env


class UnknownEnvironmentError(ValueError):
    """`env` names what is not here: no built-in environment, no `module:Class`, or a backend that is not installed."""


def _max_receptacles(env: Env) -> int | None:
    """The tighter of the filter and, for generated games, the generator's own limit."""
    limits = [env.filter.max_receptacles, env.generated.max_receptacles if env.games == "generated" else None]
    return min((limit for limit in limits if limit is not None), default=None)


def _alfworld(env: Env) -> Suite:
    from seed_async.envs.alfworld.suite import AlfworldSuite

    kind = AlfworldSuite
    if env.backend == "textworld":
        from seed_async.envs.alfworld.original import missing_reason
        from seed_async.envs.alfworld.original_suite import OriginalSuite

        if reason := missing_reason():
            raise UnknownEnvironmentError(f"env.backend textworld: {reason}")
        kind = OriginalSuite
    return kind(
        games=env.games,
        max_steps=env.max_steps,
        vocabulary=env.vocabulary,
        seed=env.generated.seed,
        counts={
            "train": env.generated.train,
            "valid_seen": env.generated.valid_seen,
            "valid_unseen": env.generated.valid_unseen,
        },
        min_receptacles=env.generated.min_receptacles,
        max_receptacles=_max_receptacles(env),
        num_objects=env.generated.num_objects,
        task_types=env.filter.task_types or None,
        rooms=env.filter.rooms or None,
    )


BUILT_IN: dict[str, Callable[[Env], Suite]] = {"alfworld": _alfworld}


def open_suite(env: Env) -> Suite:
    """Return the suite of `env`. A user's class is called with the `env` section. Raises UnknownEnvironmentError."""
    if env.id in BUILT_IN:
        return BUILT_IN[env.id](env)
    module, separator, name = env.id.partition(":")
    if not separator:
        raise UnknownEnvironmentError(
            f"env.id {env.id!r} is none of {', '.join(BUILT_IN)} and not of the form module:Class"
        )
    if os.getcwd() not in sys.path:  # a user's module lies where the command is given; last, so it hides nothing
        sys.path.append(os.getcwd())
    try:
        opened = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownEnvironmentError(f"env.id {env.id!r} cannot be imported: {error}") from error
    if not isinstance(opened, type):
        raise UnknownEnvironmentError(f"env.id {env.id!r} names no class")
    suite: Suite = opened(env)
    return suite


def tasks_digest(tasks: tuple[str, ...]) -> str:
    """Return a digest of a task list, by which processes check that they see the same games in the same order."""
    return sha256("\n".join(tasks).encode()).hexdigest()[:16]
