"""What Harbor asks of a task folder, as far as it can be read from the folder: a mirror of the rules that `harbor lint` has.

Not the real thing (`make harbor` runs that): these are enough to say, without Harbor, what would be missing. Source: spec tasks 2.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILES: Final = {
    "environment/Dockerfile": "the image that an agent works in",
    "tests/Dockerfile": "the verifier's image, which holds the judge",
    "tests/test.sh": "what the verifier runs",
    "solution/solve.sh": "puts a known answer where the agent's program would be",
}
_INSTALL: Final = re.compile(r"\bpip3?\s+install\b(?P<rest>[^\n&|;]*)")
_TAKE_A_VALUE: Final = ("-r", "-c", "--requirement", "--constraint", "--only-binary", "--no-binary", "--target", "--index-url")
_DOWNLOAD: Final = re.compile(r"\b(?:pip3?\s+install|curl|wget|git\s+clone|apt(?:-get)?\s+install)\b")


def missing(folder: Path) -> list[str]:
    """What Harbor or its lint would object to, each with how to mend it; empty if nothing."""
    config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    return [*_config(config), *_layout(folder), *_dockerfiles(folder)]


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _config(config: dict[str, Any]) -> list[str]:
    problems = []
    if config.get("schema_version") != "1.4":
        problems.append('task.toml: write schema_version = "1.4"')
    if not _NAME.fullmatch(str(_section(config, "task").get("name", ""))):
        problems.append("task.toml: [task] name must be organisation/name")
    if _section(config, "verifier").get("environment_mode") != "separate":
        problems.append('task.toml: set [verifier] environment_mode = "separate", so that no agent reaches the judge')
    if str(_section(config, "agent").get("user", "root")).partition(":")[0] in ("0", "root"):
        problems.append("task.toml: set [agent] user to one that is not root, and make that user in environment/Dockerfile")
    if not config.get("artifacts"):
        problems.append('task.toml: name what the agent leaves, for example artifacts = ["/work/solution.py"]')
    for name in ("agent", "verifier", "environment"):
        section = _section(config, name)
        if section.get("allowed_hosts") and section.get("network_mode") != "allowlist":
            problems.append(f'task.toml: [{name}] allowed_hosts needs network_mode = "allowlist"')
    return problems


def _layout(folder: Path) -> list[str]:
    return [f"{name} is missing: {what}" for name, what in _FILES.items() if not (folder / name).is_file()]


def _dockerfiles(folder: Path) -> list[str]:
    problems = []
    for name in ("environment/Dockerfile", "tests/Dockerfile"):
        text = _text(folder / name)
        problems += [f"{name}: pin {package!r} with ==" for package in _unpinned(text)]
        problems += [f"{name}: give {image} a tag" for image in re.findall(r"(?m)^FROM\s+(\S+)", text) if _untagged(image)]
    if re.search(r"(?m)^(?:COPY|ADD)\s[^\n]*(?:tests|solution)/", _text(folder / "environment" / "Dockerfile")):
        problems.append("environment/Dockerfile: copies tests or solution, which an agent must not see")
    if found := _DOWNLOAD.search(_text(folder / "tests" / "test.sh")):
        problems.append(
            f"tests/test.sh: `{found[0]}` when verifying; put it into tests/Dockerfile, since the verifier has no network"
        )
    return problems


def _unpinned(text: str) -> list[str]:
    words = [word for match in _INSTALL.finditer(text) for word in match["rest"].replace("\\", " ").split()]
    named = [word for before, word in zip(["", *words], words, strict=False) if before not in _TAKE_A_VALUE]
    return [word for word in named if not word.startswith(("-", "/", ".", "$")) and "==" not in word]


def _untagged(image: str) -> bool:
    return "$" not in image and ("@" not in image and (":" not in image or image.endswith(":latest")))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
