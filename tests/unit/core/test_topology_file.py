"""The topology file: what bad input gets, and the way back."""

from pathlib import Path
from typing import get_args

import pytest

from seed_async.launcher import role_processes
from seed_async.methods import IDLE_KEYS, METHODS_OF_KEY, MethodName
from seed_async.placement import place_gpus
from seed_async.topology import Topology
from seed_async.topology_file import TopologyError, check_machine, dump_topology, load_topology, parse_topology
from seed_async.user_files import MAX_FILE_BYTES

ROOT = Path(__file__).parents[3]
MINIMAL = "model: {path: /models/tiny}\n"


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(TopologyError) as caught:
        parse_topology(text, "t.yaml", overrides)
    return str(caught.value)


def file_error(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(TopologyError) as caught:
        load_topology(path)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "topologies").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_topology_loads(path: Path) -> None:
    assert isinstance(load_topology(path), Topology)


@pytest.mark.parametrize("path", sorted((ROOT / "topologies").glob("*.yaml")), ids=lambda path: path.name)
def test_writing_a_topology_and_reading_it_gives_the_same(path: Path) -> None:
    topology = load_topology(path)
    assert parse_topology(dump_topology(topology), "again") == topology


def test_round_trip_keeps_values_that_yaml_could_misread() -> None:
    overrides = ("run.name=on", "optimizer.lr=1e-6", "roles.evaluation=null", "run.max_minutes=1e2")
    topology = parse_topology(MINIMAL, "t.yaml", ("run.name='on'", *overrides[1:]))
    assert parse_topology(dump_topology(topology), "again") == topology


@pytest.mark.parametrize(
    ("text", "place", "name", "nearest"),
    [
        ("rum: {}\n" + MINIMAL, "t.yaml:1", "rum", "run"),
        (MINIMAL + "run:\n  seed: 1\n  nmae: x\n", "t.yaml:4", "run.nmae", "name"),
        (MINIMAL + "roles:\n  actors:\n    replica: 2\n", "t.yaml:4", "roles.actors.replica", "replicas"),
        (MINIMAL + "roles: {evaluation: {evry: 2}}\n", "t.yaml:2", "roles.evaluation.evry", "every"),
        ("model: {init: {hiden_size: 8}}\n", "t.yaml:1", "model.init.hiden_size", "hidden_size"),
    ],
)
def test_an_unknown_key_at_any_depth_is_refused_with_its_line_and_the_nearest_key(
    text: str, place: str, name: str, nearest: str
) -> None:
    message = error_of(text)
    assert message.startswith(f"{place}: unknown key `{name}`")
    assert f"did you mean `{nearest}`?" in message


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    assert "known keys: max, on_stale" in error_of(MINIMAL + "staleness: {zzz: 1}\n")


@pytest.mark.parametrize(
    "text", ["run: {}\nrun: {}\n", "run:\n  seed: 1\n  seed: 2\n", "roles: {actors: {}, actors: {}}\n"]
)
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    assert "stands twice (first in line" in error_of(MINIMAL + text)


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", ".000001"])
def test_scientific_notation_is_a_number(text: str) -> None:
    assert parse_topology(f"{MINIMAL}optimizer: {{lr: {text}}}\n", "t.yaml").optimizer.lr == 1e-6


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "text", "[1]", "0", "-1e-6"])
def test_a_learning_rate_that_is_no_positive_number_is_refused(value: str) -> None:
    assert "t.yaml:2: optimizer.lr" in error_of(f"{MINIMAL}optimizer: {{lr: {value}}}\n")


def test_a_negative_staleness_is_refused_with_the_value_and_the_rule() -> None:
    message = error_of(MINIMAL + "staleness:\n  max: -1\n")
    assert message == "t.yaml:3: staleness.max: Input should be greater than or equal to 0 (got -1)"


