"""The deployment's files say what the code does: settings that exist, metrics that are exported, judges that hold nothing.

`make deploy-check` has the files read by the tools that will read them; here they are held against the code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from activities.blobs import Blobs
from activities.commit.metrics import describe
from scripts.dashboards import as_text, boards
from tests.system import System
from workers import temporal_server
from workers.health import CONDITIONS
from workers.metrics import WorkerMetrics
from workers.rights import RIGHTS
from workers.settings import Settings
from workers.step_numbers import StepNumbers, gauge_name
from workflows import names

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "tttd"
WORKERS = {"control", "sample", "judge", "train", "engine", "train-cpu", "engine-cpu"}
COMPOSE_ONLY = {f"TTTD_{i.upper()}_{part}" for i in (*RIGHTS, "console") for part in ("KEY", "SECRET")} | {
    "TTTD_VERSION", "TTTD_RETENTION", "TTTD_BUCKET", "TTTD_MASTER", "TTTD_IDENTITIES", "TTTD_S3_CONFIG",
}  # fmt: skip
"""Names that are no settings of a worker: keys of the store's identities, and what setup scripts are told."""


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return found


def example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


# Settings -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "file",
    ["docker-compose.yml", ".env.example", "deploy/Dockerfile", "deploy/helm/tttd/templates/_helpers.tpl", "docs/operate.md"],
)
def test_every_setting_that_is_named_exists(file: str) -> None:
    named = set(re.findall(r"\bTTTD_[A-Z0-9_]*[A-Z0-9]\b", (ROOT / file).read_text()))
    known = {f"TTTD_{name.upper()}" for name in Settings.model_fields} | {"TTTD_CONFIG"} | COMPOSE_ONLY
    assert named <= known


