"""The topology: everything that a run is, as frozen models. Unknown keys are refused; derived numbers are properties.

Fields whose name does not say it all state what they are, their unit and why. `topology_file` reads it from YAML.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from seed_async.methods import IDLE_KEYS, MAX_STEP_SKILLS, METHODS_OF_KEY, SKILL_SOURCES, MethodName, SkillSource
from seed_async.section import NonNegative, Positive, Seconds, Section
from seed_async.topology_roles import EngineRole, Roles

TaskType = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
RoomKind = Literal["kitchen", "living_room", "bedroom", "bathroom"]
OnStale = Literal["drop", "mask", "wait"]
MAX_VLLM_LORA_RANK = 512
"""The largest adapter that vLLM 0.32 has room for."""


class Run(Section):
    """What to call the run, where it writes, and when it ends."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    seed: NonNegative = 0
    """Order of games, sampling, Stage 1 and initial weights derive from it; the games themselves do not."""
    dir: Path = Path("runs")
    updates: Positive = 150
    """The run ends after this many updates (the paper's 150 for ALFWorld) ..."""
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """... or when the learner has trained for this long, whichever comes first."""


class GeneratedGames(Section):
    """Size and difficulty of generated games (used when `env.games` is `generated`)."""

    seed: NonNegative = 0
    """Decides the games; the run's seed never does, so that panels are the same across runs."""
    train: Positive = 2000
    valid_seen: Positive = 140
    valid_unseen: Positive = 140
    min_receptacles: Annotated[int, Field(ge=4, le=20)] = 4
    max_receptacles: Annotated[int, Field(ge=4, le=20)] = 8
    num_objects: Annotated[int, Field(ge=2, le=40)] = 6

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_receptacles > self.max_receptacles:
            raise ValueError(f"min_receptacles {self.min_receptacles} exceeds max_receptacles {self.max_receptacles}")
        return self


class GameFilter(Section):
    """Which games of the source to use; empty means no restriction."""

    task_types: tuple[TaskType, ...] = ()
    rooms: tuple[RoomKind, ...] = ()
    max_receptacles: Positive | None = None


class Env(Section):
    """Which games are played."""

    id: str = "alfworld"
    """A built-in environment, or `module:Class` of your own suite."""
    games: str = "generated"
    """`generated`; `official` for what `alfworld-download` has fetched; or a path to a compact JSONL(.xz) file or an
    official game folder."""
    backend: Literal["own", "textworld"] = "own"
    """`own` is our engine. `textworld` is the original (extra `alfworld`): the same text a thousand times slower, one
    process of about 100 MB for each game that is played at once."""
    split: str = "train"
    max_steps: Positive = 30
    vocabulary: Literal["move", "put"] = "move"
    """`move X to Y` of ALFWorld 0.4.x, or `put X in/on Y` of older data; recorded in every trajectory."""
    isolation: Literal["none", "process"] | None = None
    """`process`: each environment runs in a process of its own with the deadlines below, so that one that hangs or
    crashes costs its episode only; `none`: inside the actor, for engines that never block. None takes what the suite
    declares (`may_block`); the built-in engine never blocks."""
    step_timeout_s: Seconds = 60.0
    """isolation process: a reset or step without an answer after this long ends the episode as failed."""
    episode_timeout_s: Seconds = 600.0
    """isolation process: time inside the environment over one episode; waiting for the policy does not count."""
    start_timeout_s: Seconds = 120.0
    """isolation process: from the start of the process until its environment is made."""
    max_memory_mb: Positive = 4096
    """isolation process: private memory of an environment; beyond it allocations fail (Linux)."""
    generated: GeneratedGames = GeneratedGames()
    filter: GameFilter = GameFilter()


class TinyModel(Section):
    """A small Llama with its own tokenizer, made by `init-model`; one to five million parameters train on a laptop."""

    hidden_size: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    intermediate_size: Positive = 384
    vocabulary_size: Annotated[int, Field(ge=300)] = 1024
    max_context_tokens: Positive = 2048

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of 2 * heads = {2 * self.heads}")
        return self


