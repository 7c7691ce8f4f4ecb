"""What /generate accepts and refuses, and the shape of its answers (data/sglang_answers.json holds SGLang's shapes)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.engine.embedded.jobs import Finish, Job
from workers.engine.embedded.protocol import BadRequest, Item, Limits, SamplingParams, answer, parse_generate
from workers.engine.embedded.sampling import Choice, Draws

LIMITS = Limits(vocabulary=100, context_tokens=64, encode=lambda text: [len(word) for word in text.split()])
EXAMPLES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "sglang_answers.json").read_text())["generate"]


def parse(**fields: Any) -> Any:
    return parse_generate(json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}} | fields).encode(), LIMITS)


def test_a_single_prompt_and_a_batch_are_told_apart() -> None:
    assert not parse().batched
    one = parse(input_ids=[[1, 2, 3]])
    assert (one.batched, len(one.items)) == (True, 1)
    assert parse(input_ids=None, text="a bcd").items[0].prompt == [1, 3]
    assert [i.prompt for i in parse(input_ids=None, text=["a", "bb cc"]).items] == [[1], [2, 2]]


def test_fields_are_given_once_or_for_each_row() -> None:
    request = parse(
        input_ids=[[1], [2]],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2, "sampling_seed": 7}],
        lora_path=["a", None],
        return_logprob=[True, False],
        logprob_start_len=0,
        rid="r",
        decode="repeatable",
    )
    first, second = request.items
    assert (first.params.max_new_tokens, second.params.max_new_tokens, second.params.sampling_seed) == (1, 2, 7)
    assert (first.lora_name, second.lora_name) == ("a", None)
    assert (first.logprob_start, second.logprob_start) == (0, -1)
    assert (first.rid, second.rid) == ("r_0", "r_1")
    assert request.decode == "repeatable"
    assert [i.lora_name for i in parse(input_ids=[[1], [2]], lora_path="a").items] == ["a", "a"]


def test_values_that_say_nothing_are_accepted() -> None:
    neutral = {"n": 1, "min_p": 0.0, "repetition_penalty": 1.0, "stop": None, "regex": None, "spaces_between_special_tokens": False}
    request = parse(sampling_params={"max_new_tokens": 4, **neutral}, stream=False, top_logprobs_num=0, image_data=None)
    assert request.items[0].params == SamplingParams(max_new_tokens=4, spaces_between_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_ids": None}, "input_ids or text"),
        ({"text": "both"}, "input_ids or text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, r"input_ids\[0\]"),
        ({"input_ids": [[1], 2]}, r"input_ids\[1\]"),
        ({"input_ids": [1, 100]}, r"input_ids\[0\]\[1\].*0 to 99"),
        ({"input_ids": [1, -1]}, "token id"),
        ({"input_ids": [True]}, "token id"),
        ({"input_ids": [1.0]}, "token id"),
        ({"input_ids": "12"}, "input_ids"),
        ({"input_ids": [[1]] * 5000}, "5000 sequences"),
        ({"stream": True}, "stream"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"decode": "fast"}, "decode"),
        ({"lora_path": 3}, "lora_path"),
        ({"lora_path": ["a", "b"]}, "lora_path: 2 entries for 1"),
        ({"return_logprob": "yes"}, "return_logprob"),
        ({"logprob_start_len": 3}, "logprob_start_len"),
        ({"logprob_start_len": 1.5}, "logprob_start_len"),
        ({"sampling_params": []}, "0 entries"),
        ({"sampling_params": "hot"}, "sampling_params"),
        ({"sampling_params": {"n": 2}}, r"sampling_params\.n"),
        ({"sampling_params": {"stop": ["x"]}}, r"sampling_params\.stop"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"temperature": "1"}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"top_k": -2}}, "top_k"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 62}}, "exceed the model's context of 64 tokens by 1"),
        ({"sampling_params": {"max_new_tokens": 4, "stop_token_ids": [100]}}, "stop_token_ids"),
        ({"sampling_params": {"max_new_tokens": 4, "stop_token_ids": ["1"]}}, "stop_token_ids"),
        ({"sampling_params": {"sampling_seed": 0.5}}, "sampling_seed"),
    ],
)
def test_what_cannot_be_answered_as_meant_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        parse(**fields)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"3", b"\xff\xfe", b'{"input_ids": [1e400]}', b'{"input_ids": [NaN]}'])
def test_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_generate(body, LIMITS)


@pytest.mark.parametrize("example", EXAMPLES, ids=[e["case"] for e in EXAMPLES])
def test_answers_have_sglang_s_shape(example: dict[str, Any]) -> None:
    request = parse_generate(json.dumps(example["request"]).encode(), LIMITS)
    wanted = example["answer"] if request.batched else [example["answer"]]
    for item, expected in zip(request.items, wanted, strict=True):
        meta = expected["meta_info"]
        job = finished_job(item, expected)
        got = answer(item, meta["id"], job, meta["e2e_latency"], lambda ids, _: " ".join(map(str, ids)))
        assert json.loads(json.dumps(got)) == expected


def finished_job(item: Item, expected: dict[str, Any]) -> Job:
    """The job whose result the example shows."""
    reason = expected["meta_info"]["finish_reason"]
    values = expected["meta_info"].get("output_token_logprobs") or [[0.0, t, None] for t in expected["output_ids"]]
    return Job(
        prompt=item.prompt,
        choice=Choice(),
        draws=Draws(0),
        max_new_tokens=item.params.max_new_tokens,
        stop_ids=frozenset(),
        adapter=None,
        alone=False,
        score_from=item.logprob_start,
        on_done=lambda _: None,
        output_ids=[v[1] for v in values],
        output_log_probs=[v[0] for v in values],
        input_log_probs=[v[0] for v in expected["meta_info"].get("input_token_logprobs", [])[1:]],
        finish=None if reason["type"] == "abort" else Finish(reason.get("matched"), item.params.max_new_tokens),
    )
