"""The shape of the source: who may import whom, what importing costs, and that main loops fit on a screen."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seed_async.topology_file import load_topology

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("actors", "envs", "learner", "tools")
MAY_IMPORT = {
    "core": {"core"},
    "actors": {"core", "envs", "actors"},
    "envs": {"core", "envs"},
    "learner": {"core", "learner"},
    "tools": {"core", "actors", "envs", "learner", "tools"},
}
COMPOSITION_ROOT = "seed_async/cli.py"
"""The one module of the core that knows every part: it builds them."""
MAX_LOOP_LINES = 40
LOOPS = {
    "learner/buffer_server.py": "BufferServer",
    "learner/trainer.py": "Learner",
    "actors/policy_server.py": "PolicyServer",
    "actors/analyzer.py": "Analyzer",
    "actors/environment_actor.py": "EnvironmentActor",
    "actors/evaluation_actor.py": "EvaluationActor",
}
WITHOUT_TORCH = (
    "seed_async.learner.buffer",
    "seed_async.learner.buffer_server",
    "seed_async.actors.environment_actor",
    "seed_async.actors.evaluation_actor",
    "seed_async.actors.panel",
)


def sources(folder: str) -> Iterator[Path]:
    """Every module of a top-level folder; the core's links to the other folders are not followed."""
    for directory, _, files in os.walk(ROOT / folder, followlinks=False):
        yield from (Path(directory) / name for name in sorted(files) if name.endswith(".py"))


ALL_SOURCES = {str(path.relative_to(ROOT)): path for folder in ("seed_async", *PACKAGES) for path in sources(folder)}


def part_of(module: str) -> str | None:
    """The part that an absolute module name belongs to; None outside the project."""
    names = module.split(".")
    if names[0] != "seed_async":
        return None
    return names[1] if len(names) > 1 and names[1] in PACKAGES else "core"


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in a file, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("name", ALL_SOURCES)
def test_imports_go_one_way(name: str) -> None:
    """Actors to environments to core, learner to core; actors and learner meet in messages only."""
    part = name.split("/")[0].replace("seed_async", "core")
    allowed = set(PACKAGES) | {"core"} if name == COMPOSITION_ROOT else MAY_IMPORT[part]
    for module in imported_modules(ast.parse(ALL_SOURCES[name].read_text())):
        assert module.split(".")[0] not in (*PACKAGES, "tests"), f"{name} imports {module} by its bare name"
        imported = part_of(module)
        assert imported is None or imported in allowed, f"{name} imports {module}"


@pytest.mark.parametrize("name", ALL_SOURCES)
def test_every_module_says_what_it_is(name: str) -> None:
    """In its docstring."""
    assert ast.get_docstring(ast.parse(ALL_SOURCES[name].read_text())), f"{name} has no docstring"


def module_name(source: str) -> str:
    """The import name of a source file."""
    parts = list(Path(source).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "seed_async" else ["seed_async", *parts])


def test_core_environments_and_buffer_load_no_torch() -> None:
    """An environment actor is a small process, and importing has no such cost; in one fresh process for all."""
    names = [name for name in ALL_SOURCES if name.split("/")[0] in ("seed_async", "envs")]
    modules = [*map(module_name, names), *WITHOUT_TORCH]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & sys.modules.keys()\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_a_relative_link_to_its_top_level_folder(package: str) -> None:
    """So that a clone works wherever it lies."""
    link = ROOT / "seed_async" / package
    assert link.is_symlink() and os.readlink(link) == f"../{package}"
    assert link.resolve() == ROOT / package and (link / "__init__.py").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_bare_name_of_a_package_is_refused(package: str) -> None:
    """Two copies of one module would hold two states."""
    command = [sys.executable, "-c", f"import {package}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode != 0
    assert f"ImportError: import this package as seed_async.{package}" in done.stderr


@pytest.mark.parametrize("name", LOOPS)
def test_a_main_loop_fits_on_one_screen_and_its_module_states_the_contract(name: str) -> None:
    """Consumes, waits for, produces, unblocked by, stops."""
    tree = ast.parse(ALL_SOURCES[name].read_text())
    (role,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == LOOPS[name])
    (loop,) = (
        node for node in role.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "run"
    )
    assert loop.end_lineno is not None and loop.end_lineno - loop.lineno + 1 <= MAX_LOOP_LINES
    contract = " ".join((ast.get_docstring(tree) or "").split())
    for word in ("Consumes", "Waits for", "Produces", "Unblocked by", "Stops"):
        assert word in contract, f"{name} does not say what it {word.lower()}"


@pytest.mark.parametrize("path", sorted((ROOT / "topologies").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_topology_loads(path: Path) -> None:
    """With every rule checked."""
    assert load_topology(path).run_dir.name
