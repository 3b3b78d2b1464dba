"""The parser of analyses against what language models write, and against hostile output."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seed_async.messages import Skill, StepSkill
from seed_async.skills import MAX_ANSWER_CHARACTERS, parse_analysis

GOOD = '{"episode_summary": "won", "episode_skill": "look first"}'
READ = {
    "plain": GOOD,
    "fields in the other order": '{"episode_skill": "look first", "episode_summary": "won"}',
    "spaces around": f"\n\n   {GOOD}  \n",
    "fence": f"```json\n{GOOD}\n```",
    "fence without a language": f"```\n{GOOD}\n```",
    "fence that is never closed": f"```json\n{GOOD}",
    "upper-case fence": f"```JSON\n{GOOD}\n```",
    "prose before": f"Here is the analysis: {GOOD}",
    "prose after": f"{GOOD}\nI hope this helps!",
    "prose on both sides": f"Sure! {GOOD} Done.",
    "thinking before": f"<think>The agent won.</think>{GOOD}",
    "apostrophe before": f"Here's what I'd say: {GOOD}",
    "quote before": f'The agent said "hm {GOOD}',
    "closing brace before": f"}} {GOOD}",
    "empty object before": f"{{}} {GOOD}",
    "set notation before": f"Use {{placeholders}}. {GOOD}",
    "schema before": f'{{"type": "object"}}\n{GOOD}',
    "object with another field before": f'{{"answer": 1}} {GOOD}',
    "object with an empty skill before": f'{{"episode_skill": ""}} {GOOD}',
    "number as skill before": f'{{"episode_skill": 3}} {GOOD}',
    "second object after": f'{GOOD} {{"episode_skill": "something else"}}',
    "cut second object after": f'{GOOD} {{"episode_skill": "some',
    "trailing comma": '{"episode_summary": "won", "episode_skill": "look first",}',
    "trailing comma and line break": '{"episode_summary": "won", "episode_skill": "look first",\n}',
    "single quotes": "{'episode_summary': 'won', 'episode_skill': 'look first'}",
    "single quotes and trailing comma": "{'episode_summary': 'won', 'episode_skill': 'look first',}",
    "mixed quotes": "{\"episode_summary\": 'won', 'episode_skill': \"look first\"}",
    "pretty printed": json.dumps(json.loads(GOOD), indent=4),
    "tabs": GOOD.replace(" ", "\t", 1),
    "carriage returns": GOOD.replace(", ", ",\r\n"),
    "extra string field": '{"episode_summary": "won", "note": "x", "episode_skill": "look first"}',
    "extra nested object": '{"meta": {"a": {"b": 1}}, "episode_summary": "won", "episode_skill": "look first"}',
    "extra list": '{"steps": [1, 2, {"c": 3}], "episode_summary": "won", "episode_skill": "look first"}',
    "inner list with trailing comma": '{"steps": [1, 2,], "episode_summary": "won", "episode_skill": "look first"}',
    "duplicate key": '{"episode_skill": "a", "episode_summary": "won", "episode_skill": "look first"}',
    "line break inside the skill": '{"episode_summary": "won", "episode_skill": "look\\nfirst"}',
    "spaces inside the skill": '{"episode_summary": "won", "episode_skill": "  look   first "}',
    "null after": f"{GOOD} null",
    "array around": f"[{GOOD}]",
    "byte order mark": "\ufeff" + GOOD,
    "step skills nobody asked for": GOOD[:-1] + ', "step_skills": [{"step": 0, "skill": "look"}]}',
    "step skills that are no list": GOOD[:-1] + ', "step_skills": "none"}',
    "null step skills": GOOD[:-1] + ', "step_skills": null}',
    "heading before": f"### Analysis\n\n{GOOD}",
    "numbered list before": f"1. The agent looked.\n2. It won.\n\n{GOOD}",
    "fence in another language": f"```python\n{GOOD}\n```",
    "tilde fence": f"~~~json\n{GOOD}\n~~~",
    "answer tag around": f"<answer>{GOOD}</answer>",
    "thinking with braces": f"<think>{{maybe}} {{}}</think>\n{GOOD}",
    "equals sign before": f"result = {GOOD};",
    "closing bracket too many": f"{GOOD}}}}}",
    "no-break spaces around": f"\u00a0{GOOD}\u00a0",
    "list with a trailing comma": '{"episode_summary": "won", "episode_skill": "look first", "steps": [1, 2,],}',
    "raw line break in the skill": '{"episode_summary": "won", "episode_skill": "look\nfirst"}',
    "raw tab in the summary": '{"episode_summary": "\twon", "episode_skill": "look first"}',
    "nul character before": "\0" + GOOD,
}
KEPT = {
    "braces in the skill": ('{"episode_skill": "use {x} and }"}', "use {x} and }"),
    "opening brace in the skill": ('{"episode_skill": "a { b"}', "a { b"),
    "escaped quote": ('{"episode_skill": "say \\"hi\\" }"}', 'say "hi" }'),
    "escaped backslash at the end": ('{"episode_skill": "path \\\\"}', "path \\"),
    "comma before a brace inside the skill": ('{"episode_skill": "first a, } then b, ]"}', "first a, } then b, ]"),
    "apostrophe in double quotes": ('{"episode_skill": "don\'t open it"}', "don't open it"),
    "no summary": ('{"episode_skill": "x"}', "x"),
    "list as summary": ('{"episode_summary": [1], "episode_skill": "x"}', "x"),
    "unicode": ('{"episode_skill": "première étape 🙂"}', "première étape 🙂"),
    "bidirectional marks": ('{"episode_skill": "go \u202eback\u202c"}', "go \u202eback\u202c"),
    "a fence in the skill": ('{"episode_skill": "use ```look```"}', "use ```look```"),
    "an object in the skill": ('{"episode_skill": "answer {\\"a\\": 1}"}', 'answer {"a": 1}'),
    "escaped surrogate pair": ('{"episode_skill": "ok \\ud83d\\ude42"}', "ok 🙂"),
    "half of a surrogate pair": ('{"episode_skill": "ok \\ud83d"}', "ok ?"),
}
REFUSED = {
    "empty": "",
    "prose": "The agent looked first and won.",
    "cut off": GOOD[:-10],
    "cut off inside the fence": f"```json\n{GOOD[:-1]}\n```",
    "empty object": "{}",
    "empty skill": '{"episode_summary": "won", "episode_skill": ""}',
    "blank skill": '{"episode_skill": " \\n\\t "}',
    "null skill": '{"episode_skill": null}',
    "number as skill": '{"episode_skill": 5}',
    "list as skill": '{"episode_skill": ["look"]}',
    "object as skill": '{"episode_skill": {"rule": "look"}}',
    "boolean as skill": '{"episode_skill": true}',
    "other spelling of the key": '{"Episode_Skill": "look"}',
    "array of strings": '["episode_skill", "look"]',
    "string": '"episode_skill"',
    "python call": "{'episode_skill': __import__('os').getcwd()}",
    "python expression": "{'episode_skill': 'a' * 10}",
    "python set": "{'episode_skill'}",
    "unhashable key": "{[]: 1, 'episode_skill': 'x'}",
    "huge number": '{"episode_skill": ' + "9" * 6000 + "}",
    "missing colon": '{"episode_skill" "look"}',
    "closed too early": '{"episode_skill": }',
    "the schema itself": '{"episode_summary": string, "episode_skill": string}',
}


@pytest.mark.parametrize("name", READ)
def test_a_readable_answer_gives_both_fields(name: str) -> None:
    """Fences, prose, commas and quotes are forgiven."""
    assert parse_analysis(READ[name]) == ("won", "look first", ())


@pytest.mark.parametrize("name", KEPT)
def test_the_skill_is_kept_as_written(name: str) -> None:
    """Repairs never touch what was valid."""
    answer, skill = KEPT[name]
    parsed = parse_analysis(answer)
    assert parsed is not None and parsed.episode_skill == skill
    parsed.episode_skill.encode()


@pytest.mark.parametrize("name", REFUSED)
def test_an_unreadable_answer_gives_no_skill(name: str) -> None:
    """And raises nothing."""
    assert parse_analysis(REFUSED[name]) is None


STEPS = {
    "plain": ('[{"step": 0, "skill": "a"}, {"step": 7, "skill": "b"}]', [(0, "a"), (7, "b")]),
    "in any order": ('[{"step": 7, "skill": "b"}, {"step": 0, "skill": "a"}]', [(7, "b"), (0, "a")]),
    "none": ("[]", []),
    "more than asked for": (
        "[" + ",".join(f'{{"step": {n}, "skill": "s"}}' for n in range(8)) + "]",
        [(n, "s") for n in range(5)],
    ),
    "the same step twice": ('[{"step": 1, "skill": "a"}, {"step": 1, "skill": "b"}]', [(1, "a")]),
    "a step that was never played": ('[{"step": 8, "skill": "a"}, {"step": 2, "skill": "b"}]', [(2, "b")]),
    "a negative step": ('[{"step": -1, "skill": "a"}]', []),
    "a step as text": ('[{"step": "1", "skill": "a"}]', []),
    "a fraction": ('[{"step": 1.0, "skill": "a"}]', []),
    "a boolean": ('[{"step": true, "skill": "a"}]', []),
    "a huge step": ('[{"step": 99999999999999999999, "skill": "a"}]', []),
    "no step": ('[{"skill": "a"}, {"step": 3, "skill": "b"}]', [(3, "b")]),
    "no skill": ('[{"step": 1}, {"step": 3, "skill": "b"}]', [(3, "b")]),
    "an empty skill": ('[{"step": 1, "skill": " "}, {"step": 1, "skill": "b"}]', [(1, "b")]),
    "a number as skill": ('[{"step": 1, "skill": 5}]', []),
    "entries of other kinds": ('[1, null, "a", [0], {"step": 3, "skill": "b"}]', [(3, "b")]),
    "more fields": ('[{"step": 3, "why": {"x": 1}, "skill": "b"}]', [(3, "b")]),
    "line breaks in the skill": ('[{"step": 3, "skill": "a\\n b"}]', [(3, "a b")]),
    "trailing comma": ('[{"step": 3, "skill": "b"},]', [(3, "b")]),
    "an object by step": ('{"3": "b"}', []),
    "text": ('"step 3: b"', []),
    "null": ("null", []),
    "a number": ("3", []),
}


@pytest.mark.parametrize("name", STEPS)
def test_bad_step_skills_are_left_out_and_never_the_whole_answer(name: str) -> None:
    """Of eight steps, at most five skills, the first of each step."""
    entries, expected = STEPS[name]
    parsed = parse_analysis(f'{GOOD[:-1]}, "step_skills": {entries}}}', num_steps=8, max_step_skills=5)
    assert parsed is not None and parsed[:2] == ("won", "look first")
    assert parsed.step_skills == tuple(StepSkill(step=step, skill=skill) for step, skill in expected)


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    """Analyses in every form that language models give them."""
    assert len(READ) + len(KEPT) + len(REFUSED) + len(STEPS) >= 60


HOSTILE = {
    "opening braces": "{" * (1 << 20),
    "pairs of braces": "{}" * (1 << 19),
    "nested braces": "{" * 30000 + "}" * 30000,
    "nested objects": '{"a":' * 10000 + "1" + "}" * 10000,
    "nested lists": '{"a":' + "[" * 30000 + "]" * 30000 + "}",
    "nested brackets in single quotes": "{'a':" + "(" * 30000 + ")" * 30000 + "}",
    "minus signs": "{'a':" + "-" * 60000 + "1}",
    "commas": "{" + ", " * 30000 + "}",
    "spaces after commas": "{" + ("," + " " * 200) * 300 + "}",
    "quotes": '{"' * 30000,
    "backslashes": '{"' + "\\" * 60000 + '"}',
    "a list of empty step skills": '{"episode_skill": 1, "step_skills": [' + "{}," * 20000 + "{}]}",
    "closing braces": "}" * (1 << 20),
    "alternating quotes and braces": "{\"'" * 200_000,
    "sixteen long candidates": ("{" + "'a'," * 1000 + "}") * 16,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_output_costs_little(name: str) -> None:
    """A megabyte of braces must not stop an analyzer."""
    started_s = time.process_time()
    assert parse_analysis(HOSTILE[name]) is None
    assert time.process_time() - started_s < 1.0


def test_only_the_front_of_a_very_long_answer_is_read() -> None:
    """The limit is documented, not accidental."""
    assert parse_analysis(" " * (MAX_ANSWER_CHARACTERS - len(GOOD)) + GOOD) is not None
    assert parse_analysis(" " * MAX_ANSWER_CHARACTERS + GOOD) is None


@given(st.text(), st.text())
def test_any_encoded_pair_of_texts_reads_back_on_one_line(summary: str, skill: str) -> None:
    """Also with quotes, braces and backslashes in it; what is read can always be sent."""
    parsed = parse_analysis("note " + json.dumps({"episode_summary": summary, "episode_skill": skill}) + " end")
    expected = " ".join(skill.split())
    assert (parsed.episode_skill if parsed else "") == expected
    if parsed:
        Skill(episode_summary=parsed.episode_summary, episode_skill=parsed.episode_skill, version=0)


@given(st.text(alphabet="{}[]\":,\\'ab \n"))
def test_no_text_makes_the_parser_raise(answer: str) -> None:
    """Whatever the analyzer says."""
    parse_analysis(answer)
