"""From received samples to an update's rows: the teacher of each method, what is masked and why."""

import numpy as np
import pytest

from seed_async.learner.algorithms.methods import METHODS
from seed_async.learner.leader import report_update
from seed_async.learner.update_rows import loss_config, teacher_skill, update_batch
from seed_async.messages import Sample, Skill, StepSkill, Trajectory
from seed_async.metrics import Metrics
from seed_async.skill_library import SkillLibrary, library_of
from tests.fakes.chat import tiny_chat
from tests.fakes.episodes import OPENING, make_lease, make_trajectory, make_turn, small_topology

LIBRARY = SkillLibrary("test", {"find": "search the shelves"})
SKILL = Skill(
    episode_summary="", episode_skill="look first", version=0, step_skills=(StepSkill(step=1, skill="take it"),)
)


def played(number: int = 0, **changes) -> Trajectory:
    """A transcript of two turns, the same two observations in every trajectory."""
    chat = tiny_chat()
    turns = [
        make_turn([0, 1], prompt=chat.first_prompt(OPENING).tolist(), opening=OPENING),
        make_turn([1, 1, 1], prompt=[4, 5], observation="You hold a mug.", parsed=False),
    ]
    return make_trajectory(make_lease(number), "i", turns, **changes)


def batch_of(method: str, *samples: Sample, library: SkillLibrary | None = None, max_tokens: int = 1000):
    """Rows and counts as the learner makes them."""
    return update_batch(samples, 1, tiny_chat(), small_topology(method=method), max_tokens, library)


def skills_read(batch) -> list[set[str]]:
    """The skills in the teacher rows of each trajectory."""
    chat = tiny_chat()
    return [
        {chat.decode(row.token_ids).split("Skill: ")[1].split("\n")[0] for row in trajectory.skill}
        for trajectory in batch.trajectories
    ]


def test_what_a_sample_says_becomes_the_columns_of_the_update() -> None:
    """Scaled return, invalid turns, fresh tokens, equal observations."""
    batch, masked = batch_of("grpo", Sample(trajectory=played(), skill=None), Sample(trajectory=played(1), skill=None))
    first, second = batch.trajectories
    assert first.episode_return == 10.0 and first.invalid.tolist() == [False, True]
    assert first.fresh.tolist() == [False, True, True, True, True]
    assert first.observation_ids.tolist() == second.observation_ids.tolist() == [0, 1]
    assert masked == {} and first.skill == ()


@pytest.mark.parametrize(
    ("method", "with_hindsight", "without"),
    [
        ("grpo", set(), set()),
        ("gigpo", set(), set()),
        ("seed", {"look first"}, set()),
        ("seed_static", {"look first"}, set()),
        ("opid", {"look first", "take it"}, set()),
        ("opsd", {"look first"}, {"search the shelves"}),
        ("sdar", None, {"search the shelves"}),
    ],
)
def test_each_method_takes_its_skill_from_its_own_teacher(method, with_hindsight, without) -> None:
    """The analysis of the trajectory, the step skills, the library by task type, or nobody."""
    batch, _ = batch_of(method, Sample(trajectory=played(), skill=None), library=LIBRARY)
    assert skills_read(batch) == [without]
    if with_hindsight is not None:
        batch, _ = batch_of(method, Sample(trajectory=played(), skill=SKILL), library=LIBRARY)
        assert skills_read(batch) == [with_hindsight]


def test_a_task_type_that_the_library_lacks_has_no_skill() -> None:
    """Masked and counted like any other."""
    sample = Sample(trajectory=played(task_type="fly"), skill=None, skill_reason="no_library_skill")
    assert teacher_skill(sample, METHODS["sdar"], LIBRARY) == ("", {})
    _, masked = batch_of("sdar", sample, library=LIBRARY)
    assert masked["masked_rows_no_library_skill"] == 1 and masked["masked_tokens_no_library_skill"] == 5


def test_rows_without_a_teacher_are_counted_by_their_reason() -> None:
    """Unparsed, too late, and too long for the model."""
    samples = [
        Sample(trajectory=played(0), skill=None, skill_reason="unparsed"),
        Sample(trajectory=played(1), skill=None, skill_reason="unparsed"),
        Sample(trajectory=played(2), skill=None, skill_reason="timeout"),
        Sample(trajectory=played(3), skill=None),
        Sample(trajectory=played(4), skill=SKILL),
    ]
    batch, masked = batch_of("seed", *samples, max_tokens=10)
    assert all(trajectory.skill == () for trajectory in batch.trajectories)
    reasons = {"unparsed": 2.0, "timeout": 1.0, "no_skill": 1.0, "over_long": 1.0}
    assert masked == {f"masked_rows_{reason}": count for reason, count in reasons.items()} | {
        f"masked_tokens_{reason}": 5 * count for reason, count in reasons.items()
    }
    assert batch_of("seed", samples[-1])[1] == {"masked_rows_over_long": 0.0, "masked_tokens_over_long": 0.0}


