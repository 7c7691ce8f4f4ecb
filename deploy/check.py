"""Check every file of the deployment with the tool that its reader uses: `make deploy-check`.

Needs requirements/deploy.txt, in an environment of its own; promtool comes from Debian's package `prometheus`, and what needs it is
reported as not run where it is missing. No container engine and no cluster are used: nothing is built, pulled or started here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import helm_python
import yaml

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CHART = ROOT / "deploy" / "helm" / "tttd"
KUBERNETES = ("1.28", "1.37")
"""Oldest and newest version that manifests are validated for."""
NO_SCHEMA = {"ScaledObject", "TriggerAuthentication", "PodMonitor"}
"""Custom resources, of which kubernetes-validate has no schema."""

VALUES = {
    "defaults": {},
    "everything": {
        "autoscaling": {"enabled": True},
        "monitoring": {"podMonitor": True, "dashboards": True},
        "temporal": {"tls": {"enabled": True, "secret": "temporal-tls", "serverName": "frontend"}, "apiKeySecret": "temporal-key"},
        "models": {"existingClaim": "models"},
        "store": {"endpoint": "http://store:8333"},
        "image": {"pullSecrets": ["registry"], "tag": "1.2.3"},
        "roles": {"judge": {"env": {"TTTD_JUDGE_SLOTS": "3"}, "serviceAccount": {"annotations": {"role": "judge"}}}},
    },
    "nothing optional": {
        "networkPolicy": {"enabled": False},
        "roles": {"engine": {"kind": "embedded"}, "train": {"enabled": False}, "judge": {"storeSecret": "", "minAvailable": None}},
    },
}


class Skipped(Exception):
    """A tool is missing; says which."""


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """Run a command from the repository's root; its output.

    Raises:
        RuntimeError: it failed; with all that it said.
    """
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def compose(scratch: Path) -> str:
    """Docker Compose itself reads the file, with the environment that new-env.sh makes, for every set of profiles."""
    env = scratch / "env"
    env.write_text(run("sh", "deploy/new-env.sh"))
    told = []
    for profiles in ((), ("cpu",), ("gpu",), ("observability",), ("cpu", "gpu", "observability")):
        flags = [flag for profile in profiles for flag in ("--profile", profile)]
        config = yaml.safe_load(run(BIN / "docker-compose", "--env-file", env, *flags, "config"))
        told.append(f"{'+'.join(profiles) or 'default'} {len(config['services'])} services")
    return ", ".join(told)


def compose_schema(scratch: Path) -> str:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")
    return "valid against the compose-spec schema"


def dockerfile(scratch: Path) -> str:
    run(BIN / "hadolint", "--config", "deploy/.hadolint.yaml", "deploy/Dockerfile")
    return "no findings"


def yaml_files(scratch: Path) -> str:
    files = [
        ROOT / "docker-compose.yml",
        CHART / "Chart.yaml",
        CHART / "values.yaml",
        *sorted((ROOT / "deploy").glob("prometheus/*.yml")),
        *sorted((ROOT / "deploy").glob("grafana/**/*.yml")),
        *sorted((ROOT / "deploy").glob("temporal/*.yaml")),
    ]
    run(BIN / "yamllint", "--strict", "--config-file", "deploy/.yamllint.yaml", *files)
    return f"{len(files)} files"


def rendered() -> Iterator[tuple[str, str, dict[str, object]]]:
    """(values, template, object) of every object of every set of values."""
    with helm_python.Chart.load(str(CHART)) as chart:
        for name, values in VALUES.items():
            for template, text in chart.render(values, name="check", namespace="tttd").items():
                if template.endswith((".yaml", ".yml")):
                    yield from ((name, template, found) for found in yaml.safe_load_all(text) if found)


def chart_lint(scratch: Path) -> str:
    found = helm_python.lint(str(CHART))
    bad = [message for message in found["messages"] if message["severity"] > 1]
    if found["errors"] or bad:
        raise RuntimeError(json.dumps([*found["errors"], *bad], indent=1))
    return f"Helm {helm_python.helm_sdk_version()} lint: no warnings"


def chart_values(scratch: Path) -> str:
    """Helm refuses values that the schema does not allow."""
    wrong = [
        {"roles": {"judge": {"replicas": "two"}}},
        {"roles": {"juge": {}}},
        {"store": {"url": "/a/path"}},
        {"temporal": {"address": "https://temporal:7233"}},
    ]
    with helm_python.Chart.load(str(CHART)) as chart:
        for values in wrong:
            try:
                chart.render(values, name="check", namespace="tttd")
            except helm_python.HelmError:
                continue
            raise RuntimeError(f"accepted: {values}")
    return f"{len(wrong)} wrong sets of values are refused"


def chart_objects(scratch: Path) -> str:
    """Rendered by Helm itself, every object validated against Kubernetes' own schemas."""
    count, skipped = 0, set()
    for number, (values, template, found) in enumerate(rendered()):
        if found["kind"] in NO_SCHEMA:
            skipped.add(str(found["kind"]))
            continue
        file = scratch / f"{number}.yaml"
        file.write_text(yaml.safe_dump(found))
        for version in KUBERNETES:
            try:
                run(BIN / "kubernetes-validate", "--strict", "-k", version, file)
            except RuntimeError as error:
                raise RuntimeError(f"values {values!r}, {template}: {error}") from None
        count += 1
    return f"{count} objects valid for Kubernetes {' and '.join(KUBERNETES)}; no schema here for {', '.join(sorted(skipped))}"


def _promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        raise Skipped("promtool is missing: apt-get install prometheus")
    return found


def prometheus(scratch: Path) -> str:
    run(_promtool(), "check", "config", "deploy/prometheus/prometheus.yml")
    run(_promtool(), "test", "rules", "deploy/prometheus/rules_test.yml")
    return "configuration and rules valid, rule tests pass"


def expressions(scratch: Path) -> str:
    """Every expression of the dashboards is PromQL."""
    promtool, rules = _promtool(), []
    for file in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", []):
                text = re.sub(r"\$__rate_interval", "5m", target["expr"]).replace("$run", ".*")
                rules.append({"record": f"check:{len(rules)}", "expr": text})
    written = scratch / "expressions.yml"
    written.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    run(promtool, "check", "rules", written)
    return f"{len(rules)} expressions parse"


def shell(scratch: Path) -> str:
    files = sorted((ROOT / "deploy").rglob("*.sh"))
    for file in files:
        run("sh", "-n", file)
    return f"{len(files)} scripts parse"


CHECKS: dict[str, Callable[[Path], str]] = {
    "compose file, Docker Compose": compose,
    "compose file, schema": compose_schema,
    "Dockerfile, hadolint": dockerfile,
    "YAML, yamllint": yaml_files,
    "chart, helm lint": chart_lint,
    "chart, values schema": chart_values,
    "chart, rendered objects": chart_objects,
    "Prometheus, promtool": prometheus,
    "dashboards, promtool": expressions,
    "shell scripts, sh -n": shell,
}


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, check in CHECKS.items():
            try:
                state, told = "ok", check(Path(folder))
            except Skipped as missing:
                state, told = "NOT RUN", str(missing)
            except RuntimeError as error:
                state, told, failed = "FAILED", str(error), failed + 1
            print(f"{name:32} {state:8} {told}")
    print("not run here at all: docker build, docker compose up, and any cluster (there is no container engine in these checks)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
