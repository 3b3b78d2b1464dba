"""Stage 1 data from the environment itself: expert episodes, solutions that follow a skill, and oracle analyses.

For machines without an annotator model (algorithm specification, section 8): the environment's expert plays, its
rule-based annotator analyses. Everything is written as readable JSON lines, by the run's seed alone.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seed_async.envs.contract import Environment, Observation, Step, Suite
from seed_async.envs.registry import open_suite
from seed_async.prompts import (
    PromptStyle,
    StepText,
    action_response,
    analysis_prompt,
    first_prompt,
    insert_skill,
    next_prompt,
)
from seed_async.topology import Topology

ANALYSED_MISTAKE_RATES = (0.1, 0.4, 0.8)
"""Analyses need failures as well as successes; these rates of random actions give both."""
MAX_ANALYSIS_CHARACTERS_A_TOKEN = 3
"""A cautious estimate for fitting prompts before a tokenizer exists; text of this kind has four or five."""


class Played(NamedTuple):
    """A scripted episode: the observation before each command, and the commands with who chose them."""

    observations: list[Observation]
    commands: list[str]
    by_expert: list[bool]
    valid: list[bool]
    won: bool


def _play(
    environment: Environment, observation: Observation, choose: Callable[[Observation], tuple[str, bool]]
) -> Played:
    """Play an opened game to its end; `choose` gives each command and whether the expert chose it."""
    played = Played([], [], [], [], won=False)
    while True:
        command, by_expert = choose(observation)
        result = environment.step(command)
        played.observations.append(observation)
        played.commands.append(command)
        played.by_expert.append(by_expert)
        played.valid.append(result.observation.info.valid)
        observation = result.observation
        if result.terminated or result.truncated:
            return played._replace(won=observation.info.won)


def play_expert(
    suite: Suite, environment: Environment, task: str, mistake_rate: float, rng: np.random.Generator
) -> Played:
    """Play the expert, each command replaced by a random admissible one with probability `mistake_rate`."""
    expert = suite.expert()
    opening = environment.reset(task)
    expert.reset(opening)

    def choose(observation: Observation) -> tuple[str, bool]:
        command = expert.act(observation)
        if observation.admissible and rng.random() < mistake_rate:
            return str(rng.choice(observation.admissible)), False
        return command, True

    return _play(environment, opening, choose)


def play_solution(suite: Suite, environment: Environment, task: str) -> Played:
    """Play the game's own solution, which ends the game, as far as the step limit lets it."""
    commands = iter(suite.solution(task))
    return _play(environment, environment.reset(task), lambda _: (next(commands), True))


def _steps(played: Played) -> list[Step]:
    triples = zip(played.observations, played.commands, played.valid, strict=True)
    return [Step(observation=observation.text, action=command, valid=valid) for observation, command, valid in triples]


def act_row(style: PromptStyle, task: str, played: Played, skill: str | None) -> dict[str, Any]:
    """One training row in chat form; only the expert's own responses carry loss."""
    messages: list[dict[str, Any]] = []
    for index, (observation, command, by_expert) in enumerate(
        zip(played.observations, played.commands, played.by_expert, strict=True)
    ):
        if index == 0:
            first = first_prompt(style, observation.info.task, observation.text, observation.admissible)
            text = insert_skill(first.text, first.task_line, skill) if skill else first.text
        else:
            text = next_prompt(style, observation.text, observation.admissible)
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": action_response(command), "train": by_expert})
    return {"kind": "act", "task_id": task, "won": played.won, "skill": skill, "messages": messages}


def analysis_row(
    style: PromptStyle, suite: Suite, task: str, played: Played, max_characters: int
) -> dict[str, Any] | None:
    """One analysis row: the analyzer's prompt and the oracle's JSON; None when the prompt cannot be made to fit."""
    steps = [StepText(step.observation, action_response(step.action), step.valid) for step in _steps(played)]
    prompt = analysis_prompt(
        style,
        played.observations[0].info.task,
        "success" if played.won else "failure",
        steps,
        lambda text: len(text) <= max_characters,
    )
    if prompt is None:
        return None
    analysis = suite.annotate(task, _steps(played), played.won)
    answer = json.dumps({"episode_summary": analysis.episode_summary, "episode_skill": analysis.episode_skill})
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer, "train": True}]
    return {
        "kind": "analyse",
        "task_id": task,
        "won": played.won,
        "skill": analysis.episode_skill,
        "messages": messages,
    }


def _tasks(tasks: list[str], rng: np.random.Generator) -> Iterator[str]:
    while True:
        for index in rng.permutation(len(tasks)):
            yield tasks[int(index)]


def make_demonstrations(topology: Topology, out: Path) -> None:
    """Write `demonstrations.jsonl` and `analyses.jsonl` below `out`, from games of the training split only."""
    suite, settings = open_suite(topology.env), topology.stage1
    rng = np.random.default_rng([topology.run.seed, 1])
    split = list(suite.tasks(topology.env.split))
    if not split:
        raise ValueError(f"env.split {topology.env.split!r} has no task to demonstrate")
    tasks = _tasks(split, rng)
    environment = suite.make()
    out.mkdir(parents=True, exist_ok=True)
    with (out / "demonstrations.jsonl").open("w") as file:
        for _ in range(settings.demonstrations):
            task = next(tasks)
            if rng.random() < settings.skill_share:
                played = play_solution(suite, environment, task)
                skill: str | None = suite.annotate(task, _steps(played), played.won).episode_skill
            else:
                played, skill = play_expert(suite, environment, task, settings.mistake_rate, rng), None
            file.write(json.dumps(act_row(topology.rollout.prompt_style, task, played, skill)) + "\n")
    room_tokens = topology.analysis.max_context_tokens - topology.analysis.max_output_tokens
    max_characters = room_tokens * MAX_ANALYSIS_CHARACTERS_A_TOKEN
    with (out / "analyses.jsonl").open("w") as file:
        for number in range(settings.analysis_rows):
            task = next(tasks)
            rate = ANALYSED_MISTAKE_RATES[number % len(ANALYSED_MISTAKE_RATES)]
            played = play_expert(suite, environment, task, rate, rng)
            row = analysis_row(topology.analysis.prompt_style, suite, task, played, max_characters)
            if row is not None:
                file.write(json.dumps(row) + "\n")