def test_an_over_long_step_row_leaves_the_rest_of_its_trajectory() -> None:
    """Row by row: only the tokens of that step lose their teacher."""
    long = Skill(
        episode_summary="", episode_skill="go", version=0, step_skills=(StepSkill(step=1, skill="take it " * 40),)
    )
    batch, masked = batch_of("opid", Sample(trajectory=played(), skill=long), max_tokens=100)
    (row,) = batch.trajectories[0].skill
    assert row.turn_index.tolist() == [0, 0]
    assert masked == {"masked_rows_over_long": 1.0, "masked_tokens_over_long": 3.0}


def test_only_methods_that_may_read_a_library_load_one() -> None:
    """The environment's own by default; a suite without one has none to fall back on."""
    assert library_of(small_topology(method="seed")) is None
    assert isinstance(library_of(small_topology(method="opsd")), SkillLibrary)
    assert library_of(small_topology(method="opsd", env={"id": "some.module:Suite"})) is None


@pytest.mark.parametrize(
    ("method", "loss"),
    [
        ("opid", {"opid_coef": 0.2}),
        ("opsd", {"opsd_rl": True}),
        ("gigpo", {"gigpo_discount": 0.5, "gigpo_step_weight": 2.0}),
    ],
)
def test_the_topology_reaches_the_update(method, loss) -> None:
    """Each key by its name."""
    config = loss_config(small_topology(method=method, loss=loss))
    assert config.method == method and all(getattr(config, name) == value for name, value in loss.items())


class Reporter:
    """What `report_update` needs of a role's context."""

    def __init__(self) -> None:
        """A registry of its own."""
        self.metrics = Metrics("learner", "0")


def test_every_term_of_an_update_reaches_the_metrics_endpoint() -> None:
    """Gauges of the terms, and masked rows by their reason."""
    context = Reporter()
    line = {name: 0.5 for name in LINE} | {"masked_rows_timeout": 3.0, "response_tokens": 7.0, "age_max": 1}
    report_update(context, line)
    report_update(context, line | {"masked_tokens_stale": 4.0, "response_tokens": 0.0})
    sample = context.metrics.registry.get_sample_value
    assert sample("seed_async_masked_rows_total", {"reason": "timeout"}) == 6.0
    assert sample("seed_async_masked_tokens_total", {"reason": "stale"}) == 4.0
    assert sample("seed_async_updates_without_tokens_total") == 1.0
    assert sample("seed_async_opd_gap_nats", {"statistic": "rms"}) == 0.5
    assert sample("seed_async_clip_ratio", {"bound": "dual"}) == 0.5
    for name in ("opd_staleness_bias_ratio", "effective_sample_ratio", "kl_nats", "zero_variance_groups"):
        assert sample(f"seed_async_{name}") == 0.5, name


LINE = (
    *("gradient_norm", "entropy", "gate_mean", "opd_active_ratio", "gate_above_half_fraction", "staleness_bias_ratio"),
    *("kl", "weight_truncated_fraction", "effective_sample_share", "zero_variance_groups", "delta_mean", "delta_rms"),
    *("weight_mean", "weight_max", "clip_fraction", "dual_clip_fraction", "loss_total", "seconds_optimizer"),
)


def test_observations_are_equal_by_their_text_only() -> None:
    """Across trajectories and turns."""
    again = played(1)
    turns = (again.turns[0], again.turns[1], make_turn([1], prompt=[4], observation="You hold a mug."))
    samples = [
        Sample(trajectory=played(), skill=None),
        Sample(trajectory=make_trajectory(make_lease(1), "i", turns), skill=None),
    ]
    batch, _ = batch_of("gigpo", *samples)
    assert np.concatenate([t.observation_ids for t in batch.trajectories]).tolist() == [0, 1, 0, 1, 1]


def test_the_compute_type_of_the_learner_reaches_the_update() -> None:
    """float32 unless asked."""
    half = small_topology(roles={"learner": {"dtype": "bfloat16"}})
    assert loss_config(small_topology()).compute_dtype == "float32"
    assert loss_config(half).compute_dtype == "bfloat16"
