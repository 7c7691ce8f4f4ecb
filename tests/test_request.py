"""A user's request: what is complete, what each bad value is told, and what the profiles fill in."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from workflows.contracts.profiles import PROFILES
from workflows.contracts.request import RunRequest, parse_request

TASK = {"task": "circle_packing_26"}


def complaint(raw: object) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_request(raw)
    assert type(caught.value) is ValueError
    return str(caught.value)


def with_field(path: str, value: object) -> dict[str, Any]:
    section, _, field = path.partition(".")
    return TASK | ({section: {field: value}} if field else {section: value})


def test_a_task_is_a_complete_request() -> None:
    request = parse_request(TASK)
    assert request.task == "circle_packing_26"
    assert request.profile == "laptop"
    assert request == parse_request(TASK | {"profile": "laptop"})


@pytest.mark.parametrize("raw", [None, [], [TASK], 3, 2.5, True, "circle_packing_26", '{"task": "x"}'])
def test_anything_but_an_object_is_told_what_an_object_looks_like(raw: object) -> None:
    message = complaint(raw)
    assert message == f'the run\'s input must be a JSON object such as {{"task": "circle_packing_26"}}, got {raw!r}'


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_profiles_are_complete_requests(profile: str) -> None:
    request = parse_request(TASK | {"profile": profile})
    for section, value in PROFILES[profile].items():
        found = getattr(request, section)
        if isinstance(value, dict):
            assert {name: getattr(found, name) for name in value} == value
        else:
            assert found == value


def test_user_fields_stand_over_the_profile_one_by_one() -> None:
    request = parse_request(TASK | {"search": {"groups": 5}})
    assert (request.search.groups, request.search.rollouts) == (5, PROFILES["laptop"]["search"]["rollouts"])


@pytest.mark.parametrize("profile", ["nothing", "", None, [], {}, 1, True])
def test_unknown_profile_names_those_that_exist(profile: object) -> None:
    assert complaint(TASK | {"profile": profile}) == f"profile: {profile!r} is not one of coder, laptop, paper, repeatable"


BAD: list[tuple[str, object, str]] = [
    ("task", None, "valid string"),
    ("task", "", "match pattern"),
    ("task", "../etc", "match pattern"),
    ("task", "a/b", "match pattern"),
    ("task", "_template", "match pattern"),
    ("task", "a\n", "match pattern"),
    ("task", "a" * 101, "at most 100"),
    ("task", 3, "valid string"),
    ("bundle", "../task.tar", "match pattern"),
    ("fork", 3, "must be a JSON object"),
    ("name", "a b", "match pattern"),
    ("name", "-a", "match pattern"),
    ("name", "a" * 121, "match pattern"),
    ("seed", -1, "greater than or equal to 0"),
    ("seed", 2**31, "less than"),
    ("seed", 1.5, "valid integer"),
    ("seed", True, "valid integer"),
    ("model", "", "at least 1 character"),
    ("train", True, "'on' or 'off'"),
    ("decode", "fast", "'batched' or 'repeatable'"),
    ("search", 5, "must be a JSON object with any of capacity, children_per_parent"),
    ("search", None, "must be a JSON object with any of"),
    ("search", [], "must be a JSON object with any of"),
    ("search.strategy", "best", "'puct', 'best_of_n', 'greedy' or 'epsilon_greedy'"),
    ("search.strategy", None, "'puct'"),
    ("search.groups", 0, "greater than or equal to 1"),
    ("search.groups", 513, "less than or equal to 512"),
    ("search.groups", "8", "valid integer"),
    ("search.groups", True, "valid integer"),
    ("search.groups", None, "valid integer"),
    ("search.rollouts", 0, "greater than or equal to 1"),
    ("search.rollouts", 129, "less than or equal to 128"),
    ("search.steps", -1, "greater than or equal to 0"),
    ("search.exploration", -0.5, "greater than or equal to 0"),
    ("search.exploration", math.inf, "finite"),
    ("search.exploration", math.nan, "finite"),
    ("search.epsilon", -0.1, "greater than or equal to 0"),
    ("search.epsilon", 1.1, "less than or equal to 1"),
    ("search.epsilon", "0.1", "valid number"),
    ("search.visit_unit", "step", "'rollout' or 'expansion'"),
    ("search.children_per_parent", -1, "greater than or equal to 0"),
    ("search.capacity", 0, "greater than or equal to 1"),
    ("search.start", "a/b", "match pattern"),
    ("search.offer_construction", "yes", "valid boolean"),
    ("sampling.temperature", -1, "greater than or equal to 0"),
    ("sampling.top_p", 0, "greater than 0"),
    ("sampling.top_p", 1.5, "less than or equal to 1"),
    ("sampling.top_k", -2, "greater than or equal to -1"),
    ("sampling.max_new_tokens", 0, "greater than or equal to 1"),
    ("sampling.context_tokens", 8, "greater than or equal to 16"),
    ("sampling.thinking", True, "'auto', 'on' or 'off'"),
    ("sampling.thinking_tokens", 31, "greater than or equal to 32"),
    ("objective.advantage", "best", "'adaptive_entropic', 'mean_baseline' or 'entropic'"),
    ("objective.beta", 0, "greater than 0"),
    ("objective.kl_coefficient", -1, "greater than or equal to 0"),
    ("objective.kl_coefficient", "0.1", "valid number"),
    ("optimizer.learning_rate", 1.5, "less than or equal to 1"),
    ("optimizer.beta1", 1, "less than 1"),
    ("optimizer.beta2", -0.1, "greater than or equal to 0"),
    ("optimizer.epsilon", 0, "greater than 0"),
    ("lora.rank", 0, "greater than or equal to 1"),
    ("lora.rank", 8.5, "valid integer"),
    ("lora.alpha", 1025, "less than or equal to 1024"),
    ("judge.wall_seconds", 0, "greater than 0"),
    ("judge.wall_seconds", 86_401, "less than or equal to 86400"),
    ("judge.cores", 65, "less than or equal to 64"),
    ("judge.memory_bytes", 1, "greater than or equal to"),
    *[
        (f"timeouts.{name}", value, why)
        for name in RunRequest.model_fields["timeouts"].annotation.model_fields  # type: ignore[union-attr]
        for value, why in ((0, "greater than 0"), (math.inf, "finite"), (1e300, "less than or equal to"), ("1m", "valid number"))
    ],
]


@pytest.mark.parametrize(("path", "value", "why"), BAD, ids=[f"{path}={value!r:.20}" for path, value, _ in BAD])
def test_a_bad_value_is_one_sentence_with_place_reason_and_value(path: str, value: object, why: str) -> None:
    message = complaint(with_field(path, value))
    assert message.startswith(f"{path}: ")
    assert why in message
    assert f"got {value!r:.60}" in message
    assert "; " not in message
    assert "\n" not in message.replace(repr(value), "")
    assert "pydantic" not in message


def sections() -> dict[str, list[str]]:
    fields = {"": list(RunRequest.model_fields)}
    for name, field in RunRequest.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields[name] = list(field.annotation.model_fields)
    return fields


def test_every_field_has_a_bad_value() -> None:
    tested = {path for path, *_ in BAD}
    for section, names in sections().items():
        for name in names:
            assert (f"{section}.{name}" if section else name) in tested or name in (*sections(), "profile"), (section, name)


@pytest.mark.parametrize("section", sections())
def test_unknown_field_names_those_allowed_there(section: str) -> None:
    raw = TASK | ({section: {"grups": 1}} if section else {"grups": 1})
    where = f"{section}.grups" if section else "grups"
    assert complaint(raw) == f"{where}: unknown field; allowed here: {', '.join(sorted(sections()[section]))}"


def test_missing_task_shows_an_example() -> None:
    assert complaint({}) == 'task: required, for example {"task": "circle_packing_26"}'
    assert complaint({"search": {}}).startswith("task: required")


def test_all_bad_fields_are_told_at_once() -> None:
    message = complaint({"task": 1, "seed": -1, "search": {"groups": 0, "x": 1}})
    parts = [part.partition(":")[0] for part in message.split("; ")]
    assert parts == ["task", "seed", "search.groups", "search.x", "allowed here"]


def test_a_long_value_is_shown_by_its_beginning() -> None:
    message = complaint(TASK | {"train": "x" * 100_000})
    assert len(message) < 300
    assert "(100002 characters)" in message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"sampling": {"temperature": 0.7}}, ("train=on needs sampling.temperature=1", "0.7", "train=off")),
        ({"sampling": {"top_p": 0.9}}, ("0.9",)),
        ({"sampling": {"top_k": 20}}, ("20",)),
        ({"search": {"rollouts": 2}}, ("search.rollouts=2", "at least 3", "mean_baseline")),
        ({"sampling": {"max_new_tokens": 1024}}, ("sampling.max_new_tokens=1024", "sampling.context_tokens=1024")),
        ({"sampling": {"thinking_tokens": 1024}}, ("sampling.thinking_tokens=1024", "sampling.context_tokens=1024")),
        (
            {"sampling": {"thinking_tokens": 512, "thinking": "off"}},
            ("sampling.thinking_tokens=512", "sampling.thinking=off", "leave one out"),
        ),
        ({"search": {"groups": 8, "capacity": 8}}, ("search.capacity=8", "search.groups=8", "Raise")),
    ],
)
def test_settings_that_do_not_fit_together_name_both_and_a_way_out(raw: dict[str, Any], words: tuple[str, ...]) -> None:
    message = complaint(TASK | raw)
    for word in words:
        assert word in message


def test_what_training_forbids_is_allowed_without_it() -> None:
    sampled = {"sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, "search": {"rollouts": 2}}
    assert parse_request(TASK | sampled | {"train": "off"}).sampling.temperature == 0.7
    assert parse_request(TASK | {"search": {"rollouts": 2}, "objective": {"advantage": "mean_baseline"}}).search.rollouts == 2


@pytest.mark.parametrize("train", ["on", "off"])
@pytest.mark.parametrize("strategy", ["puct", "best_of_n", "greedy", "epsilon_greedy"])
def test_search_and_training_are_chosen_apart(strategy: str, train: str) -> None:
    request = parse_request(TASK | {"train": train, "search": {"strategy": strategy}})
    assert (request.search.strategy, request.train, request.search.epsilon) == (strategy, train, 0.1)
    assert parse_request(TASK | {"search": {"strategy": strategy, "epsilon": 0}}).search.epsilon == 0.0


def test_a_request_survives_json_and_a_whole_number_is_a_number() -> None:
    request = parse_request(TASK | {"search": {"exploration": 2}, "judge": {"wall_seconds": 20}})
    assert request.search.exploration == 2.0
    again = json.loads(request.model_dump_json())
    assert RunRequest.model_validate(again) == RunRequest.model_validate_json(request.model_dump_json()) == request
    assert parse_request(again) == request


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*RunRequest.model_fields, *(name for inner in sections().values() for name in inner)]) | st.text(
    max_size=5
)
requests = st.dictionaries(names, json_values | st.dictionaries(names, json_values, max_size=3), max_size=4)


@given(json_values | requests | requests.map(lambda raw: TASK | raw))
def test_any_json_is_a_request_or_a_plain_error(raw: object) -> None:
    """The workflow turns a ValueError into a failed run; any other exception would leave it hanging."""
    request, failure = None, None
    try:
        request = parse_request(raw)
    except ValueError as error:
        failure = error
    if request is None:
        assert type(failure) is ValueError
        assert str(failure)
    else:
        assert json.loads(request.model_dump_json())


def test_a_judging_attempt_must_have_room_for_the_program() -> None:
    with pytest.raises(ValueError, match=r"judge.wall_seconds=100 does not fit into timeouts.judge_seconds=120"):
        parse_request(TASK | {"judge": {"wall_seconds": 100.0}, "timeouts": {"judge_seconds": 120}})
    assert parse_request(TASK | {"judge": {"wall_seconds": 100.0}, "timeouts": {"judge_seconds": 141}}).judge.wall_seconds == 100