def test_every_problem_is_reported_at_once() -> None:
    assert len(error_of(MINIMAL + "run: {seed: -1, updates: 0}\nbogus: 1\n").splitlines()) == 3


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ((), 3),
        (("roles.policy.replicas=3", "roles.analyzers.replicas=2"), 6),
        (("method=grpo",), 2),
        (("method=seed_static",), 2),
    ],
)
def test_nccl_needs_a_device_for_the_learner_and_each_receiver(
    tmp_path: Path, overrides: tuple[str, ...], needed: int
) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(MINIMAL + "weights: {transport: nccl}\n")
    topology = load_topology(path, overrides)
    check_machine(topology, path, overrides, lambda: needed)
    with pytest.raises(TopologyError, match=rf"t\.yaml:2: .* {needed} in all; this machine has {needed - 1}"):
        check_machine(topology, path, overrides, lambda: needed - 1)


def test_other_transports_ask_no_driver(tmp_path: Path) -> None:
    def fail() -> int:
        raise AssertionError("asked")

    check_machine(parse_topology(MINIMAL, "t.yaml", ("weights.transport=gloo",)), tmp_path / "none", (), fail)


@pytest.mark.parametrize(
    ("roles", "num_devices", "place"),
    [
        ("learner: {device: cuda, ranks: 2}", 2, r"t\.yaml:3: roles\.learner is placed on CUDA device 0, 1"),
        ("policy: {device: cuda, gpus: [5]}", 6, r"t\.yaml:3: roles\.policy is placed on CUDA device 5"),
        ("analyzers: {device: cuda, replicas: 3}", 3, r"t\.yaml:3: roles\.analyzers is placed on CUDA device 0, 1, 2"),
    ],
)
def test_a_role_is_not_placed_on_a_device_that_is_not_there(
    tmp_path: Path, roles: str, num_devices: int, place: str
) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(MINIMAL + f"roles:\n  {roles}\n")
    check_machine(load_topology(path), path, (), lambda: num_devices)
    with pytest.raises(TopologyError, match=rf"{place} .*; this machine has {num_devices - 1}"):
        check_machine(load_topology(path), path, (), lambda: num_devices - 1)


def test_nccl_takes_no_two_processes_on_one_device(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    roles = "learner: {device: cuda, gpus: [0]}, policy: {device: cuda, gpus: [0]}"
    path.write_text(MINIMAL + f"method: grpo\nweights: {{transport: nccl}}\nroles: {{{roles}}}\n")
    with pytest.raises(TopologyError, match=r"t\.yaml:3: .* are on \[0, 0\]"):
        check_machine(load_topology(path), path, (), lambda: 8)


def test_a_receiver_on_the_cpu_needs_a_device_beside_those_of_the_learner(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(MINIMAL + "method: grpo\nroles: {learner: {device: cuda, ranks: 4}}\nweights: {transport: nccl}\n")
    check_machine(load_topology(path), path, (), lambda: 5)
    with pytest.raises(TopologyError, match=r"t\.yaml:4: roles\.policy is placed on CUDA device 4"):
        check_machine(load_topology(path), path, (), lambda: 4)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"  \n\n"):
        assert "the file is empty" in file_error(tmp_path / "t.yaml", content)
    assert "a topology is a mapping" in file_error(tmp_path / "t.yaml", b"# only a comment\n")


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    assert f"at most {MAX_FILE_BYTES}" in file_error(tmp_path / "t.yaml", b"a" * (MAX_FILE_BYTES + 1))


def test_a_file_in_utf_16_is_refused(tmp_path: Path) -> None:
    assert ":1: not UTF-8" in file_error(tmp_path / "t.yaml", MINIMAL.encode("utf-16"))


def test_a_file_indented_by_tabs_is_refused_with_its_line(tmp_path: Path) -> None:
    assert "t.yaml:2: found character" in file_error(tmp_path / "t.yaml", b"run:\n\tseed: 1\n")


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(TopologyError, match="cannot be read"):
            load_topology(path)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['true']",
        "a: b: c",
        "{",
        "[" * 5000,
        "- 1",
        "text",
        "a: *b",
        "? [1, 2]\n: 3",
        "1: 2",
    ],
)
def test_what_is_no_plain_mapping_is_refused(text: str) -> None:
    assert error_of(text).startswith("t.yaml")


