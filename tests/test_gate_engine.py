"""The whole chain against a real engine process: trained by the train activity, published by the publish activity, over HTTP."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.blobs import Blobs, LocalStore
from activities.engine_http import EngineClient
from activities.open.identity_adapter import make_initial_policy
from activities.publish.activity import PublishActivities
from activities.publish.placing import materialise
from activities.records import PublishReport, TrainRecord
from activities.train.activity import TrainActivities
from activities.train.fake import FakeSearch, make_model
from workers.ports import free_port
from workflows.contracts.base import PolicyRef
from workflows.contracts.messages import Published, PublishRequest

pytestmark = pytest.mark.slow
START_SECONDS = 120


@dataclass
class Boot:
    """One engine process."""

    process: subprocess.Popen[bytes]
    url: str
    boot_id: str


@dataclass
class Host:
    """What an engine worker is to the publish room."""

    model: Path
    adapter_directory: Path
    log: Path
    engine_id: str = "one"
    current: Boot | None = None
    verified: list[tuple[str, str]] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)
    boots: int = 0

    def on_verified(self, request: PublishRequest, boot_id: str, served: dict[str, int]) -> None:
        assert served == {request.policy.name: request.policy.version}
        self.verified.append((request.policy.name, boot_id))

    def on_unloaded(self, names: tuple[str, ...]) -> None:
        self.unloaded.extend(names)

    def start(self) -> None:
        port = free_port()
        command = [sys.executable, "-m", "workers.engine.embedded", "--model-path", str(self.model), "--port", str(port)]
        with self.log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=Path(__file__).parent.parent)
        self.boots += 1
        self.current = Boot(process, f"http://127.0.0.1:{port}", f"boot-{self.boots}")
        client = EngineClient(self.current.url)
        deadline = time.monotonic() + START_SECONDS
        while not client.health():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the engine did not start"
            time.sleep(0.1)
        client.close()

    def stop(self) -> None:
        if self.current is not None:
            self.current.process.kill()
            self.current.process.wait()
            self.current = None


@dataclass
class World:
    blobs: Blobs
    search: FakeSearch
    policies: list[PolicyRef]
    records: list[TrainRecord]
    stranger: PolicyRef
    host: Host

    def publish(self, version: int) -> Published:
        request = PublishRequest(
            run=self.search.ref,
            engine="one",
            policy=self.policies[version],
            previous=self.policies[version - 1] if version else None,
            initial=self.policies[0],
        )
        return ActivityEnvironment().run(PublishActivities(self.blobs, self.host).publish, request)

    def client(self) -> EngineClient:
        assert self.host.current is not None
        return EngineClient(self.host.current.url)


@pytest.fixture(scope="module", params=[4e-5, 3e-3], ids=["paper's rate", "laptop's rate"])
def world(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[World]:
    root = tmp_path_factory.mktemp("engine")
    blobs, model = Blobs(LocalStore(root / "store")), make_model(root / "model", "llama")
    train = TrainActivities(blobs, lambda _: model).train
    histories = []
    for seed, steps in ((0, 3), (1, 1)):
        search = FakeSearch.open(blobs, model, run_id=f"run{seed}", optimizer={"learning_rate": request.param})
        policies, records = [make_initial_policy(search.store, search.spec, model)], []
        for step in range(1, steps + 1):
            batch = search.sample(step, policies[-1], groups=4, rollouts=8, response_tokens=16, seed=seed)
            trained = ActivityEnvironment().run(train, search.request(step, batch, policies[-1]))
            policies.append(trained.policy)
            records.append(search.store.load(TrainRecord, trained.record))
        histories.append((search, policies, records))
    host = Host(model, root / "adapters", root / "engine.log")
    host.start()
    (search, policies, records), (_, strangers, _) = histories
    yield World(blobs, search, policies, records, strangers[1], host)
    host.stop()


def test_each_version_is_served_and_proved(world: World) -> None:
    """One step, also one at 4e-5, is seen by an engine whose arithmetic is float32."""
    for version in range(4):
        published = world.publish(version)
        report = world.search.store.load(PublishReport, published.report)
        assert published.passed
        assert (report.policy, report.boot_id) == (world.policies[version].name, published.boot_id)
        for comparison in report.comparisons:
            assert comparison.slope == pytest.approx(1.0, abs=0.05)
            assert comparison.residual < 0.05
    assert (world.policies[3].name, published.boot_id) in world.host.verified
    assert world.policies[1].name in world.host.unloaded
    assert set(world.client().loaded_adapters()) == {world.policies[v].name for v in (0, 2, 3)}


def serve_under(world: World, name: str, served: PolicyRef) -> None:
    """Make the engine serve one version's adapter under another's name."""
    client = world.client()
    if name in client.loaded_adapters():
        client.unload_adapter(name)
    lie = world.host.adapter_directory.parent / "lies"
    client.load_adapter(name, str(materialise(world.blobs, served.adapter, lie, served.name)))


@pytest.mark.parametrize(
    ("version", "served", "cause"),
    [(1, "initial", "no adapter is applied"), (2, "previous", "previous version"), (1, "stranger", "another adapter")],
)
def test_a_wrong_adapter_under_the_name_is_refused_and_then_replaced(world: World, version: int, served: str, cause: str) -> None:
    wrong = {"initial": world.policies[0], "previous": world.policies[version - 1], "stranger": world.stranger}[served]
    serve_under(world, world.policies[version].name, wrong)
    with pytest.raises(ApplicationError, match=cause) as refused:
        world.publish(version)
    assert refused.value.type == "PublishRefused"
    assert refused.value.non_retryable
    assert world.policies[version].name not in world.client().loaded_adapters()
    assert world.publish(version).passed


def test_a_killed_engine_is_worth_another_attempt_and_is_proved_anew(world: World) -> None:
    world.host.stop()
    with pytest.raises(ApplicationError, match="is starting") as away:
        world.publish(2)
    assert not away.value.non_retryable
    world.host.start()
    published = world.publish(2)
    assert published.boot_id == f"boot-{world.host.boots}"
    assert {world.policies[v].name for v in (0, 1, 2)} <= set(world.client().loaded_adapters())


def test_a_publication_for_another_engine_is_refused(world: World) -> None:
    request = PublishRequest(run=world.search.ref, engine="two", policy=world.policies[0], previous=None, initial=world.policies[0])
    with pytest.raises(ApplicationError, match="do two share one id"):
        ActivityEnvironment().run(PublishActivities(world.blobs, world.host).publish, request)