class Lora(Section):
    """Low-rank adapters: W + alpha / rank * B A, of which only A and B are trained (needs the extra `lora`)."""

    rank: Positive = 16
    alpha: Positive = 32
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get one, e.g. [q_proj, v_proj]; none: all but the vocabulary projection."""
    publish: Literal["merged", "adapters"] = "merged"
    """What a version of the weights holds. `merged`: the plain model W + alpha / rank * B A, as if there were no
    adapters. `adapters`: A and B alone, in float32, which engines apply on the initial model that they have loaded:
    a few percent of the bytes, for two more matrix products a layer in each forward pass (docs/learner.md)."""


class Model(Section):
    """Where the initial checkpoint comes from: an existing Hugging Face folder, or Stage 1 of this run."""

    path: Path | None = None
    init: TinyModel | None = None
    lora: Lora | None = None
    """Train adapters instead of all weights; what is exported and merged is a plain model all the same."""

    @property
    def served_adapters(self) -> Lora | None:
        """The adapters that engines apply on the initial model; None where versions hold whole models."""
        return self.lora if self.lora is not None and self.lora.publish == "adapters" else None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.init is None):
            raise ValueError(
                "give exactly one of model.path (an existing checkpoint) and model.init (a new tiny model)"
            )
        return self


class Stage1(Section):
    """Warm start by supervised fine-tuning; it runs only for a model that is made here (`model.init`)."""

    demonstrations: Positive = 600
    """Expert episodes on training games."""
    mistake_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the expert's steps replaced by a random admissible command, whose tokens carry no loss."""
    skill_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Share of demonstrations whose prompt carries the oracle's skill, so that the policy learns to read one."""
    generated_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of both that is made on generated games (`env.generated`, `env.filter`) when `env.games` names others. A
    tiny model learns two dozen real rooms by heart; rooms that never repeat make it read."""
    analysis_rows: NonNegative = 300
    """Trajectories with the oracle annotator's analysis."""
    prompt_loss_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of prompt tokens beside response tokens (1). 0 is the paper's loss; with 0.3 a model that starts from
    nothing also learns the environment's sentences, and so to copy names out of them."""
    epochs: Positive = 3
    batch_rows: Positive = 16
    lr: Annotated[float, Field(gt=0)] = 3e-3
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    validation_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    token_budget: Positive = 8192
    """Tokens of a packed micro-batch; bounds memory, never changes the result."""
    threads: Positive = 2
    """Nothing else runs during Stage 1, so it may use every core of a laptop."""