def test_aliases_that_would_expand_without_bound_are_refused() -> None:
    levels = "".join(f"a{level}: &a{level} [*a{level - 1}, *a{level - 1}]\n" for level in range(1, 60))
    assert error_of("a0: &a0 [x]\n" + levels) == "t.yaml:2: aliases (`*a0`) are not allowed"


def test_an_environment_variable_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_MODEL", "/models/x")
    assert parse_topology("model: {path: '${SOME_MODEL}'}\n", "t.yaml").model.path == Path("/models/x")


def test_an_unset_environment_variable_is_refused_by_name_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    assert error_of("run: {}\nmodel: {path: '${NOT_SET}/x'}\n") == "t.yaml:2: environment variable NOT_SET is not set"


def test_a_mini_batch_that_does_not_divide_the_batch_is_refused() -> None:
    message = error_of(MINIMAL, "optimizer.mini_batch_trajectories=7")
    assert "mini_batch_trajectories 7 must divide the batch of 128 trajectories" in message
    parse_topology(MINIMAL, "t.yaml", ("optimizer.mini_batch_trajectories=32",))


def test_a_group_of_one_cannot_be_divided_by_its_spread() -> None:
    assert "no spread to divide by" in error_of(MINIMAL, "rollout.group_size=1")
    parse_topology(MINIMAL, "t.yaml", ("rollout.group_size=1", "loss.divide_by_std=false"))


@pytest.mark.parametrize("text", ["{}", "model: {}", "model: {path: /x, init: {}}", "model: null"])
def test_a_model_needs_exactly_one_source(text: str) -> None:
    assert "model" in error_of(text + "\n")


@pytest.mark.parametrize("port", ["80", "70000", "-1", "x"])
def test_a_port_out_of_range_is_refused(port: str) -> None:
    assert "transport.base_port" in error_of(f"{MINIMAL}transport: {{kind: tcp, base_port: {port}}}\n")


@pytest.mark.parametrize("name", ["../x", "", "a b", ".hidden", "x" * 65])
def test_a_run_name_that_is_no_file_name_is_refused(name: str) -> None:
    assert "run.name" in error_of(f"{MINIMAL}run: {{name: '{name}'}}\n")


def test_set_reaches_any_depth_and_is_read_as_yaml() -> None:
    topology = parse_topology(
        MINIMAL,
        "t.yaml",
        ("roles.evaluation.games=7", "env.filter.rooms=[kitchen]", "method=grpo", "run.max_minutes=null"),
    )
    assert topology.roles.evaluation is not None and topology.roles.evaluation.games == 7
    assert topology.env.filter.rooms == ("kitchen",)
    assert not topology.uses_skills and topology.run.max_minutes is None


SOURCES = {
    "grpo": "none",
    "seed": "hindsight",
    "seed_static": "hindsight",
    "sdar": "library",
    "opid": "hindsight",
    "opsd": "hindsight",
    "gigpo": "none",
}


@pytest.mark.parametrize("method", get_args(MethodName))
def test_a_method_decides_where_skills_come_from_and_who_needs_analyzers(method: str) -> None:
    topology = parse_topology(MINIMAL, "t.yaml", (f"method={method}",))
    assert topology.skill_source == SOURCES[method]
    assert topology.uses_skills == (SOURCES[method] != "none")
    assert topology.uses_analyzers == (SOURCES[method] == "hindsight")
    assert topology.pins_analyzer == (method == "seed_static")
    assert topology.max_step_skills == (5 if method == "opid" else 0)
    roles = [role for role, _, _ in role_processes(topology)]
    assert ("analyzer" in roles) == topology.uses_analyzers


