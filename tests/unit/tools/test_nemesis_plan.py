"""The plan of an attack: seeded, fair, within what a fault can be done to; and who may be hit at once."""

import random
from collections import Counter

import pytest

from seed_async.tools.nemesis import LOOKAHEAD, kind_of, make_plan, take_next
from seed_async.tools.nemesis_faults import FAULTS, Blow
from seed_async.topology import Topology

ROLES = {"actors": {"replicas": 3}, "policy": {"replicas": 2}}


def topology(**sections: object) -> Topology:
    """Eight processes with weights through shared memory."""
    return Topology.model_validate({"model": {"path": "unused"}, "roles": ROLES, **sections})


def test_every_process_comes_as_often_as_its_kind_weighs_and_every_fault_is_done() -> None:
    """Rounds of 3 actors twice, 2 policy servers, buffer, learner, analyzer, evaluation: 12 blows."""
    plan = make_plan(topology(), 1200, {"actor": 2}, (), random.Random(0))
    roles = Counter(blow.role for blow in plan)
    assert {role for role, number in roles.items() if number == 200} == {"actor-0", "actor-1", "actor-2"}
    assert sorted(roles.values()) == [100] * 6 + [200] * 3
    assert {blow.fault for blow in plan} == set(FAULTS)
    assert all(0 <= blow.draw < 1 for blow in plan)


def test_a_plan_is_that_of_its_seed() -> None:
    """So that an attack can be done again, up to the timing of the processes."""
    plans = [make_plan(topology(), 50, {}, ("stop",), random.Random(seed)) for seed in (4, 4, 5)]
    assert plans[0] == plans[1] != plans[2]
    assert not any(blow.fault == "stop" for plan in plans for blow in plan)


def test_faults_of_publications_meet_those_who_publish_and_receive() -> None:
    """A learner is cut off while a policy server holds it up; only receivers are cut off in mid-transfer themselves."""
    plan = make_plan(topology(), 2000, {}, (), random.Random(0))
    kinds = {fault: {kind_of(blow.role) for blow in plan if blow.fault == fault} for fault in FAULTS}
    assert kinds["damage"] == kinds["cut_before"] == kinds["cut_after"] == {"learner"}
    assert kinds["cut_during"] == {"learner", "policy", "analyzer"}
    assert kinds["twin"] == {"actor", "analyzer", "evaluation"}
    for blow in plan:
        held_up = blow.fault in ("cut_during", "damage") and blow.role == "learner-0"
        assert blow.holds in (("policy-0", "policy-1") if held_up else ("",))


@pytest.mark.parametrize(
    "sections, fault, kind",
    [({"weights": {"transport": "gloo"}}, "damage", "learner"), ({"method": "seed_static"}, "cut_during", "analyzer")],
)
def test_what_cannot_be_done_is_not_planned(sections: dict[str, object], fault: str, kind: str) -> None:
    """Bytes on a socket cannot be flipped from outside; an analyzer that keeps its weights receives none."""
    plan = make_plan(topology(**sections), 2000, {}, (), random.Random(0))
    assert not any(blow.fault == fault and kind_of(blow.role) == kind for blow in plan)


def test_a_blow_waits_for_its_roles_and_lets_others_pass() -> None:
    """The first within sight whose roles are all free is taken out of the plan."""
    held = Blow("cut_during", "learner-0", 0.0, "policy-0")
    first, second = Blow("kill", "actor-0", 0.0), Blow("kill", "policy-1", 0.0)
    plan = [first, held, second]
    assert take_next(plan, {"actor-0", "policy-0"}) is second
    assert take_next(plan, {"actor-0", "policy-0"}) is None
    assert take_next(plan, {"actor-0"}) is held
    assert plan == [first]


def test_a_slow_role_is_not_left_for_the_end() -> None:
    """What is out of sight waits, so that the plan is done evenly."""
    plan = [Blow("kill", "learner-0", 0.0)] * LOOKAHEAD + [Blow("kill", "actor-0", 0.0)]
    assert take_next(plan, {"learner-0"}) is None
