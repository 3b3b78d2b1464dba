"""The built wheel holds the code that lies behind the import links."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("actors", "learner", "envs", "tools")


def test_the_wheel_holds_every_module_under_its_import_name(tmp_path: Path) -> None:
    """The four folders are packaged through their links, tests are not."""
    source = tmp_path / "source"  # building leaves files behind
    kept_out = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=kept_out)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if name.endswith(".py")}
    core = {str(path.relative_to(ROOT)) for path in (ROOT / "seed_async").rglob("*.py")}  # follows no link
    behind = {f"seed_async/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert held == core | behind
    libraries = {f"seed_async/skill_libraries/{path.name}" for path in (ROOT / "seed_async/skill_libraries").iterdir()}
    assert libraries and libraries <= set(names)
