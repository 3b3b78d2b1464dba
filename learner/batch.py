"""What an update consumes: its hyper-parameters, and whole groups of trajectories as rows of token ids."""

from dataclasses import dataclass

import numpy as np

from seed_async.layouts import TokenRow
from seed_async.learner.algorithms.advantage import Statistics
from seed_async.learner.algorithms.terms import Gate
from seed_async.learner.scoring import ComputeDtype


@dataclass(frozen=True)
class LossConfig:
    """Hyper-parameters of an update (algorithm specification, sections 3, 4 and 6)."""

    method: str = "seed"
    clip: float = 0.2
    dual_clip: float = 3.0
    importance_cap: float = 2.0
    synchronous: bool = False
    """Force every importance weight to 1: the batch was sampled by the very weights that learn from it."""
    opd_beta: float = 5.0
    opd_coef: float = 0.01
    opd_gate: Gate = "sigmoid"
    opid_coef: float = 0.001
    """How much of the log-prob shift of the skill is added to the advantage (method opid)."""
    opsd_coef: float = 1.0
    """Coefficient of the reverse KL to the skill context (method opsd); by default it is the whole loss."""
    opsd_rl: bool = False
    """Whether opsd keeps the policy term."""
    gigpo_discount: float = 0.95
    gigpo_step_weight: float = 1.0
    """Weight of the step advantage beside the episode's (method gigpo)."""
    kl_coef: float = 0.01
    """0 leaves the reference model out, with its forward pass."""
    entropy_coef: float = 0.001
    invalid_penalty: float = 0.1
    divide_by_std: bool = True
    statistics: Statistics = "rows"
    temperature: float = 1.0
    """The temperature that the responses were sampled at."""
    max_grad_norm: float = 1.0
    token_budget: int = 16384
    """Tokens of a packed micro-batch; bounds memory, never changes the result."""
    compute_dtype: ComputeDtype = "float32"
    mini_batch_trajectories: int | None = None
    """Trajectories an optimizer step; None takes the whole batch at once."""


@dataclass(frozen=True, eq=False)
class UpdateTrajectory:
    """One trajectory as an update consumes it: R sampled tokens of some number of turns, in one row a context.

    `plain` are the rows that were acted; the R tokens are theirs, in order. `behaviour_logprob` float32 [R], by the
    engine at sampling time; `fresh` bool [R], True on tokens that the very version of this update sampled, where engine
    and learner must agree; `trained` bool [R], False on tokens that are too old: they are in no term of the loss, while
    their trajectory counts in the statistics of its group as ever; `invalid` bool [turns], True where the action was
    unparsable; `observation_ids` int [turns], equal where the observations are; `episode_return` with the reward scale
    applied. `skill` are the teacher's rows: each holds the same response ids of some whole turns in a skill-augmented
    context; a turn is in at most one.
    """

    plain: tuple[TokenRow, ...]
    behaviour_logprob: np.ndarray
    fresh: np.ndarray
    trained: np.ndarray
    invalid: np.ndarray
    observation_ids: np.ndarray
    episode_return: float
    group_id: str
    skill: tuple[TokenRow, ...] = ()

    def __post_init__(self) -> None:
        """Refuse sizes that do not agree and a skill context whose response ids differ (oracle d)."""
        for row in (*self.plain, *self.skill):
            if int(row.response_mask.sum()) != len(row.turn_index):
                raise ValueError(
                    f"{int(row.response_mask.sum())} response tokens, but turn_index has {len(row.turn_index)} entries"
                )
        turns = self.turn_index
        sizes = (len(self.behaviour_logprob), len(self.fresh), len(self.trained))
        if set(sizes) != {len(turns)}:
            raise ValueError(
                f"{len(turns)} response tokens, but behaviour_logprob, fresh and trained have {sizes} entries"
            )
        if len(self.observation_ids) != len(self.invalid):
            raise ValueError(f"{len(self.invalid)} turns, but observation_ids has {len(self.observation_ids)} entries")
        if len(turns) and not 0 <= turns.min() <= turns.max() < len(self.invalid):
            raise ValueError(f"turn indices must lie in the {len(self.invalid)} turns")
        split = sum(len(np.unique(row.turn_index)) for row in self.plain) != len(np.unique(turns))
        if split or (np.diff(turns) < 0).any():
            raise ValueError("the rows of a trajectory must follow the order of its turns, each turn in one row")
        self._check_skill_rows()

    def _check_skill_rows(self) -> None:
        response = self._response_ids(self.plain)
        seen: set[int] = set()
        for row in self.skill:
            scored = set(row.turn_index.tolist())
            if seen & scored:
                raise ValueError(f"the turns {sorted(seen & scored)} are scored in more than one skill context")
            seen |= scored
            at = self._positions(row)
            same = np.array_equal(self.turn_index[at], row.turn_index)
            if not (same and np.array_equal(response[at], self._response_ids((row,)))):
                raise ValueError("the response ids of the skill context differ from those that were sampled")

    @staticmethod
    def _response_ids(rows: tuple[TokenRow, ...]) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int32), *(row.token_ids[row.response_mask] for row in rows)])

    def _positions(self, row: TokenRow) -> np.ndarray:
        return np.flatnonzero(np.isin(self.turn_index, row.turn_index))

    @property
    def turn_index(self) -> np.ndarray:
        """The turn of each sampled token, int32 [R]."""
        return np.concatenate([np.empty(0, np.int32), *(row.turn_index for row in self.plain)])

    @property
    def skill_positions(self) -> np.ndarray:
        """Where among the R sampled tokens those of the skill rows lie, int64 [S], in the order of the skill rows."""
        return np.concatenate([np.empty(0, np.int64), *(self._positions(row) for row in self.skill)])


@dataclass(frozen=True, eq=False)
class UpdateBatch:
    """Whole groups of trajectories; an update never sees part of a group. `share`: what one rank has of a batch."""

    trajectories: tuple[UpdateTrajectory, ...]
    share: bool = False

    def __post_init__(self) -> None:
        """Refuse a batch that nobody can have sampled. One with all its tokens too old is allowed: it has no loss."""
        if not self.share and not any(len(trajectory.fresh) for trajectory in self.trajectories):
            raise ValueError(f"{len(self.trajectories)} trajectories without any response token")
