"""Skill libraries: what a user may write, what every mistake gets, and that those that ship serve their environment."""

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seed_async.skill_library import (
    BUILT_IN_FOLDER,
    MAX_SKILL_CHARACTERS,
    SkillLibrary,
    SkillLibraryError,
    built_in_libraries,
    library_of,
    parse_library,
)
from seed_async.topology import TaskType
from seed_async.topology_file import TopologyError, parse_topology
from seed_async.user_files import MAX_FILE_BYTES
from tests.fakes.episodes import small_topology

LIBRARY = """# My skills

A comment for the reader.

## find

Look first,
then   take.

## put-down_2.x

Put it down.
"""


def error_of(text: str) -> str:
    with pytest.raises(SkillLibraryError) as caught:
        parse_library(text, "s.md")
    return str(caught.value)


def test_a_section_is_the_skill_of_its_task_type_on_one_line() -> None:
    library = parse_library(LIBRARY, "s.md")
    assert library.skill("find") == "Look first, then take."
    assert library.skill("put-down_2.x") == "Put it down."
    assert library.skill("clean") is None
    assert library.task_types == ("find", "put-down_2.x") and library.missing(["clean", "find"]) == ["clean"]


def test_the_default_serves_every_other_task_type() -> None:
    library = parse_library(LIBRARY + "## default\nThink.\n", "s.md")
    assert library.skill("clean") == "Think." and library.skill("find") == "Look first, then take."
    assert library.missing(["clean"]) == [] and "default" not in library.task_types


@pytest.mark.parametrize(
    "text", [LIBRARY.replace("\n", "\r\n"), LIBRARY.removeprefix("# My skills\n"), "##find ##\nLook first, then take."]
)
def test_line_ends_titles_and_closed_headings_do_not_matter(text: str) -> None:
    assert parse_library(text, "s.md").skill("find") == "Look first, then take."


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "s.md:1: no section"),
        ("# title\n\nonly text\n", "s.md:1: no section"),
        ("## a\nx\n## b\n\n## c\ny\n", "s.md:3: section `b` is empty"),
        ("## a\n", "s.md:1: section `a` is empty"),
        ("## a\nx\n## b\ny\n## a\nz\n", "s.md:5: section `a` stands twice (first in line 1)"),
        ("## two words\nx\n", "s.md:1: 'two words' is no task type"),
        ("##\nx\n", "s.md:1: '' is no task type"),
        ("## a\n### part\nx\n", "s.md:2: a skill is plain text: the only headings are `## task_type`"),
        ("## a\nx\n# title\n", "s.md:3: a skill is plain text"),
        ("### a\nx\n", "s.md:1: a skill is plain text"),
        ("## a\nx\x00y\n", "s.md:2: control characters"),
        (f"## a\n{'x' * (MAX_SKILL_CHARACTERS + 1)}\n", f"s.md:1: the skill of `a` has {MAX_SKILL_CHARACTERS + 1}"),
    ],
)
def test_a_mistake_is_refused_with_its_line(text: str, error: str) -> None:
    assert error_of(text).startswith(error)


def file_error(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(SkillLibraryError) as caught:
        SkillLibrary.load(str(path))
    return str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.md"
    assert ":2: not UTF-8" in file_error(path, b"## a\n\xff\n")
    assert f"at most {MAX_FILE_BYTES}" in file_error(path, b"x" * (MAX_FILE_BYTES + 1))
    path.write_bytes(b"\xef\xbb\xbf## a\nx\n")
    assert SkillLibrary.load(str(path)).skill("a") == "x"


def test_a_missing_library_is_named_with_those_that_ship(tmp_path: Path) -> None:
    for name in ("alfwrld", str(tmp_path), str(tmp_path / "none.md")):
        with pytest.raises(SkillLibraryError, match=r"neither a file nor built in \(alfworld, ezpoints, search"):
            SkillLibrary.load(name)


@given(st.text(alphabet="#a \n\r\t", max_size=40))
def test_no_text_gets_anything_but_a_library_or_its_error(text: str) -> None:
    try:
        library = parse_library(text, "s.md")
    except SkillLibraryError as error:
        assert str(error).startswith("s.md:")
    else:
        assert all(skill and "\n" not in skill for skill in library.skills.values())


@pytest.mark.parametrize("name", built_in_libraries())
def test_every_library_that_ships_is_whole_and_short(name: str) -> None:
    library = SkillLibrary.load(name)
    assert library.skills and all(100 < len(skill) < 800 for skill in library.skills.values())


def test_a_library_ships_for_each_environment_and_alfworld_has_every_task_type() -> None:
    assert built_in_libraries() == ["alfworld", "ezpoints", "search", "sokoban", "webshop"]
    assert BUILT_IN_FOLDER.is_dir()
    assert set(SkillLibrary.load("alfworld").task_types) == set(get_args(TaskType))


def sdar(**sections: Any) -> SkillLibrary | None:
    return library_of(small_topology(method="sdar", **sections))


def test_the_environments_own_library_is_the_default() -> None:
    library = sdar()
    assert library is not None and library.source == "alfworld"


@pytest.mark.parametrize("method", ["grpo", "seed", "seed_static", "opid", "gigpo"])
def test_other_methods_open_no_library(method: str) -> None:
    assert library_of(small_topology(method=method)) is None


def test_a_library_without_an_entry_for_a_task_type_is_refused_and_the_types_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "s.md"
    path.write_text("## look_at_obj_in_light\nUse the lamp.\n")
    with pytest.raises(SkillLibraryError, match=r"has no section for pick_and_place_simple, .*pick_two_obj_and_place"):
        sdar(skills={"library": str(path)})
    assert sdar(skills={"library": str(path)}, env={"filter": {"task_types": ["look_at_obj_in_light"]}}) is not None
    path.write_text("## default\nThink.\n")
    assert sdar(skills={"library": str(path)}) is not None


def test_a_users_suite_needs_a_library_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(SkillLibraryError, match=r"needs skills\.library: env\.id 'my:Suite' has no library"):
        sdar(env={"id": "my:Suite"})
    (tmp_path / "s.md").write_text("## boxes\nOpen all.\n")
    assert sdar(env={"id": "my:Suite"}, skills={"library": str(tmp_path / "s.md")}) is not None


def test_opsd_falls_back_on_a_library_and_can_do_without(tmp_path: Path) -> None:
    library = library_of(small_topology(method="opsd"))
    assert library is not None and library.source == "alfworld"
    assert library_of(small_topology(method="opsd", env={"id": "my:Suite"})) is None
    (tmp_path / "s.md").write_text("## boxes\nOpen all.\n")
    part = library_of(small_topology(method="opsd", skills={"library": str(tmp_path / "s.md")}))
    assert part is not None and part.skill("pick_and_place_simple") is None
    with pytest.raises(SkillLibraryError, match="neither a file"):
        library_of(small_topology(method="opsd", skills={"library": "none"}))


def test_validation_of_a_topology_reports_its_library() -> None:
    with pytest.raises(TopologyError, match=r"^t\.yaml:3: skill library 'none' is neither"):
        parse_topology("method: sdar\nmodel: {path: /m}\nskills: {library: none}\n", "t.yaml")
