"""A corridor to walk and a policy that says what a test tells it: fakes of Environment and Generator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from seed_async.envs.contract import Analysis, Expert, Info, Observation, Step, StepResult, TaskNotFoundError
from seed_async.messages import GenerateReply
from seed_async.ports import RequestKind, Sampling
from seed_async.text import ChatTokenizer


@dataclass
class Corridor:
    """Won after `length` times `go`; lost by `fall`; cut off after `max_steps`. Other commands are invalid."""

    length: int = 2
    max_steps: int = 50
    commands: list[str] = field(default_factory=list)

    def reset(self, task: str) -> Observation:
        """Start again. Raises TaskNotFoundError for `missing`."""
        if task == "missing":
            raise TaskNotFoundError(task)
        self._place, self._over = 0, False
        self.commands = []
        return self._observe("You are at door 0.")

    def step(self, command: str) -> StepResult:
        """Walk."""
        if self._over:
            raise AssertionError("a finished episode was played on")
        self.commands.append(command)
        self._place += command == "go"
        won, lost = self._place == self.length, command == "fall"
        late = len(self.commands) == self.max_steps
        self._over = won or lost or late
        text = f"You are at door {self._place}." if command in ("go", "fall") else "Nothing happens."
        observation = self._observe(text, won=won, valid=command in ("go", "fall"))
        return StepResult(
            observation=observation, reward=float(won), terminated=won or lost, truncated=late and not (won or lost)
        )

    def _observe(self, text: str, *, won: bool = False, valid: bool = True) -> Observation:
        info = Info(task="walk to the end.", task_type="corridor", won=won, valid=valid)
        return Observation(text=text, admissible=("go", "fall"), info=info)


class CorridorSuite:
    """Corridors only."""

    def tasks(self, split: str) -> Sequence[str]:
        """Return five tasks."""
        return [f"{split}/{number}" for number in range(5)]

    def make(self) -> Corridor:
        """Return a corridor of two doors."""
        return Corridor()

    def expert(self) -> Expert:
        """Refuse: no test asks for one."""
        raise NotImplementedError

    def solution(self, task: str) -> Sequence[str]:
        """Return the way."""
        return ["go", "go"]

    def annotate(self, task: str, steps: Sequence[Step], won: bool) -> Analysis:
        """Return the one thing to know."""
        return Analysis(episode_summary="walked", episode_skill="go")


class ScriptedGenerator:
    """Answers with the next text of a script, ended by EOS unless it fills the room; keeps every prompt it saw."""

    def __init__(self, tokenizer: ChatTokenizer, script: Callable[[int], str], *, end: bool = True) -> None:
        """`script` gives the response of each call."""
        self._tokenizer, self._script, self._end = tokenizer, script, end
        self.prompts: list[np.ndarray] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, kind: RequestKind) -> GenerateReply:
        """Check the request as an engine would, then answer at version = number of the call."""
        assert prompt_ids.dtype == np.int32 and prompt_ids.ndim == 1 and prompt_ids.size
        assert prompt_ids.min() >= 0 and prompt_ids.max() < self._tokenizer.vocabulary_size
        assert sampling.max_new_tokens >= 1 and sampling.stop_ids == self._tokenizer.eos_ids
        number = len(self.prompts)
        self.prompts.append(prompt_ids.copy())
        self.samplings.append(sampling)
        ids = self._tokenizer.encode(self._script(number))
        if self._end:
            ids = np.append(ids, np.int32(self._tokenizer.eos_ids[0]))
        cut = ids[: sampling.max_new_tokens].astype(np.int32)
        return GenerateReply(
            request_id=str(number),
            token_ids=cut,
            logprobs=np.full(cut.size, -0.5, dtype=np.float32),
            versions=np.full(cut.size, number, dtype=np.int32),
            finish_reason="length" if cut.size < ids.size else "stop",
            cached_tokens=0,
        )
