"""No credential is ever stored: not in histories, Temporal's database, logs, the object store, or a bundle.

A small whole system runs with marked secrets in every variable that can hold one, against a store and a Temporal server that ask
for them. For a while its sampler has a wrong secret, so that refusals and their tracebacks are among what is searched.
"""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from activities.blobs import Blobs, S3Store
from activities.run_store import RunStore
from tests.bundles import holding_word
from tests.system import ROLES, SHORT_TIMEOUTS, System
from tests.test_deploy_store import Store, secret, store  # noqa: F401  a fixture
from tests.tls_front import Authority, tls_front

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = "guarded"
REQUEST = {"task": "circle_packing_26", "profile": "repeatable", "seed": 4, "timeouts": SHORT_TIMEOUTS, "search": {"steps": 1}}
WRONG = "wrong-secret-of-a-test"
MARKED = {
    "TEMPORAL_API_KEY": "temporal-api-key-of-a-test",
    "HF_TOKEN": "hf_token_of_a_test",
    "HUGGING_FACE_HUB_TOKEN": "hf_hub_token_of_a_test",
    "OPENAI_API_KEY": "sk-openai-key-of-a-test",
    "ANTHROPIC_API_KEY": "sk-anthropic-key-of-a-test",
    "WANDB_API_KEY": "wandb-key-of-a-test",
    "GITHUB_TOKEN": "ghp_github_token_of_a_test",
}


@dataclass(frozen=True)
class Traces:
    """Everything that a system has left behind, by where it lies."""

    files: dict[str, bytes]
    secrets: tuple[bytes, ...]
    bundle: Path

    def holding(self, text: bytes) -> list[str]:
        return [name for name, data in self.files.items() if text in data]


@pytest.fixture(scope="module")
async def traces(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Traces:  # noqa: F811
    folder = tmp_path_factory.mktemp("credentials")
    authority = Authority(folder / "authority")
    certificate, key = authority.issue("worker")
    token = folder / "sandbox-token"
    token.write_text("sandbox-token-of-a-test")
    system = System(
        folder / "home",
        TTTD_STORE=f"s3://tttd/{RUN}",
        TTTD_S3_ENDPOINT=store.endpoint,
        TTTD_JUDGE_REMOTE_TOKEN_FILE=str(token),
        AWS_DEFAULT_REGION="us-east-1",
        AWS_ACCESS_KEY_ID="console-key",
        AWS_SECRET_ACCESS_KEY=secret("console"),
        TEMPORAL_TLS_SERVER_CA_CERT_PATH=str(authority.certificate_path),
        TEMPORAL_TLS_CLIENT_CERT_PATH=str(certificate),
        TEMPORAL_TLS_CLIENT_KEY_PATH=str(key),
        **MARKED,
    )
    key_lines = [line for line in key.read_text().splitlines() if not line.startswith("-----")]
    secrets = [secret("console"), WRONG, token.read_text(), *MARKED.values(), *key_lines]
    try:
        system.start_temporal()
        async with tls_front(authority, system.settings.temporal_port) as port:
            system._environment["TEMPORAL_ADDRESS"] = f"127.0.0.1:{port}"
            await _run(system)
            bundle = folder / "run.tar"
            assert system.tttd("export", RUN, "--out", str(bundle)).returncode == 0
        histories = dict(_histories(system))
    finally:
        system.stop()
    blobs = Blobs(S3Store(store.client("console"), "tttd", RUN))
    files = {f"store {name}": blobs.store.get(name) for name in blobs.store.keys("")}
    files |= {f"log {path.name}": path.read_bytes() for path in system.settings.logs.iterdir()}
    files |= {f"home {path.name}": path.read_bytes() for path in system.home.rglob("*") if path.is_file()}
    files |= {f"history {name}": data for name, data in histories.items()}
    files["bundle"] = bundle.read_bytes()
    return Traces(files, tuple(text.encode() for text in secrets), bundle)


async def _run(system: System) -> None:
    """A run whose first sampler is refused by the store until it is replaced."""
    system.start(*(role for role in ROLES if role != "sample"))
    system._environment["AWS_SECRET_ACCESS_KEY"] = WRONG
    system.start("sample")
    system._environment["AWS_SECRET_ACCESS_KEY"] = secret("console")

    def replace_sampler() -> None:
        log = system.settings.logs / "sample.log"
        system.wait_for(
            "a refusal", lambda: log.is_file() and ("SignatureDoesNotMatch" in log.read_text() or "403" in log.read_text())
        )
        system.kill("sample")
        system.start("sample")

    result = await system.run(RUN, REQUEST, replace_sampler)
    assert (result.state, result.step) == ("completed", 1)


def _histories(system: System) -> Iterator[tuple[str, bytes]]:
    """Every workflow's history as the Temporal CLI exports it, and its payloads in plain text."""
    listed = json.loads(system.temporal("workflow", "list", "--output", "json").stdout)
    for execution in listed:
        workflow = execution["execution"]["workflowId"]
        shown = system.temporal("workflow", "show", "--workflow-id", workflow, "--output", "json")
        assert shown.returncode == 0, shown.stderr
        yield workflow, shown.stdout.encode() + b"\n".join(_payloads(json.loads(shown.stdout)))


def _payloads(value: object) -> Iterator[bytes]:
    if isinstance(value, dict):
        if isinstance(data := value.get("data"), str):
            yield base64.b64decode(data)
        for item in value.values():
            yield from _payloads(item)
    elif isinstance(value, list):
        for item in value:
            yield from _payloads(item)


def test_what_is_searched_is_all_there(traces: Traces) -> None:
    """The search finds what must be there, or it would find nothing anywhere."""
    found = traces.holding(b"circle_packing_26")
    for place in ("store blobs/", f"history run/{RUN}", "bundle", "home temporal.db"):
        assert [name for name in found if name.startswith(place)], (place, sorted(traces.files))
    assert len([name for name in traces.files if name.startswith("history ")]) == 4, "run, step and two groups"
    assert [name for name in traces.holding(b"rollout_sampled") if name.startswith("log sample")]
    refusals = [name for name in traces.files if b"SignatureDoesNotMatch" in traces.files[name] or b"403" in traces.files[name]]
    assert [name for name in refusals if name.startswith("log sample")], "the wrong secret was refused"


def test_no_secret_is_anywhere(traces: Traces) -> None:
    leaks = {text.decode()[:12]: where for text in traces.secrets if (where := traces.holding(text))}
    assert leaks == {}


def test_no_access_key_is_in_histories_store_or_bundle(traces: Traces) -> None:
    """A key's id is no secret, and says who did something; what is kept and handed on does not."""
    assert [name for name in traces.holding(b"console-key") if not name.startswith("log ")] == []


def test_no_host_name_and_no_path_is_in_the_bundle(traces: Traces, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = str(tmp_path_factory.getbasetemp())
    for text in (base, os.path.expanduser("~") + "/"):
        assert text.encode() not in traces.files["bundle"], text
    assert holding_word(traces.bundle, socket.gethostname()) == []


def test_the_run_is_whole(traces: Traces, store: Store) -> None:  # noqa: F811
    blobs = Blobs(S3Store(store.client("console"), "tttd", RUN))
    assert RunStore(blobs, RUN).last_step() == 1