@pytest.mark.parametrize(
    ("override", "method"),
    [
        ("loss.opid_coef=0.01", "opid"),
        ("loss.opsd_rl=true", "opsd"),
        ("loss.gigpo_discount=0.9", "gigpo"),
        ("loss.gigpo_step_weight=0.5", "gigpo"),
        ("skills.library=alfworld", "sdar, opsd"),
    ],
)
def test_a_key_of_another_method_is_refused(override: str, method: str) -> None:
    key = override.partition("=")[0]
    assert f"{key} has no effect with method seed (only with {method}): remove it" in error_of(MINIMAL, override)
    for each in method.split(", "):
        topology = parse_topology(MINIMAL, "t.yaml", (override, f"method={each}"))
        assert parse_topology(dump_topology(topology), "again") == topology


def test_a_changed_key_that_the_method_does_not_read_is_known() -> None:
    given = ("loss.opd_beta=3", "analysis.timeout_s=9", "roles.analyzers.threads=2")
    assert parse_topology(MINIMAL, "t.yaml", given).idle_keys == ()
    grpo = parse_topology(MINIMAL, "t.yaml", (*given, "method=grpo"))
    assert grpo.idle_keys == ("loss.opd_beta", "analysis.timeout_s", "roles.analyzers.threads")
    assert parse_topology(MINIMAL, "t.yaml", (*given, "method=opid")).idle_keys == ("loss.opd_beta",)
    assert parse_topology(MINIMAL, "t.yaml", ("method=gigpo",)).idle_keys == ()


def test_every_key_of_a_method_exists() -> None:
    known = parse_topology(MINIMAL, "t.yaml").model_dump()
    for key in (*METHODS_OF_KEY, *IDLE_KEYS):
        section = known
        for part in key.split("."):
            section = section[part]


def test_the_page_on_methods_names_every_method_and_key() -> None:
    page = (ROOT / "docs/methods.md").read_text()
    for method in get_args(MethodName):
        assert f"| `{method}` |" in page
    for key in METHODS_OF_KEY:
        assert f"`{key}`" in page
    for key in IDLE_KEYS:
        assert f"`{key}`" in page or f"`{key.rpartition('.')[0]}.*`" in page


def test_a_history_window_without_the_windowed_layout_is_refused() -> None:
    assert "history_window has no effect with rollout.layout transcript" in error_of(
        MINIMAL, "rollout.history_window=3"
    )
    topology = parse_topology(MINIMAL, "t.yaml", ("rollout.history_window=0", "rollout.layout=windowed"))
    assert topology.rollout.history_window == 0


@pytest.mark.parametrize("method", get_args(MethodName))
def test_every_method_survives_being_written_out(method: str) -> None:
    topology = parse_topology(MINIMAL, "t.yaml", (f"method={method}",))
    assert parse_topology(dump_topology(topology), "again") == topology


def test_the_last_set_wins() -> None:
    assert parse_topology(MINIMAL, "t.yaml", ("run.seed=1", "run.seed=2")).run.seed == 2


@pytest.mark.parametrize("override", ["run.seed", "=1", "run..seed=1", ".=1", ""])
def test_a_set_that_is_no_assignment_is_refused(override: str) -> None:
    assert "write --set section.key=value" in error_of(MINIMAL, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.sed=1", "unknown key `run.sed`; did you mean `seed`?"),
        ("run.seed=-1", "run.seed: Input should be greater than or equal to 0 (got -1)"),
        ("run.seed={", "the value is not YAML"),
        ("method=ppo", "method: Input should be"),
        ("method.x=1", "`method` is not a section"),
    ],
)
def test_a_bad_set_is_named_in_the_error(override: str, message: str) -> None:
    error = error_of("method: seed\n" + MINIMAL, override)
    assert error.startswith(f"--set {override}") and message in error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("roles.policy.vllm.eager=false",), "the section vllm has no effect with engine torch"),
        (("roles.policy.vllm.gpu_memory_utilization=0.5",), "exactly one of kv_cache_gib and gpu_memory_utilization"),
        (("roles.policy.vllm.kv_cache_gib=null",), "exactly one of kv_cache_gib and gpu_memory_utilization"),
        (
            ("roles.policy.vllm.weight_transfer=ipc", "roles.policy.vllm.tensor_parallel=2"),
            "weight_transfer ipc is for one GPU; tensor_parallel is 2",
        ),
    ],
)
def test_options_of_vllm_that_contradict_each_other_are_refused(overrides: tuple[str, ...], message: str) -> None:
    assert message in error_of(MINIMAL, *overrides)


