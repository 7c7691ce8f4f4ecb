"""Opening a run: once, again, on another store, with another science; and the tasks and models it reads."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from temporalio.exceptions import ApplicationError

from activities.blobs import Blobs
from activities.errors import InputError
from activities.fleet import PREFIX, live_engines, read_notice, withdraw_notice, write_notice
from activities.models import PROJECTIONS, find_model, linear_shapes, model_digest
from activities.records import AdapterManifest, ArchiveState, Checkpoint, EngineNotice, RunSpec, StepCommit, Verdict
from tasks.registry import TaskError, judge_digest, load_task, read_task, task_digest
from tests.chain import Chain, make_model, make_task, spread
from workflows.contracts.base import Coordinate, Outcome
from workflows.contracts.request import RunRequest, parse_request


@pytest.fixture
def chain(blobs: Blobs, tmp_path: Path) -> Chain:
    return Chain.fresh(blobs, tmp_path)


def refused(action: Callable[[], Any], kind: str) -> str:
    with pytest.raises(ApplicationError) as caught:
        action()
    assert caught.value.type == kind
    assert caught.value.non_retryable
    return str(caught.value)


# Once and again ---------------------------------------------------------------------------------------------------------------
def test_commit_zero_holds_seeds_and_the_identity_adapter(chain: Chain) -> None:
    run, opened = chain.open()
    head = opened.head
    archive = chain.archive(head)
    assert [(n.id, n.value, n.score, n.code) for n in archive.nodes] == [(f"seed-0{i}", 0.5, None, "") for i in range(2)]
    assert archive.seeds == ("seed-00", "seed-01")
    assert (head.step, head.best, head.previous_policy) == (0, None, None)
    commit = chain.store.load(StepCommit, head.commit)
    assert (commit.previous, commit.rows, commit.identity) == (None, (), run.identity)
    assert head.policy == head.initial_policy
    assert head.policy.version == 0
    checkpoint = chain.store.load(Checkpoint, head.policy.checkpoint)
    manifest = chain.store.load(AdapterManifest, checkpoint.adapter)
    tensors = safetensors.numpy.load(chain.blobs.get(manifest.weights))
    assert len(tensors) == 2 * len(PROJECTIONS)
    assert all(not np.any(t) for name, t in tensors.items() if "lora_B" in name)
    assert all(np.any(t) for name, t in tensors.items() if "lora_A" in name)


def test_opening_twice_is_opening_once(chain: Chain) -> None:
    first = chain.open()
    entries = list(chain.blobs.store.keys(""))
    assert chain.open() == first
    assert list(chain.blobs.store.keys("")) == entries


def test_opening_resumes_at_the_last_commit(chain: Chain) -> None:
    run, opened = chain.open()
    head, summaries = opened.head, []
    for _ in range(3):
        _, committed = chain.step(run, head, spread)
        head = committed.head
        summaries.append(committed.summary)
    _, resumed = chain.open()
    assert resumed.head == head
    assert resumed.recent == tuple(summaries)


def test_seed_program_is_judged_first_and_its_value_opens_the_archive(chain: Chain) -> None:
    chain = chain.with_request(search={"groups": 2, "rollouts": 3, "start": "given"})
    at = Coordinate(step=0, group=0, rollout=0)
    assert chain.prepare().judge_seed
    assert "it was not judged" in refused(chain.open, "InputError")
    construction = chain.store.put({"size": 2})
    verdict = Verdict(
        at=at, outcome=Outcome.VALID, reason="", score=2.0, exact="2/1", value=2.0, reward=2.0, construction=construction
    )
    chain.store.claim(chain.store.rollout_key(at, "verdict"), verdict)
    assert not chain.prepare().judge_seed
    _, opened = chain.open()
    assert opened.head.best == 2.0
    nodes = chain.archive(opened.head).nodes
    assert {(n.value, n.score, n.construction) for n in nodes} == {(2.0, 2.0, construction)}
    assert nodes[0].code.startswith("def run()")


def test_invalid_seed_program_is_refused_with_the_judges_reason(chain: Chain) -> None:
    chain = chain.with_request(search={"groups": 2, "rollouts": 3, "start": "given"})
    chain.prepare()
    at = Coordinate(step=0, group=0, rollout=0)
    verdict = Verdict(at=at, outcome=Outcome.CRASHED, reason="NameError: x")
    chain.store.claim(chain.store.rollout_key(at, "verdict"), verdict)
    assert "crashed: NameError: x" in refused(chain.open, "InputError")


def test_a_store_put_together_from_two_backups_is_refused(chain: Chain) -> None:
    run, opened = chain.open()
    _, committed = chain.step(run, opened.head, spread)
    _, committed = chain.step(run, committed.head, spread)
    store, key = chain.blobs.store, chain.store.step_key(1, "commit")
    store.put(key, b"e" * 64)
    message = refused(chain.open, "ArchiveFork")
    assert "step 2" in message
    assert "from one backup" in message


# Identity ---------------------------------------------------------------------------------------------------------------------
OTHER: dict[str, Any] = {
    "strategy": "greedy",
    "visit_unit": "expansion",
    "start": "given",
    "advantage": "mean_baseline",
    "thinking": "on",
    "offer_construction": True,
    "thinking_tokens": 64,
}
"""A second value of the fields that are no plain numbers."""


def other_value(name: str, value: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if value is None:
        return {"memory_bytes": 64 << 20, "wall_seconds": 7.0}.get(name, 7)
    return value / 2 if isinstance(value, float) else value + 1


def changes() -> list[tuple[str, dict[str, Any], bool]]:
    """(name, change of the request, whether it is another science) for every single field of a request."""
    base = parse_request({"task": "sizes", "train": "off", "profile": "paper"}).model_dump()
    found: list[tuple[str, dict[str, Any], bool]] = [
        ("seed", {"seed": 1}, True),
        ("train", {"train": "on"}, True),
        ("decode", {"decode": "repeatable"}, True),
        ("name", {"name": "another"}, False),
        ("profile", {"profile": "laptop"}, False),
    ]
    for section, fields in base.items():
        if not isinstance(fields, dict):
            continue
        for name, value in fields.items():
            if (other := other_value(name, value)) is not None:
                science = section != "timeouts" and name != "steps"
                found.append((f"{section}.{name}", {section: {name: other}}, science))
    return found


CHANGES = changes()


@pytest.mark.parametrize(("name", "change", "science"), CHANGES, ids=[name for name, *_ in CHANGES])
def test_identity_is_the_science_and_nothing_else(chain: Chain, name: str, change: dict[str, Any], science: bool) -> None:
    # With train=off, every field can take another value alone.
    search = {"groups": 2, "rollouts": 3}
    base: dict[str, Any] = {"task": "sizes", "model": "tiny", "train": "off", "profile": "paper", "search": search, "lora": {}}
    first = chain.with_request(**base)
    before = first.prepare().run
    section, _, field = name.partition(".")
    merged = base | ({section: base.get(section, {}) | change[section]} if field else change)
    if name == "profile":  # the same settings by another preset are the same science
        merged = {**first.store.spec(before).request.model_dump(), "profile": "laptop"}
    second = first.with_request(**merged)
    if not science:
        assert second.prepare().run == before
        return
    message = refused(second.prepare, "IdentityChanged")
    assert f"{name}: " in message
    assert message.count(" -> ") == 1, message


def test_every_field_of_a_request_was_changed_once() -> None:
    fields = {
        f"{name}.{inner}" if hasattr(field.annotation, "model_fields") else name
        for name, field in RunRequest.model_fields.items()
        for inner in getattr(field.annotation, "model_fields", {"": None})
    }
    tested = {name for name, *_ in CHANGES}
    by_content = {"task", "model", "bundle", "fork"}  # see the next tests, and test_fork.py
    assert fields - tested - by_content == set()


def test_identity_follows_contents_of_task_judge_model_and_prompt(chain: Chain) -> None:
    chain.prepare()
    instruction = chain.tasks_directory / "sizes" / "instruction.md"
    before = instruction.read_text()
    instruction.write_text("Return the smallest size.\n")
    assert "digests.task: " in refused(chain.prepare, "IdentityChanged")
    instruction.write_text(before)
    (chain.tasks_directory / "sizes" / "notes.txt").write_text("not part of the problem")
    chain.prepare()

    model = chain.models_directory / "tiny" / "config.json"
    model.write_text(json.dumps({"model_type": "qwen3", "rope_theta": 1e6}))
    assert "digests.model: " in refused(chain.prepare, "IdentityChanged")
    model.write_text(json.dumps({"model_type": "qwen3"}))
    chain.prepare()

    chain.prompt_text = "another prompt"
    message = refused(chain.prepare, "IdentityChanged")
    assert "digests.prompt: " in message
    assert "digests.model" not in message


def test_names_and_places_of_task_and_model_do_not_matter(chain: Chain) -> None:
    identity = chain.prepare().run.identity
    make_task(chain.tasks_directory, "renamed")
    make_model(chain.models_directory / "copy")
    moved = chain.with_request(task="renamed", model=str(chain.models_directory / "copy"))
    moved.run_id = "moved"
    assert moved.prepare().run.identity == identity


def test_judge_parameters_are_science(chain: Chain) -> None:
    chain.prepare()
    file = chain.tasks_directory / "sizes" / "task.toml"
    file.write_text(file.read_text().replace("circles = 3", "circles = 4"))
    message = refused(chain.prepare, "IdentityChanged")
    assert "digests.judge: " in message


def test_a_field_that_an_older_version_did_not_have_is_named(chain: Chain) -> None:
    run = chain.prepare().run
    spec = chain.store.spec(run)
    science = {key: value for key, value in spec.science.items() if key != "decode"} | {"gone": None}
    older = spec.model_copy(update={"science": science, "identity": "a" * 64})
    chain.blobs.store.put(f"{chain.store.root}/open", chain.store.put(older).encode())
    message = refused(chain.prepare, "IdentityChanged")
    assert "decode: new" in message
    assert "gone: no longer" in message


# Tasks ------------------------------------------------------------------------------------------------------------------------
def test_unknown_names_say_what_exists(chain: Chain) -> None:
    assert "circle_packing_26" in refused(chain.with_request(task="nothing").prepare, "InputError")
    start = chain.with_request(search={"groups": 2, "rollouts": 3, "start": "nothing"})
    assert "default, empty, given" in refused(start.prepare, "InputError")
    message = refused(chain.with_request(model="nothing").prepare, "InputError")
    assert str(chain.models_directory) in message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("metadata.discovery", "metadata.other", r"no \[metadata.discovery\]"),
        ('entry = "run"', "", "entry"),
        ('entry = "run"', 'entry = "run"\nentri = 1', "entri"),
        ('entry = "run"', 'entry = "run"\nname = "x"', "name is taken from the folder"),
        ('direction = "maximize"', 'direction = "up"', "direction"),
        ('default_start = "empty"', 'default_start = "full"', "no start 'full'; it has: default, empty, given"),
        ("wall_seconds = 5.0", "wall_seconds = 0.0", "wall_seconds"),
        ("[metadata.discovery]", "[metadata.discovery", "task.toml"),
    ],
)
def test_malformed_task_names_the_file_and_the_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = make_task(tmp_path) / "task.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(TaskError, match=message) as caught:
        load_task("sizes", [tmp_path])
    assert str(file) in str(caught.value) or "no start" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_task_without_instruction_or_text_is_named(tmp_path: Path) -> None:
    folder = make_task(tmp_path)
    (folder / "instruction.md").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="utf-8"):
        read_task(folder)
    (folder / "instruction.md").unlink()
    with pytest.raises(TaskError, match=r"instruction\.md"):
        read_task(folder)


@pytest.mark.parametrize(
    ("judge", "message"),
    [("tasks.judges.nothing:X", "cannot be imported"), ("tasks.judges.circle_packing", "module:Class"), (":X", "module:Class")],
)
def test_judge_that_cannot_be_found_is_the_tasks_fault(chain: Chain, judge: str, message: str) -> None:
    file = chain.tasks_directory / "sizes" / "task.toml"
    file.write_text(file.read_text().replace("tasks.judges.circle_packing:CirclePacking", judge))
    assert message in refused(chain.prepare, "InputError")


def test_judge_that_does_not_take_its_parameters_is_named(tmp_path: Path) -> None:
    folder = make_task(tmp_path)
    file = folder / "task.toml"
    for old, new in (("circles = 3", "spheres = 3"), ("spheres = 3", "circles = 0")):
        file.write_text(file.read_text().replace(old, new))
        with pytest.raises(TaskError, match="sizes: judge"):
            read_task(folder).make_judge()
    file.write_text(file.read_text().replace(":CirclePacking", ":Nothing"))
    with pytest.raises(TaskError, match="Nothing"):
        read_task(folder).make_judge()


def test_task_digest_covers_a_seed_program_wherever_it_lies(tmp_path: Path) -> None:
    folder = make_task(tmp_path)
    file = folder / "task.toml"
    file.write_text(file.read_text().replace("seeds/given.py", "other/given.py"))
    (folder / "other").mkdir()
    (folder / "other" / "given.py").write_text("def run():\n    return 1\n")
    before = task_digest(read_task(folder))
    (folder / "task.toml.orig").write_text("an editor's copy")
    assert task_digest(read_task(folder)) == before
    (folder / "other" / "given.py").write_text("def run():\n    return 2\n")
    assert task_digest(read_task(folder)) != before
    (folder / "other" / "given.py").unlink()
    with pytest.raises(TaskError, match=r"other/given\.py"):
        task_digest(read_task(folder))


def test_a_users_task_stands_before_the_built_in_one(tmp_path: Path) -> None:
    folder = make_task(tmp_path, "circle_packing_26")
    assert load_task("circle_packing_26", [tmp_path]).folder == folder
    assert load_task("circle_packing_26").folder != folder
    assert judge_digest(load_task("circle_packing_26", [tmp_path])) != judge_digest(load_task("circle_packing_26"))


# Models -----------------------------------------------------------------------------------------------------------------------
def test_model_digest_is_content(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two")
    assert model_digest(one) == model_digest(two)
    for name in ("tokenizer.json", "chat_template.jinja", "merges.txt", "generation_config.json"):
        before = model_digest(two)
        (two / name).write_text("{}")
        assert model_digest(two) != before
    before = model_digest(two)
    (two / "README.md").write_text("words")
    assert model_digest(two) == before
    other = make_model(tmp_path / "three", width=5)
    assert model_digest(other) != model_digest(one)


def test_shapes_come_from_headers_in_layer_order(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": np.zeros((3, 2), np.float32) for i in (10, 2)}
    safetensors.numpy.save_file(tensors | {"lm_head.weight": np.zeros((3, 2), np.float32)}, folder / "model.safetensors")
    assert linear_shapes(folder) == {f"model.layers.{i}.mlp.up_proj": (3, 2) for i in (2, 10)}
    assert list(linear_shapes(folder)) == [f"model.layers.{i}.mlp.up_proj" for i in (2, 10)]


@pytest.mark.parametrize("data", [b"", b"abc", struct.pack("<Q", 1 << 40), struct.pack("<Q", 4) + b"{]}}"])
def test_damaged_weight_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        linear_shapes(tmp_path)


def test_folder_without_usable_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="safetensors only"):
        find_model(str(tmp_path), ())
    safetensors.numpy.save_file({"conv.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="dense Llama"):
        linear_shapes(tmp_path)


# Engines ----------------------------------------------------------------------------------------------------------------------
def notice(engine: str, **changes: Any) -> EngineNotice:
    base = EngineNotice(engine=engine, url="http://x", boot_id="b", model_digest="a" * 64, updated=100.0)
    return base.model_copy(update=changes)


def test_engines_that_wrote_lately_and_serve_the_model_are_live(blobs: Blobs) -> None:
    for each in (notice("b"), notice("a"), notice("old", updated=70.0), notice("other", model_digest="b" * 64)):
        write_notice(blobs, each)
    assert [n.engine for n in live_engines(blobs, "a" * 64, now=110.0)] == ["a", "b"]
    withdraw_notice(blobs, "a")
    assert [n.engine for n in live_engines(blobs, "a" * 64, now=110.0)] == ["b"]


def test_a_notice_in_another_form_hides_only_its_own_engine(blobs: Blobs) -> None:
    write_notice(blobs, notice("a"))
    blobs.store.put(PREFIX + "newer", json.dumps(notice("newer").model_dump(mode="json") | {"field": 1}).encode())
    blobs.store.put(PREFIX + "broken", b"{")
    assert [n.engine for n in live_engines(blobs, "a" * 64, now=100.0)] == ["a"]
    assert read_notice(blobs, "newer") is None


def test_run_spec_reads_back_as_it_was_written(chain: Chain) -> None:
    run = chain.prepare().run
    spec = chain.store.spec(run)
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    assert chain.store.load(ArchiveState, chain.open()[1].head.archive).total_visits == 0
