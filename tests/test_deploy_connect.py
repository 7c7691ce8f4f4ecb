"""How processes find Temporal: by Temporal's own configuration, with TLS and API keys, and by nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import System
from tests.tls_front import Authority, tls_front
from workers.connect import connect_options, connect_temporal
from workers.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_CONFIG_FILE", "TEMPORAL_PROFILE", "TEMPORAL_API_KEY", "TEMPORAL_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    return Settings(home=tmp_path / "home", temporal_port=7299)


def test_without_any_configuration_it_is_the_embedded_server(settings: Settings) -> None:
    assert connect_options(settings)["target_host"] == "127.0.0.1:7299"


def test_address_namespace_and_api_key_come_from_the_environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.home.mkdir()
    settings.temporal_config.write_text('[profile.default]\naddress = "127.0.0.1:7299"\n')  # of `tttd up`: the user's wins
    monkeypatch.setenv("TEMPORAL_ADDRESS", "eu.example.com:7233")
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "discovery")
    monkeypatch.setenv("TEMPORAL_API_KEY", "key of a test")
    options = connect_options(settings)
    assert (options["target_host"], options["namespace"]) == ("eu.example.com:7233", "discovery")
    assert options["api_key"] == "key of a test"
    assert options["tls"], "an API key is never sent in the clear"


def test_a_profile_of_a_file_is_taken_whole(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "temporal.toml"
    file.write_text(
        '[profile.prod]\naddress = "prod.example.com:7233"\nnamespace = "discovery"\n'
        f'[profile.prod.tls]\nserver_name = "frontend"\nserver_ca_cert_path = "{tmp_path / "ca.pem"}"\n'
    )
    (tmp_path / "ca.pem").write_bytes(b"a certificate")
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(file))
    monkeypatch.setenv("TEMPORAL_PROFILE", "prod")
    options = connect_options(settings)
    assert (options["target_host"], options["namespace"]) == ("prod.example.com:7233", "discovery")
    assert (options["tls"].domain, options["tls"].server_root_ca_cert) == ("frontend", b"a certificate")


@pytest.mark.parametrize(
    ("variable", "content"), [("TEMPORAL_TLS_SERVER_CA_CERT_PATH", "nowhere.pem"), ("TEMPORAL_CONFIG_FILE", "broken.toml")]
)
def test_a_configuration_that_cannot_be_read_is_told_as_such(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, content: str
) -> None:
    (tmp_path / "broken.toml").write_text("[profile.default\n")
    monkeypatch.setenv(variable, str(tmp_path / content))
    with pytest.raises(RuntimeError, match=r"Temporal's configuration .* cannot be used"):
        connect_options(settings)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("tls") / "home")
    system.start_temporal()
    yield system
    system.stop()


@pytest.mark.slow
async def test_mutual_tls(system: System, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real server behind a front that asks for a client's certificate, as a cluster with mTLS does."""
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("worker")
    async with tls_front(authority, system.settings.temporal_port) as port:
        monkeypatch.setenv("TEMPORAL_ADDRESS", f"127.0.0.1:{port}")
        monkeypatch.setenv("TEMPORAL_TLS_SERVER_CA_CERT_PATH", str(authority.certificate_path))
        monkeypatch.setenv("TEMPORAL_TLS_CLIENT_CERT_PATH", str(certificate))
        monkeypatch.setenv("TEMPORAL_TLS_CLIENT_KEY_PATH", str(key))
        client = await connect_temporal(settings)
        assert await client.service_client.check_health()


@pytest.mark.slow
async def test_a_client_without_its_certificate_is_told_where_it_failed(
    system: System, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    async with tls_front(authority, system.settings.temporal_port) as port:
        monkeypatch.setenv("TEMPORAL_ADDRESS", f"127.0.0.1:{port}")
        monkeypatch.setenv("TEMPORAL_TLS_SERVER_CA_CERT_PATH", str(authority.certificate_path))
        with pytest.raises(RuntimeError, match=rf"no Temporal server at 127\.0\.0\.1:{port}"):
            await connect_temporal(settings)