def test_the_options_of_vllm_are_read_with_its_engine() -> None:
    overrides = (
        "roles.policy.engine=vllm",
        "roles.policy.vllm.kv_cache_gib=null",
        "roles.policy.vllm.gpu_memory_utilization=0.5",
    )
    assert parse_topology(MINIMAL, "t.yaml", overrides).roles.policy.vllm.gpu_memory_utilization == 0.5


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_an_endpoint_that_is_reached_from_outside_needs_a_key(host: str) -> None:
    found = error_of(MINIMAL, f"roles.policy.http={{host: '{host}'}}")
    assert f"roles.policy.http: host {host} is reached from outside" in found
    parse_topology(MINIMAL, "t.yaml", (f"roles.policy.http={{host: '{host}', api_key_file: /key}}",))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_endpoint_needs_none(host: str) -> None:
    parse_topology(MINIMAL, "t.yaml", (f"roles.policy.http={{host: '{host}'}}",))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 1e-3),
        (("roles.learner.dtype=bfloat16",), 0.5),
        (("roles.policy.engine=vllm", "roles.policy.vllm.dtype=bfloat16"), 0.5),
        (("roles.learner.dtype=bfloat16", "weights.canary_tolerance=0.2"), 0.2),
    ],
)
def test_the_canary_is_judged_by_the_coarser_dtype_unless_the_bound_is_given(
    overrides: tuple[str, ...], expected: float
) -> None:
    topology = parse_topology(MINIMAL, "t.yaml", overrides)
    assert topology.canary_tolerance_nats(topology.roles.policy) == expected


def test_a_coarse_analyzer_does_not_loosen_the_canary_of_the_policy_servers() -> None:
    overrides = ("roles.analyzers.engine=vllm", "roles.analyzers.vllm.dtype=bfloat16")
    topology = parse_topology(MINIMAL, "t.yaml", overrides)
    tolerances = [topology.canary_tolerance_nats(each) for each in (topology.roles.policy, topology.roles.analyzers)]
    assert tolerances == [1e-3, 0.5]


def test_settings_of_analyzers_that_never_start_are_named_and_take_nothing() -> None:
    roles = "policy: {device: cuda}, analyzers: {engine: vllm, device: cuda, gpus: [0]}"
    topology = parse_topology(MINIMAL + f"method: grpo\nroles: {{{roles}}}\n", "t.yaml")
    assert topology.idle_keys == ("roles.analyzers.engine", "roles.analyzers.device", "roles.analyzers.gpus")
    assert place_gpus(topology) == {("policy", 0): (0,)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.lora.rank=600",), "takes ranks up to 512; model.lora.rank is 600"),
        (
            ("roles.policy.vllm.weight_transfer=ipc", "roles.policy.device=cuda"),
            "weight_transfer ipc has no effect with model.lora.publish",
        ),
    ],
)
def test_adapters_that_vllm_cannot_be_given_are_refused(overrides: tuple[str, ...], message: str) -> None:
    published = ("model.lora.publish=adapters", "roles.policy.engine=vllm")
    assert message in error_of(MINIMAL, *published, *overrides)
    parse_topology(MINIMAL, "t.yaml", (*published, *overrides, "model.lora.publish=merged"))


def test_versions_hold_whole_models_unless_adapters_are_asked_for() -> None:
    for overrides in ((), ("model.lora.rank=4",)):
        assert parse_topology(MINIMAL, "t.yaml", overrides).model.served_adapters is None
    served = parse_topology(MINIMAL, "t.yaml", ("model.lora.publish=adapters",)).model.served_adapters
    assert served is not None and served.rank == 16