def test_workers_of_the_compose_file_start_with_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings refuses what it does not know and what does not fit; the values are those that Compose would put in."""
    for name in list(os.environ):
        if name.startswith("TTTD_"):
            monkeypatch.delenv(name)
    for service in sorted(WORKERS):
        environment = compose()["services"][service]["environment"]
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                if name.startswith("TTTD_"):
                    patch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value)))
            settings = Settings()
        assert settings.store_url == "s3://tttd", service


def test_a_new_env_has_a_value_for_everything_and_no_two_secrets_alike() -> None:
    made = subprocess.run(["sh", str(DEPLOY / "new-env.sh")], capture_output=True, text=True, check=True).stdout
    values = dict(line.split("=", 1) for line in made.splitlines() if line and not line.startswith("#"))
    assert values.keys() == example().keys()
    assert "change-me" not in values.values()
    secrets = [values[name] for name, value in example().items() if value == "change-me"]
    assert len(set(secrets)) == len(secrets)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{16,}", secret) for secret in secrets)


def test_every_variable_of_the_compose_file_is_in_the_example() -> None:
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    assert used == example().keys()


# Images -----------------------------------------------------------------------------------------------------------------------
def test_images_are_fixed_by_tag() -> None:
    for name, service in compose()["services"].items():
        image = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["image"])
        repository, _, tag = image.partition(":")
        assert re.fullmatch(r"v?\d[\w.-]*", tag), (name, image)
        assert "auto-setup" not in repository, "it is not built any more"
        assert "sha256" not in image


def test_a_default_in_the_compose_file_is_the_one_of_the_example() -> None:
    text, values = (ROOT / "docker-compose.yml").read_text(), example()
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", text):
        assert values[name] == default


def test_every_role_has_an_image_that_runs_as_nobody_in_particular() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    stages = re.split(r"(?m)^FROM ", text)[1:]
    targets = {re.search(r"AS (\S+)", stage).group(1): stage for stage in stages}  # type: ignore[union-attr]
    for role in CONDITIONS:
        stage, users = targets[role], re.findall(r"(?m)^USER (\S+)", targets[role])
        assert users[-1:] in ([], ["10001:10001"]), role
        assert f'CMD ["worker", "{role}"]' in stage
    assert "USER 10001:10001" in targets["base"]
    assert "HEALTHCHECK" in targets["base"]
    built = {s["build"]["target"] for s in compose()["services"].values() if "build" in s}
    assert built == set(CONDITIONS)


# Judges -----------------------------------------------------------------------------------------------------------------------
def test_judges_hold_the_keys_of_a_judge_and_no_others() -> None:
    judge = compose()["services"]["judge"]
    text = json.dumps(judge)
    assert set(re.findall(r"TTTD_[A-Z]+_(?:KEY|SECRET)", text)) == {"TTTD_JUDGE_KEY", "TTTD_JUDGE_SECRET"}
    assert not [name for name in judge["environment"] if "ENGINE" in name or "TRAIN" in name or "MODEL" in name]
    assert "volumes" not in judge
    for name in WORKERS:
        service = compose()["services"][name]
        role = name.removesuffix("-cpu").upper()
        assert service["environment"]["AWS_ACCESS_KEY_ID"] == f"${{TTTD_{role}_KEY:?}}"
        assert "env_file" not in service, "a file of variables would bring everybody's keys"


def test_judges_reach_no_engine_and_nothing_outside() -> None:
    found = compose()
    networks = found["services"]["judge"]["networks"]
    assert networks == ["work"]
    assert found["networks"]["work"] == {"internal": True}
    assert "inference" not in networks
    assert {n for n, s in found["services"].items() if "inference" in s["networks"]} == {"sample", "engine", "engine-cpu"}
    assert {n for n, s in found["services"].items() if "database" in s["networks"]} == {"postgres", "temporal", "temporal-schema"}


def test_workers_have_no_privileges_and_ports_are_open_on_the_loopback_only() -> None:
    for name, service in compose()["services"].items():
        if name in WORKERS:
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]
            assert "privileged" not in service
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_volumes_of_data_are_named() -> None:
    found = compose()
    mounts = [v.partition(":")[0] for s in found["services"].values() for v in s.get("volumes", [])]
    assert {m for m in mounts if not m.startswith((".", "$"))} == found["volumes"].keys()


# Observability ------------------------------------------------------------------------------------------------------------------
TEMPORAL = {
    "temporal_activity_schedule_to_start_latency", "temporal_workflow_task_execution_latency", "temporal_num_pollers",
    "temporal_workflow_task_execution_failed", "approximate_backlog_count", "approximate_backlog_age_seconds",
}  # fmt: skip
"""Of the Temporal SDK (core) and server; docs/observability.md says which versions they were read from."""


def exported(blobs: Blobs) -> set[str]:
    """Names of all metrics that a worker of any role shows."""
    found = {"tttd_engine_up", "tttd_engine_adapters_verified"}
    for role in CONDITIONS:
        families = text_string_to_metric_families(generate_latest(WorkerMetrics(role).registry).decode())
        found |= {f.name for f in families}
    return found | {family.name for family in StepNumbers(blobs).collect()}


def embedded_engine() -> set[str]:
    source = (ROOT / "workers/engine/embedded/server.py").read_text()
    return {f"sglang:{name}" for name in re.findall(r'\("(\w+)", "(?:gauge|counter)", stats\.', source)}


def expressions() -> Iterator[tuple[str, str]]:
    for file in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{file.name}: {panel['title']}", target["expr"]
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert", rule.get("record")), rule["expr"]


def metric_names(expression: str) -> set[str]:
    """Names of metrics in an expression; labels and quoted text do not look like ours."""
    plain = re.sub(r"\{[^}]*\}", "", expression)
    found = set(re.findall(r"\b(?:tttd_|sglang:|temporal_|approximate_|process_)\w+", plain))
    return {re.sub(r"_(bucket|sum|count|total)$", "", name) if name not in TEMPORAL else name for name in found}


def test_every_metric_of_a_dashboard_and_a_rule_is_exported(blobs: Blobs) -> None:
    known = exported(blobs) | {re.sub(r"_total$", "", name) for name in embedded_engine()} | TEMPORAL
    seen: set[str] = set()
    for where, expression in expressions():
        names_in_it = metric_names(expression)
        assert names_in_it <= known | {"process_cpu_seconds", "process_resident_memory_bytes"}, where
        seen |= names_in_it
    assert len(seen) > 50
    assert "tttd_step_train_kl_policy_base" in seen


def test_the_recorded_names_that_dashboards_join_with_are_recorded() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    used = {name for _, expression in expressions() for name in re.findall(r"\btttd:[\w:]+", expression)}
    assert used == recorded


@pytest.mark.parametrize("folder", ["grafana/dashboards", "helm/tttd/dashboards"])
def test_the_dashboards_in_the_repository_are_those_of_the_script(folder: str) -> None:
    made = boards()
    assert {path.name for path in (DEPLOY / folder).glob("*.json")} == made.keys()
    for name, board in made.items():
        assert (DEPLOY / folder / name).read_text() == as_text(board), "write them anew: `make deploy-files`"


def test_a_dashboard_has_no_two_panels_in_one_place() -> None:
    for name, board in boards().items():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            p = panel["gridPos"]
            assert p["x"] + p["w"] <= 24, (name, panel["title"])
            cells = {(x, y) for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])}
            assert not cells & taken, (name, panel["title"])
            taken |= cells
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)


def test_prometheus_asks_every_worker_on_the_ports_of_the_images() -> None:
    jobs = {j["job_name"]: j for j in yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]}
    image = dict(re.findall(r"(TTTD_[A-Z_]*PORT)=(\d+)", (DEPLOY / "Dockerfile").read_text()))
    for job, variable in (("tttd", "TTTD_METRICS_PORT"), ("temporal-sdk", "TTTD_TEMPORAL_METRICS_PORT")):
        (found,) = jobs[job]["dns_sd_configs"]
        assert set(found["names"]) == WORKERS
        assert str(found["port"]) == image[variable]
    ports = re.findall(r"containerPort: (\d+)", (CHART / "templates" / "deployments.yaml").read_text())
    assert set(image.values()) <= set(ports)


def test_every_exported_metric_is_documented(blobs: Blobs) -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    of_steps = {gauge_name(d.name) for d in describe()}
    ours = {name for name in exported(blobs) if name.startswith("tttd_")} - of_steps
    assert not [name for name in sorted(ours) if f"`{name}" not in text]


def test_the_embedded_engine_counts_under_sglangs_names() -> None:
    assert {"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:generation_tokens_total"} <= embedded_engine()


# Chart --------------------------------------------------------------------------------------------------------------------------
def test_the_charts_values_fit_their_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    assert values["roles"].keys() == CONDITIONS.keys()
    for role, config in values["roles"].items():
        required = schema["definitions"]["engine" if role == "engine" else "role"]["properties"]
        assert config.keys() == required.keys(), "every field is shown with its default"


def test_kedas_queue_is_the_judges() -> None:
    text = (CHART / "templates" / "judge-scaledobject.yaml").read_text()
    assert re.findall(r"taskQueue: (\S+)", text) == [names.JUDGE_QUEUE]


def test_version_of_chart_images_and_package_are_one() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    package = re.search(r'(?m)^version = "(.+)"', (ROOT / "pyproject.toml").read_text())
    assert package is not None
    assert chart["version"] == chart["appVersion"] == package.group(1) == example()["TTTD_VERSION"]


# Setup of Temporal ----------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_namespace_is_set_up_on_a_real_server_and_repeating_it_changes_nothing(tmp_path: Path) -> None:
    system = System(tmp_path / "home")
    try:
        system.start_temporal()
        environment = {
            "PATH": f"{Path(temporal_server.find_temporal()).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "TEMPORAL_ADDRESS": temporal_server.address(system.settings),
            "TEMPORAL_NAMESPACE": "discovery",
            "TTTD_RETENTION": "960h",
        }
        for _ in range(2):
            done = subprocess.run(
                ["sh", str(DEPLOY / "temporal" / "setup-namespace.sh")],
                env=environment,
                capture_output=True,
                text=True,
                timeout=180,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.endswith("namespace discovery is ready, retention 960h\n")
        listed = json.loads(system.temporal("operator", "search-attribute", "list", "-n", "discovery", "-o", "json").stdout)
        assert listed["customAttributes"].keys() >= names.SEARCH_ATTRIBUTES.keys()
        described = system.temporal("operator", "namespace", "describe", "-n", "discovery", "-o", "json").stdout
        assert "3456000s" in described
    finally:
        system.stop()
