"""Stage 1 data from the environment itself: expert episodes, solutions that follow a skill, and oracle analyses.

For machines without an annotator model (algorithm specification, section 8): the environment's expert plays, its
rule-based annotator analyses. Everything is written as readable JSON lines, by the run's seed alone.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seed_async.analysis_prompts import StepText, analysis_prompt
from seed_async.envs.contract import Environment, Observation, Step, Suite
from seed_async.envs.registry import open_suite
from seed_async.prompts import (
    PastStep,
    PromptStyle,
    action_response,
    first_prompt,
    insert_skill,
    next_prompt,
    task_line,
    windowed_prompt,
)
from seed_async.topology import Env, Rollout, Topology

ANALYSED_MISTAKE_RATES = (0.1, 0.4, 0.8)
"""Analyses need failures as well as successes; these rates of random actions give both."""
MAX_CHARACTERS_A_TOKEN = 3
"""A cautious estimate for fitting prompts before a tokenizer exists; text of this kind has four or five."""


class Played(NamedTuple):
    """A scripted episode: the observation before each command, and the commands with what the expert would have played.

    A command that is not the expert's is a mistake made on purpose.
    """

    observations: list[Observation]
    commands: list[str]
    better: list[str]
    by_expert: list[bool]
    valid: list[bool]
    won: bool


def _play(
    environment: Environment, observation: Observation, choose: Callable[[Observation], tuple[str, str, bool]]
) -> Played:
    """Play an opened game to its end; `choose` gives the command, the expert's, and whether it is the expert's own."""
    played = Played([], [], [], [], [], won=False)
    while True:
        command, better, by_expert = choose(observation)
        result = environment.step(command)
        played.observations.append(observation)
        played.commands.append(command)
        played.better.append(better)
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

    def choose(observation: Observation) -> tuple[str, str, bool]:
        command = expert.act(observation)
        if observation.admissible and rng.random() < mistake_rate:
            return str(rng.choice(observation.admissible)), command, False
        return command, command, True

    return _play(environment, opening, choose)


def play_solution(suite: Suite, environment: Environment, task: str) -> Played:
    """Play the game's own solution, which ends the game, as far as the step limit lets it."""
    commands = iter(suite.solution(task))

    def choose(_: Observation) -> tuple[str, str, bool]:
        command = next(commands)
        return command, command, True

    return _play(environment, environment.reset(task), choose)


def _steps(played: Played) -> list[Step]:
    triples = zip(played.observations, played.commands, played.valid, strict=True)
    return [Step(observation=observation.text, action=command, valid=valid) for observation, command, valid in triples]


def act_rows(rollout: Rollout, task: str, played: Played, skill: str | None) -> Iterator[dict[str, Any]]:
    """Yield an episode's training rows in chat form, in the layout that episodes are acted in."""
    row: dict[str, Any] = {"kind": "act", "task_id": task, "won": played.won, "skill": skill}
    if rollout.layout == "windowed":
        yield from (row | {"messages": messages} for messages in _windowed_chats(rollout, played, skill))
    else:
        yield row | {"messages": _transcript_chat(rollout.prompt_style, played, skill)}


def _transcript_chat(style: PromptStyle, played: Played, skill: str | None) -> list[dict[str, Any]]:
    """The whole episode as one chat; only the expert's own responses carry loss."""
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
    return messages


def _windowed_chats(rollout: Rollout, played: Played, skill: str | None) -> Iterator[list[dict[str, Any]]]:
    """A chat of one turn for each of the expert's own steps, up to where even a prompt without history is too long."""
    room = (rollout.max_context_tokens - rollout.max_response_tokens) * MAX_CHARACTERS_A_TOKEN
    line = task_line(played.observations[0].info.task)

    def with_skill(text: str) -> str:
        return insert_skill(text, line, skill) if skill else text

    past: list[PastStep] = []
    for observation, command, by_expert in zip(played.observations, played.commands, played.by_expert, strict=True):
        prompt = windowed_prompt(
            rollout.prompt_style,
            observation.info.task,
            past,
            rollout.history_window,
            observation.text,
            observation.admissible,
            lambda text: len(with_skill(text)) <= room,
        )
        if prompt is None:
            return
        if by_expert:
            answer = {"role": "assistant", "content": action_response(command), "train": True}
            yield [{"role": "user", "content": with_skill(prompt.text)}, answer]
        past.append(PastStep(observation.text, command))


