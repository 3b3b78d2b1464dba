"""A batch that the real engine sampled from real games, as it arrives at the learner, against the slow reference."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from seed_async.actors.demonstrations import make_demonstrations
from seed_async.actors.engines.torch_engine import TorchEngine, load_model
from seed_async.actors.evaluation_cli import LocalGenerator
from seed_async.actors.rollout import Episode, EpisodePlayer
from seed_async.codec import decode, encode
from seed_async.envs.isolation import LocalHost
from seed_async.envs.registry import open_suite
from seed_async.learner.algorithms.methods import METHODS
from seed_async.learner.init_model import init_model
from seed_async.learner.scoring import load_policy
from seed_async.learner.step import accumulate_gradients, update
from seed_async.learner.targets import denominators, score_targets
from seed_async.learner.update_rows import loss_config, update_batch
from seed_async.messages import Batch, Sample, Skill, StepSkill, Trajectory
from seed_async.text import ChatTokenizer
from seed_async.topology import Topology
from seed_async.topology_file import parse_topology
from tests.reference.plain_update import plain_loss
from tests.unit.learner.builders import gradients

TOPOLOGY = """
env: {max_steps: 5, generated: {train: 20, max_receptacles: 5, num_objects: 4}}
model:
  init: {hidden_size: 32, layers: 2, heads: 2, intermediate_size: 64, vocabulary_size: 600, max_context_tokens: 1024}
stage1: {demonstrations: 20, analysis_rows: 5}
rollout: {groups_per_update: 2, group_size: 2, prompt_style: compact, max_context_tokens: 512, max_response_tokens: 8}
analysis: {prompt_style: compact, max_context_tokens: 1024, max_output_tokens: 64}
"""
GROUPS = ("g0", "g0", "g1", "g1")


def trajectory(number: int, episode: Episode, task_id: str) -> Trajectory:
    """The message that an actor would send; returns differ inside a group, so that advantages are not zero."""
    return Trajectory.of(
        episode.turns,
        trajectory_id=f"t{number}",
        lease_id=f"l{number}",
        group_id=GROUPS[number],
        member=number % 2,
        actor="actor-0",
        incarnation="i",
        task_id=task_id,
        task=episode.task,
        task_type=episode.task_type,
        vocabulary="move",
        task_line=episode.task_line,
        status=episode.status,
        episode_return=float(number % 2),
        started_at_s=0.0,
        ended_at_s=1.0,
    )


async def play(topology: Topology, checkpoint: Path) -> list[Episode]:
    """Play the members of both groups at once."""
    suite, tasks = open_suite(topology.env), open_suite(topology.env).tasks("train")
    engine = TorchEngine(load_model(checkpoint), max_slots=4, max_context_tokens=600)
    async with LocalGenerator(engine) as generator:
        tokenizer = ChatTokenizer.load(checkpoint)
        player = EpisodePlayer(tokenizer, generator, topology.rollout, temperature=1.0, kind="act")
        jobs = [player.play(LocalHost(suite.make), tasks[number // 2], number) for number in range(len(GROUPS))]
        return list(await asyncio.gather(*jobs))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of the environment's text."""
    topology = parse_topology(TOPOLOGY, "test")
    folder = tmp_path_factory.mktemp("recorded")
    make_demonstrations(topology, folder / "data")
    init_model(topology, folder / "model", folder / "data")
    return folder / "model"


@pytest.fixture(scope="module", params=["transcript", "windowed"])
def recorded(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[Topology, Batch]:
    """A topology and a batch after its way over the wire; two of its trajectories have a skill, with a step skill."""
    topology = parse_topology(TOPOLOGY, "test")
    rollout = topology.rollout.model_copy(update={"layout": request.param})
    topology = topology.model_copy(update={"rollout": rollout})
    episodes = asyncio.run(play(topology, checkpoint))
    skill = Skill(
        episode_summary="",
        episode_skill="open the fridge first, then look on the countertop",
        version=0,
        step_skills=(StepSkill(step=1, skill="go to the sink"),),
    )
    samples = tuple(
        Sample(trajectory=trajectory(number, episode, "x"), skill=skill if number in (0, 3) else None)
        for number, episode in enumerate(episodes)
    )
    batch = decode(encode(Batch(version=0, samples=samples)))
    assert isinstance(batch, Batch)
    return topology, batch


def test_the_learner_scores_fresh_samples_as_the_sampler_did(
    recorded: tuple[Topology, Batch], checkpoint: Path
) -> None:
    """In float32 the two differ by numeric noise: mean below 1e-4."""
    topology, batch = recorded
    rows, _ = update_batch(batch.samples, 0, ChatTokenizer.load(checkpoint), topology, 1024)
    policy, reference = load_policy(checkpoint), load_policy(checkpoint)
    metrics = update(rows, loss_config(topology), policy, reference, torch.optim.SGD(policy.parameters(), lr=0.0))
    turns = [turn for sample in batch.samples for turn in sample.trajectory.turns]
    assert metrics["response_tokens"] == sum(turn.response_ids.size for turn in turns)
    assert metrics["rows"] == (len(turns) if topology.rollout.layout == "windowed" else len(batch.samples))
    assert metrics["sampler_gap_mean"] < 1e-5
    assert metrics["sampler_gap_max"] < 1e-4
    assert metrics["opd_active_tokens"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradient_equal_a_straight_unpacked_reference(
    recorded: tuple[Topology, Batch], checkpoint: Path, method: str
) -> None:
    """Packed float32 against one plain float64 forward pass a row."""
    topology, batch = recorded
    topology = topology.model_copy(update={"method": method})
    rows, _ = update_batch(batch.samples, 0, ChatTokenizer.load(checkpoint), topology, 1024)
    config = dataclasses.replace(loss_config(topology), opd_coef=0.5, opid_coef=0.5, token_budget=300)
    policy, reference = load_policy(checkpoint), load_policy(checkpoint)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    targets = score_targets(rows, config, policy, reference, with_proximal=False)
    everything = range(len(rows.trajectories))
    losses, _ = accumulate_gradients(rows, everything, targets, config, policy, denominators(targets, everything))
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    plain_reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    plain_reference.load_state_dict(reference.state_dict())
    truth = plain_loss(rows, config, plain, plain_reference)
    truth.backward()
    expected = gradients(plain)
    assert sum(float(loss.total) for loss in losses) == pytest.approx(truth.item(), abs=1e-5)
    assert np.linalg.norm(gradients(policy) - expected) <= 1e-5 * np.linalg.norm(expected)
