"""The command line, which is also the composition root: commands import what they run only when they run it."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from seed_async.api_key import ApiKeyError, read_api_key
from seed_async.devices import num_cuda_devices
from seed_async.journal import JournalDamagedError
from seed_async.launcher import LaunchError, Status, launch, role_processes, running_launcher
from seed_async.live import History, progress_of, read_fleet
from seed_async.role import die_with_launcher
from seed_async.rundir import RunDir
from seed_async.topology import Topology
from seed_async.topology_file import TopologyError, check_machine, engine_lack, load_topology
from seed_async.topology_roles import EngineRole, Http, Policy

USER_ERROR = 2
"""Exit code of what the user can put right; 1 is a run that failed."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
data_app = typer.Typer(no_args_is_help=True, help="Make the data of Stage 1.")
app.add_typer(data_app, name="data")

TopologyOption = Annotated[Path, typer.Option("--topology", help="Topology file (YAML).")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. run.seed=1; repeatable.")
]


class UsageError(ValueError):
    """An argument that names something that is not there."""


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn what a user can cause into one line on stderr and exit code 2."""
    from seed_async.envs.contract import GameFormatError, TaskNotFoundError
    from seed_async.envs.registry import UnknownEnvironmentError

    try:
        yield
    except (
        UsageError,
        TopologyError,
        UnknownEnvironmentError,
        TaskNotFoundError,
        GameFormatError,
        JournalDamagedError,
        ApiKeyError,
    ) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(USER_ERROR) from error
    except OSError as error:
        print(f"{error.filename}: {error.strerror}" if error.filename else error, file=sys.stderr)
        raise typer.Exit(USER_ERROR) from error


def _count_tasks(topology: Topology) -> dict[str, int]:
    """Open the environment and return the tasks of each split that the run uses."""
    from seed_async.envs.registry import open_suite

    suite = open_suite(topology.env)
    evaluation = topology.roles.evaluation
    splits = [topology.env.split] + ([evaluation.split] if evaluation else [])
    counts = {split: len(suite.tasks(split)) for split in splits}
    for split, number in counts.items():
        if number == 0:
            raise TopologyError(f"env: split {split!r} of {topology.env.games} has no game that passes env.filter")
    return counts


def _require_model(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise UsageError(f"{path} is no checkpoint folder: it holds no config.json")


def _require_engine(settings: EngineRole) -> None:
    if (lack := engine_lack(settings)) is not None:
        raise UsageError(lack)
    if settings.device == "cuda" and not num_cuda_devices():
        raise UsageError("device cuda: this machine has no CUDA device")


def _note_idle_keys(topology: Topology) -> None:
    for key in topology.idle_keys:
        print(f"note: {key} has no effect with method {topology.method}", flush=True)


def _require_api_key(topology: Topology) -> None:
    """Refuse a run whose endpoint would not find its key."""
    if topology.roles.policy.http is not None:
        read_api_key(topology.roles.policy.http)


def _require_data(path: Path) -> None:
    if not any(path.glob("*.jsonl")):
        raise UsageError(f"{path} holds no *.jsonl: make the data first (seed-async data demonstrations)")


def _report(run_dir: RunDir, topology: Topology, phases: dict[str, float], status: Status) -> None:
    from seed_async.tools.plots import write_plots
    from seed_async.tools.summary import print_summary, write_summary

    summary = write_summary(run_dir, topology, phases, status)
    write_plots(run_dir, topology)
    print_summary(summary)
    print(f"summary: {run_dir.summary}  plots: {run_dir.plots}")


@app.callback()
def _main() -> None:
    """Asynchronous training of LLM agents with SEED (self-evolving on-policy distillation)."""
    # The launcher runs Stage 1 through this program; it must not outlive the launcher.
    die_with_launcher()


@app.command("launch")
def launch_command(
    topology: TopologyOption,
    overrides: SetOption = None,
    overwrite: Annotated[bool, typer.Option(help="Delete an earlier run of that name.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with an earlier run of that name.")] = False,
) -> None:
    """Run a topology: Stage 1 for a new model, asynchronous training, summary and plots."""
    with _user_errors():
        if overwrite and resume:
            raise UsageError("--overwrite deletes the run that --resume goes on with: give one of them")
        loaded = load_topology(topology, overrides or ())
        check_machine(loaded, topology, overrides or ())
        _require_api_key(loaded)
        _count_tasks(loaded)
    _note_idle_keys(loaded)
    try:
        code = launch(loaded, _report, overwrite=overwrite, resume=resume)
    except LaunchError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(USER_ERROR) from error
    raise typer.Exit(code)


@app.command()
def validate(topology: TopologyOption, overrides: SetOption = None) -> None:
    """Check a topology and print the numbers that follow from it; starts nothing."""
    with _user_errors():
        loaded = load_topology(topology, overrides or ())
        check_machine(loaded, topology, overrides or ())
        _require_api_key(loaded)
        tasks = _count_tasks(loaded)
    rollout, actors = loaded.rollout, loaded.roles.actors
    groups, size, bound = rollout.groups_per_update, rollout.group_size, loaded.staleness.max
    numbers = {
        "run directory": loaded.run_dir,
        "processes": len(list(role_processes(loaded))),
        "trajectories an update": f"{groups} groups * {size} = {rollout.batch_trajectories}",
        "episodes at once": f"{actors.replicas} actors * {actors.games_each} = {actors.replicas * actors.games_each}",
        "groups open at most": f"({bound} + 1) * {groups} = {(bound + 1) * groups}",
        "analysis": "yes" if loaded.uses_analyzers else f"none ({loaded.method})",
        "weights": _describe_weights(loaded),
        "tasks": ", ".join(f"{split} {number}" for split, number in tasks.items()),
    }
    _note_idle_keys(loaded)
    print(f"ok: {topology}")
    for name, number in numbers.items():
        print(f"  {name}: {number}")


def _describe_weights(topology: Topology) -> str:
    weights = topology.weights
    text = f"{weights.transport}, control over {weights.control}"
    if weights.control == "rpc" or weights.transport != "shm":
        # torch has no authentication, and rpc runs what it is sent.
        text += f" (whoever reaches its ports at {weights.interface} is trusted: loopback or a private network only)"
    return text


@app.command()
def status(run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")]) -> None:
    """Show how a run stands; exit code 1 when no launcher is at work in it."""
    directory = RunDir(run_dir)
    if not directory.topology.is_file():
        print(f"{run_dir} is no run directory: it holds no topology.yaml", file=sys.stderr)
        raise typer.Exit(USER_ERROR)
    pid = running_launcher(directory)
    if pid is None:
        print("not running")
        raise typer.Exit(1)
    fleet, history = read_fleet(directory), History()
    history.add(0.0, fleet)
    progress = progress_of(fleet, history)
    print(f"running: launcher {pid}, {len(fleet)} processes answer")
    print(f"updates: {progress.updates}")
    print(f"trained: {progress.trained}")
    print(f"running trajectories: {progress.running}")
    print(f"buffered trajectories: {progress.buffered}")
    for reason, number in sorted(progress.dropped.items()):
        print(f"dropped ({reason}): {number:.0f}")
    for name, version in progress.versions.items():
        print(f"version of {name}: {version:.0f}")


@app.command()
def audit(run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")]) -> None:
    """Check that a run kept its promises, entry by entry; exit code 1 when one was broken."""
    from rich.console import Console

    from seed_async.tools.audit import audit_run, print_audit

    directory = RunDir(run_dir)
    with _user_errors():
        if not directory.journal.is_file():
            raise UsageError(f"{run_dir} holds no journal: it is not a run, or training never started")
        found = audit_run(directory, load_topology(directory.topology))
    print_audit(found, Console())
    if not found.passed:
        raise typer.Exit(1)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Option(help="Checkpoint folder to evaluate.")],
    topology: TopologyOption,
    overrides: SetOption = None,
    split: Annotated[str | None, typer.Option(help="Instead of roles.evaluation.split.")] = None,
    games: Annotated[int | None, typer.Option(help="Instead of roles.evaluation.games.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
) -> None:
    """Play the held-out panel with a checkpoint, without a run."""
    settings = {"split": split, "games": games}
    given = [f"roles.evaluation.{key}={value}" for key, value in settings.items() if value is not None]
    with _user_errors():
        loaded = load_topology(topology, [*(overrides or ()), *given])
        _require_model(model)
        _require_engine(loaded.roles.policy)
        _count_tasks(loaded)
        from seed_async.actors.evaluation_cli import evaluate_model

        print(json.dumps(evaluate_model(loaded, model, out), indent=2))


@app.command()
def serve(
    model: Annotated[Path, typer.Option(help="Model folder: runs/NAME/final, say.")],
    port: Annotated[int, typer.Option(min=0, max=65000, help="0 takes a free one.")] = 8400,
    host: Annotated[str, typer.Option(help="Other than loopback only with an API key.")] = "127.0.0.1",
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the API key.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the API key.")] = None,
    engine: Annotated[str, typer.Option(help="`torch` or `vllm`.")] = "torch",
    device: Annotated[str, typer.Option(help="`cpu` or `cuda`.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1)] = 1,
    max_slots: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 16,
    max_context_tokens: Annotated[int | None, typer.Option(min=2, help="Of prompt and response.")] = None,
) -> None:
    """Serve a model for OpenAI clients, without a run."""
    from pydantic import ValidationError

    with _user_errors():
        _require_model(model)
        keys = {"api_key_env": api_key_env, "api_key_file": api_key_file}
        try:
            http = Http.model_validate({"port": port, "host": host, **keys})
            settings = {"engine": engine, "device": device, "threads": threads, "max_slots": max_slots}
            policy = Policy.model_validate(settings)
        except ValidationError as error:
            raise UsageError("; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())) from error
        _require_engine(policy)
        read_api_key(http)
        from seed_async.actors.endpoint.standalone import serve_until_signalled

        serve_until_signalled(model, policy, http, max_context_tokens)


@app.command()
def merge(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="Checkpoint folder: runs/NAME/checkpoints/version-00000010, or verl's global_step_N/actor."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the model; must not exist.")],
    model: Annotated[Path | None, typer.Option(help="What the run started from; by default that of its run.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Read verl's pickled shards: you know who made them.")] = False,
) -> None:
    """Make a Hugging Face folder of a training checkpoint, checked by loading it again."""
    from seed_async.learner.export import merge_checkpoint
    from seed_async.learner.verl_shards import is_verl_checkpoint, merge_verl_shards

    run_dir = RunDir(checkpoint.resolve().parent.parent)
    with _user_errors():
        if out.exists():
            raise UsageError(f"{out} exists already")
        if is_verl_checkpoint(checkpoint):
            try:
                merge_verl_shards(checkpoint, out, model, trust=trust)
            except ValueError as error:
                raise UsageError(str(error)) from error
            print(f"{checkpoint} -> {out}")
            return
        if model is None and not run_dir.topology.is_file():
            raise UsageError(f"{checkpoint} does not lie in a run directory: give --model")
        topology = load_topology(run_dir.topology) if run_dir.topology.is_file() else None
        start = model or (run_dir.initial_model(topology) if topology else checkpoint)
        try:
            version = merge_checkpoint(checkpoint, start, out, topology.model.lora if topology else None)
        except ValueError as error:
            raise UsageError(str(error)) from error
    print(f"version {version} -> {out}")


@app.command("init-model")
def init_model_command(
    topology: TopologyOption,
    data: Annotated[Path, typer.Option(help="Folder of Stage 1 data that the tokenizer is trained on.")],
    out: Annotated[Path, typer.Option(help="Folder of the new model.")],
    overrides: SetOption = None,
) -> None:
    """Make a new small model with its own tokenizer."""
    with _user_errors():
        loaded = load_topology(topology, overrides or ())
        if loaded.model.init is None:
            raise UsageError("init-model needs model.init in the topology; model.path names an existing checkpoint")
        _require_data(data)
        from seed_async.learner.init_model import init_model

        init_model(loaded, out, data)


@app.command()
def sft(
    topology: TopologyOption,
    model: Annotated[Path, typer.Option(help="Checkpoint folder to start from.")],
    data: Annotated[Path, typer.Option(help="Folder of Stage 1 data.")],
    out: Annotated[Path, typer.Option(help="Folder of the result.")],
    overrides: SetOption = None,
) -> None:
    """Train Stage 1: supervised fine-tuning on demonstrations and analyses."""
    with _user_errors():
        loaded = load_topology(topology, overrides or ())
        _require_model(model)
        _require_data(data)
        from seed_async.learner.sft import RowTooLongError, train

        try:
            train(loaded, model, data, out)
        except RowTooLongError as error:
            raise UsageError(str(error)) from error


@data_app.command()
def demonstrations(
    topology: TopologyOption,
    out: Annotated[Path, typer.Option(help="Folder for demonstrations.jsonl and analyses.jsonl.")],
    overrides: SetOption = None,
) -> None:
    """Write expert demonstrations and oracle analyses of training games."""
    with _user_errors():
        loaded = load_topology(topology, overrides or ())
        from seed_async.actors.demonstrations import make_demonstrations

        make_demonstrations(loaded, out)
        print(f"stage 1 data -> {out}")


@data_app.command("alfworld")
def alfworld_command(
    out: Annotated[Path, typer.Option(help="Folder in which json_2.1.1/SPLIT/TASK/TRIAL is made.")],
    train: Annotated[int, typer.Option(min=0, help="Games of train.")] = 0,
    seen: Annotated[int, typer.Option(min=0, help="Games of valid_seen.")] = 0,
    unseen: Annotated[int, typer.Option(min=0, help="Games of valid_unseen.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same games.")] = 0,
    min_receptacles: Annotated[int, typer.Option(help="Fewest receptacles of a room, from 4.")] = 4,
    max_receptacles: Annotated[int, typer.Option(help="Most receptacles of a room, up to 20.")] = 8,
    num_objects: Annotated[int, typer.Option(help="Objects of a room, 2 to 40.")] = 6,
    task_type: Annotated[list[str] | None, typer.Option(help="Only this task type; repeatable.")] = None,
    room: Annotated[list[str] | None, typer.Option(help="Only this kind of room; repeatable.")] = None,
    vocabulary: Annotated[str, typer.Option(help="`move` (ALFWorld 0.4) or `put` (older).")] = "move",
) -> None:
    """Write generated ALFWorld games in the official folder layout, which ALFWorld's own code reads too."""
    with _user_errors():
        from seed_async.envs.alfworld.catalogue import ROOM_KINDS
        from seed_async.envs.alfworld.generator import Settings, feasible_task_types
        from seed_async.envs.alfworld.vocabulary import vocabulary_name
        from seed_async.envs.alfworld.writer import write_official

        counts = {"train": train, "valid_seen": seen, "valid_unseen": unseen}
        wanted = {split: number for split, number in counts.items() if number}
        if not wanted:
            raise UsageError("no game is asked for: give at least one of --train, --seen and --unseen")
        rooms = tuple(room or ROOM_KINDS)
        try:
            types = tuple(task_type or feasible_task_types(rooms))
            settings = Settings(seed, min_receptacles, max_receptacles, num_objects, types, rooms)
            folder = write_official(out, settings, wanted, vocabulary_name(vocabulary))
        except ValueError as error:
            raise UsageError(str(error)) from error
        print(f"games: {', '.join(f'{split} {number}' for split, number in wanted.items())} -> {folder}")


if __name__ == "__main__":
    app()