def _step_skills(played: Played, number: int) -> list[dict[str, Any]]:
    """Step skills for the first `number` mistakes: what the expert would have done there."""
    mistakes = [index for index, by_expert in enumerate(played.by_expert) if not by_expert][:number]
    return [{"step": index, "skill": f"{played.better[index]} here"} for index in mistakes]


def analysis_row(
    style: PromptStyle, suite: Suite, task: str, played: Played, max_characters: int, max_step_skills: int = 0
) -> dict[str, Any] | None:
    """One analysis row: the analyzer's prompt and the oracle's JSON; None when the prompt cannot be made to fit."""
    steps = [StepText(step.observation, action_response(step.action), step.valid) for step in _steps(played)]
    prompt = analysis_prompt(
        style,
        played.observations[0].info.task,
        "success" if played.won else "failure",
        steps,
        lambda text: len(text) <= max_characters,
        step_skills=max_step_skills,
    )
    if prompt is None:
        return None
    analysis = suite.annotate(task, _steps(played), played.won)
    answer: dict[str, Any] = {
        "episode_summary": analysis.episode_summary,
        "episode_skill": analysis.episode_skill,
    }
    if max_step_skills:
        answer["step_skills"] = _step_skills(played, max_step_skills)
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": json.dumps(answer), "train": True},
    ]
    return {
        "kind": "analyse",
        "task_id": task,
        "won": played.won,
        "skill": analysis.episode_skill,
        "messages": messages,
    }


class _Games(NamedTuple):
    """A suite, one environment of it, and its training tasks in random order without end."""

    suite: Suite
    environment: Environment
    tasks: Iterator[str]


def _games(env: Env, rng: np.random.Generator) -> _Games:
    suite = open_suite(env)
    tasks = list(suite.tasks(env.split))
    if not tasks:
        raise ValueError(f"env.split {env.split!r} has no task to demonstrate")

    def endless() -> Iterator[str]:
        while True:
            yield from (tasks[int(index)] for index in rng.permutation(len(tasks)))

    return _Games(suite, suite.make(), endless())


def make_demonstrations(topology: Topology, out: Path) -> None:
    """Write `demonstrations.jsonl` and `analyses.jsonl` below `out`, from games of the training split only."""
    settings = topology.stage1
    rng = np.random.default_rng([topology.run.seed, 1])
    games = [_games(topology.env, rng)]
    if settings.generated_share:
        games.append(_games(topology.env.model_copy(update={"games": "generated"}), rng))

    def draw() -> _Games:
        """The games of the next episode; nothing is drawn from `rng` where there is no choice."""
        return games[len(games) > 1 and rng.random() < settings.generated_share]

    out.mkdir(parents=True, exist_ok=True)
    with (out / "demonstrations.jsonl").open("w") as file:
        for _ in range(settings.demonstrations):
            suite, environment, tasks = draw()
            task = next(tasks)
            if rng.random() < settings.skill_share:
                played = play_solution(suite, environment, task)
                skill: str | None = suite.annotate(task, _steps(played), played.won).episode_skill
            else:
                played, skill = play_expert(suite, environment, task, settings.mistake_rate, rng), None
            for act_row in act_rows(topology.rollout, task, played, skill):
                file.write(json.dumps(act_row) + "\n")
    room_tokens = topology.analysis.max_context_tokens - topology.analysis.max_output_tokens
    max_characters = room_tokens * MAX_CHARACTERS_A_TOKEN
    with (out / "analyses.jsonl").open("w") as file:
        for number in range(settings.analysis_rows):
            suite, environment, tasks = draw()
            task = next(tasks)
            rate = ANALYSED_MISTAKE_RATES[number % len(ANALYSED_MISTAKE_RATES)]
            played = play_expert(suite, environment, task, rate, rng)
            row = analysis_row(
                topology.analysis.prompt_style, suite, task, played, max_characters, topology.max_step_skills
            )
            if row is not None:
                file.write(json.dumps(row) + "\n")