class Rollout(Section):
    """How trajectories are sampled."""

    groups_per_update: Positive = 16
    group_size: Positive = 8
    temperature: Annotated[float, Field(gt=0)] = 1.0
    layout: Literal["transcript", "windowed"] = "transcript"
    """`transcript`: the whole episode as one append-only chat. `windowed`: each step is a prompt of its own, with a
    history block (the paper's; algorithm specification, section 3)."""
    history_window: NonNegative = 5
    """Layout `windowed`: observation/action pairs in the history block. Fewer are shown when they would not fit."""
    strict_admissible: bool = False
    """An action outside the admissible list is penalised like an unparsable one. The public recipe does not check."""
    prompt_style: Literal["full", "compact"] = "full"
    """`full` lists the admissible commands each turn; `compact` keeps the observation only, for tiny models."""
    max_context_tokens: Positive = 2048
    """An episode whose next turn would not fit ends as truncated."""
    max_response_tokens: Positive = 512
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A response also ends with the token that completes one of these strings, `</action>` say. A policy that was not
    trained with it then never learns to end its turn by itself."""

    @property
    def batch_trajectories(self) -> int:
        """Trajectories an update: groups_per_update * group_size."""
        return self.groups_per_update * self.group_size


class Staleness(Section):
    """How old a sampled token may be when it is trained on."""

    max: NonNegative = 1
    """Inclusive bound on (version about to be updated - oldest sampling version)."""
    on_stale: OnStale = "drop"
    """What becomes of a group that grew too old. `drop`: it is left out whole, because group statistics need all its
    members. `mask`: it is trained, without its tokens that are too old. `wait`: the learner does not go on before the
    group is trained, so that nothing grows too old."""


class Analysis(Section):
    """Hindsight analysis (algorithm specification, section 5)."""

    max_context_tokens: Positive = 16384
    max_output_tokens: Positive = 4096
    timeout_s: Seconds = 60.0
    """A skill that comes later than this after its trajectory ended is given up: RL terms only, counted."""
    on_new_version: Literal["finish", "restart"] = "finish"
    """When weights come while an analysis runs: `finish` goes on with them, and the skill keeps the version that it was
    begun with; `restart` begins anew, which costs time."""
    prompt_style: Literal["full", "compact"] = "full"


class Skills(Section):
    """Skills that nobody has to write during the run."""

    library: Annotated[str, Field(min_length=1)] | None = None
    """A built-in library's name or the path of a Markdown file (docs/methods.md). None takes the one of the
    environment. Method `sdar` takes every skill from it, `opsd` those of trajectories whose analysis failed."""


class Optimizer(Section):
    """AdamW, constant learning rate (the paper's values)."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    warmup_updates: NonNegative = 0
    """The learning rate rises to `lr` over so many updates. Adam's first steps have the size of the learning rate
    whatever the gradient: at the rate that a tiny model needs they can cost it what Stage 1 taught."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    mini_batch_trajectories: Positive | None = None
    """Trajectories an optimizer step; None takes the whole batch at once."""
    token_budget: Positive = 16384
    """Tokens of a packed micro-batch; bounds memory, never changes the result."""


class Loss(Section):
    """The joint loss (algorithm specification, sections 4 and 6)."""

    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    importance_cap: Annotated[float, Field(ge=1)] = 2.0
    kl_coef: Annotated[float, Field(ge=0)] = 0.01
    """0 switches the reference model off at no cost."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.001
    opd_coef: Annotated[float, Field(ge=0)] = 0.01
    opd_beta: Annotated[float, Field(ge=0)] = 5.0
    opd_gate: Literal["sigmoid", "centered", "positive_only"] = "sigmoid"
    opid_coef: Annotated[float, Field(ge=0)] = 0.001
    """Method `opid`: weight of the log-prob shift under the skill, added to the advantage."""
    opsd_coef: Annotated[float, Field(ge=0)] = 1.0
    """Method `opsd`: weight of the reverse KL to the skill context."""
    opsd_rl: bool = False
    """Method `opsd`: keep the RL term beside the distillation."""
    gigpo_discount: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Method `gigpo`: discount of a step's return."""
    gigpo_step_weight: Annotated[float, Field(ge=0)] = 1.0
    """Method `gigpo`: weight of the step advantage beside the episode's."""
    reward_scale: Annotated[float, Field(gt=0)] = 10.0
    invalid_penalty: Annotated[float, Field(ge=0)] = 0.1
    divide_by_std: bool = True
    statistics: Literal["rows", "trajectories"] = "rows"


class Buffer(Section):
    """The replay-free buffer of leases and finished groups."""

    max_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    """Back-pressure starts here: no further group is opened while more is held, beyond the one batch that trains."""
    lease_timeout_s: Seconds = 30.0
    """A lease whose actor sent no beat with progress for this long returns and is granted to another."""
    max_tries: Positive = 3
    """A member that failed this often ends its group whole."""


class Transport(Section):
    """How the processes of one host reach each other; both kinds are loopback only."""

    kind: Literal["ipc", "tcp"] = "ipc"
    base_port: Annotated[int, Field(ge=1024, le=65000)] = 27500
    """tcp: buffer at base_port, weight publisher at + 1, policy servers from + 2."""
    curve: bool = False
    """tcp: encrypt every connection and let in the processes of the run only; the launcher makes the keys, below the
    run directory. Off because both kinds are loopback only."""

    @model_validator(mode="after")
    def _curve_needs_tcp(self) -> Self:
        if self.curve and self.kind != "tcp":
            raise ValueError(f"transport.curve protects tcp; transport.kind is {self.kind}")
        return self


class Weights(Section):
    """How a new version of the weights reaches the policy servers and analyzers (docs/asynchrony.md)."""

    control: Literal["zmq", "rpc"] = "zmq"
    """Who holds what, and what is newest: over ZeroMQ, or over `torch.distributed.rpc`. The latter runs whatever it is
    sent by anybody who reaches its port: loopback or a private network only."""
    transport: Literal["shm", "gloo", "nccl"] = "shm"
    """The bytes: `shm`: a file in the memory of one host; `gloo` and `nccl` broadcast them."""
    in_flight: Literal["continue", "finish"] = "continue"
    """Requests that run in a policy server when a version arrives: they go on under the new one, each token with its
    version; or they finish under the old one first, while new ones wait."""
    finish_timeout_s: Seconds = 10.0
    """in_flight finish: longest wait for them; then the version is taken all the same."""
    transfer_timeout_s: Seconds = 60.0
    verify_timeout_s: Seconds = 60.0
    acknowledge_timeout_s: Seconds = 60.0
    """A receiver that is late for one of these three phases is given up by name while another one is in time."""
    canary_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Nats by which an engine's log-probs on the canary may differ from the learner's before it refuses a version
    (docs/generation.md). None: 0.001 where both compute in float32, 0.5 where one computes in less."""
    interface: str = "lo"
    """Network interface of rpc, gloo and nccl."""


class Checkpoints(Section):
    """Checkpoints of the learner: what a killed learner, or `launch --resume`, goes on from."""

    every: NonNegative = 10
    """Save after this many updates; 0 saves none, and then the death of the learner ends the run."""
    keep: Annotated[int, Field(ge=1)] = 2
    """The newest ones stay, the rest are removed."""


class Supervision(Section):
    """How the launcher treats the death of a role."""

    max_restarts: NonNegative = 5
    """Restarts of one process within `window_s` before the run is given up."""
    window_s: Seconds = 120.0
    hang_timeout_s: Seconds = 60.0
    """A process whose main loop has not turned for this long is killed, and then treated like one that died. The
    learner's loop turns once a micro-batch: keep it above the longest of them."""
    start_timeout_s: Seconds = 240.0
    """The same before its first turn, for each part of the start: importing torch, loading a model, reading a journal.
    Generous because processes that start together share the cores: a model may take minutes on a busy laptop."""
    backoff_max_s: Seconds = 32.0
    stop_timeout_s: Seconds = 30.0
    """Time between SIGTERM and SIGKILL at the end."""

    @property
    def replacement_timeout_s(self) -> float:
        """How long others wait for a process that hangs, is killed, and starts again.

        max(hang_timeout_s, start_timeout_s) + backoff_max_s + start_timeout_s
        """
        return max(self.hang_timeout_s, self.start_timeout_s) + self.backoff_max_s + self.start_timeout_s


class Topology(Section):
    """A whole run."""

    run: Run = Run()
    method: MethodName = "seed"
    env: Env = Env()
    model: Model
    stage1: Stage1 = Stage1()
    rollout: Rollout = Rollout()
    staleness: Staleness = Staleness()
    analysis: Analysis = Analysis()
    skills: Skills = Skills()
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()
    roles: Roles = Roles()
    buffer: Buffer = Buffer()
    transport: Transport = Transport()
    weights: Weights = Weights()
    checkpoint: Checkpoints = Checkpoints()
    supervision: Supervision = Supervision()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stage1.generated_share and (self.env.id != "alfworld" or self.env.games == "generated"):
            raise ValueError(
                f"stage1.generated_share {self.stage1.generated_share} mixes generated games into those of a file or "
                f"folder of ALFWorld: env.id is {self.env.id}, env.games {self.env.games}"
            )
        if self.rollout.group_size == 1 and self.loss.divide_by_std:
            raise ValueError(
                "rollout.group_size 1 has no spread to divide by: set loss.divide_by_std: false or a larger group"
            )
        mini = self.optimizer.mini_batch_trajectories
        if mini is not None and self.rollout.batch_trajectories % mini:
            raise ValueError(
                f"optimizer.mini_batch_trajectories {mini} must divide the batch of "
                f"{self.rollout.batch_trajectories} trajectories"
            )
        init = self.model.init
        for name, tokens in (
            ("rollout", self.rollout.max_context_tokens),
            ("analysis", self.analysis.max_context_tokens),
        ):
            if init is not None and tokens > init.max_context_tokens:
                raise ValueError(
                    f"{name}.max_context_tokens {tokens} exceeds "
                    f"model.init.max_context_tokens {init.max_context_tokens}"
                )
        if self.analysis.max_output_tokens >= self.analysis.max_context_tokens:
            raise ValueError("analysis.max_output_tokens must be smaller than analysis.max_context_tokens")
        if self.rollout.max_response_tokens >= self.rollout.max_context_tokens:
            raise ValueError("rollout.max_response_tokens must be smaller than rollout.max_context_tokens")
        return self

    @model_validator(mode="after")
    def _adapters_fit_vllm(self) -> Self:
        lora = self.model.served_adapters
        if lora is None:
            return self
        for _, section, settings in self.engine_roles:
            if settings.engine == "vllm" and lora.rank > MAX_VLLM_LORA_RANK:
                raise ValueError(
                    f"model.lora.publish adapters with roles.{section}.engine vllm takes ranks up to "
                    f"{MAX_VLLM_LORA_RANK}; model.lora.rank is {lora.rank}"
                )
            if settings.engine == "vllm" and settings.vllm.weight_transfer != "arrays":
                raise ValueError(
                    f"roles.{section}.vllm.weight_transfer {settings.vllm.weight_transfer} has no effect with "
                    "model.lora.publish adapters, which vLLM reads from a file in memory: remove it"
                )
        return self

    @model_validator(mode="after")
    def _no_idle_keys(self) -> Self:
        """Refuse a key that would do nothing. Compared with the default: a written-out topology holds every key."""
        for key, methods in METHODS_OF_KEY.items():
            if self.method not in methods and not self._is_default(key):
                raise ValueError(
                    f"{key} has no effect with method {self.method} (only with {', '.join(methods)}): remove it"
                )
        if self.rollout.layout != "windowed" and not self._is_default("rollout.history_window"):
            raise ValueError(
                f"rollout.history_window has no effect with rollout.layout {self.rollout.layout} (only with windowed): "
                "remove it"
            )
        return self

    def _is_default(self, key: str) -> bool:
        *path, name = key.split(".")
        values: Section = self
        for part in path:
            values = getattr(values, part)
        return bool(getattr(values, name) == type(values).model_fields[name].default)

    @property
    def idle_keys(self) -> tuple[str, ...]:
        """Keys that were changed and that this method does not read: shared ones, so that methods can be compared."""
        return tuple(
            key for key, methods in IDLE_KEYS.items() if self.method not in methods and not self._is_default(key)
        )

    @property
    def run_dir(self) -> Path:
        """The run directory: run.dir / run.name."""
        return self.run.dir / self.run.name

    def canary_tolerance_nats(self, settings: EngineRole) -> float:
        """weights.canary_tolerance, or what fits the dtypes that the learner and an engine compute in."""
        if self.weights.canary_tolerance is not None:
            return self.weights.canary_tolerance
        return 1e-3 if settings.dtype == self.roles.learner.dtype == "float32" else 0.5

    @property
    def engine_roles(self) -> tuple[tuple[str, str, EngineRole], ...]:
        """The roles of this run that own an engine: role, its section below `roles`, and that section."""
        policy = ("policy", "policy", self.roles.policy)
        return (policy, ("analyzer", "analyzers", self.roles.analyzers)) if self.uses_analyzers else (policy,)

    @property
    def skill_source(self) -> SkillSource:
        """Where the teacher's skill comes from: an analysis of the trajectory, a library, or nowhere."""
        return SKILL_SOURCES[self.method]

    @property
    def uses_skills(self) -> bool:
        """Whether the method has a teacher with a skill: skill_source is not none."""
        return self.skill_source != "none"

    @property
    def uses_analyzers(self) -> bool:
        """Whether finished trajectories are analysed during the run: skill_source is hindsight."""
        return self.skill_source == "hindsight"

    @property
    def reads_library(self) -> bool:
        """Whether the teacher may read the skill library: sdar always, opsd where it has no hindsight skill."""
        return self.method in METHODS_OF_KEY["skills.library"]

    @property
    def pins_analyzer(self) -> bool:
        """Whether the analyzer keeps the weights of version 0 for the whole run: seed_static."""
        return self.method == "seed_static"

    @property
    def num_weight_receivers(self) -> int:
        """Processes that take new weights from the learner: policy servers, and analyzers that do not keep the first.

        roles.policy.replicas + roles.analyzers.replicas * (uses_analyzers and not pins_analyzer)
        """
        analyzers = self.roles.analyzers.replicas if self.uses_analyzers and not self.pins_analyzer else 0
        return self.roles.policy.replicas + analyzers

    @property
    def max_step_skills(self) -> int:
        """Step skills that an analysis may hold: 5 for opid, else 0."""
        return MAX_STEP_SKILLS if self.method == "opid" else 0
