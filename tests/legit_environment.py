"""The Python environment of the legitimate programs: built once into .venv, with an interpreter that every user can start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from activities.judge.sandbox.landlock import unreachable

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tests" / "data" / "attacks" / "legit" / "requirements.txt"

_BUILD = """
import sys
from pathlib import Path
from tasks.environments import build, parse
file, directory = Path(sys.argv[1]), Path(sys.argv[2])
environment = parse(file.read_text(), file)
assert environment is not None, f"{file} pins nothing"
print(build(environment, directory, sys.argv[3:]))
"""


def ordinary_python() -> str | None:
    """An interpreter of this version that an ordinary user can start."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [sys.executable, *(f"{folder}/{name}" for folder in ("/usr/bin", "/usr/local/bin"))]
    return next((c for c in candidates if os.path.exists(c) and not unreachable([c])), None)


def packages() -> list[str]:
    """This interpreter's own, for another one of the same version."""
    return [path for path in sys.path if path.endswith("site-packages")]


def legit_python() -> Path:
    """Its interpreter; the first call takes a minute or two.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed; pip's words stand on standard error.
    """
    directory = Path(sys.prefix) / "share" / "tttd" / "test-environments"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *packages()])}
    command = [ordinary_python() or sys.executable, "-P", "-B", "-c", _BUILD, str(REQUIREMENTS), str(directory)]
    # This interpreter's packages are on the path, for pip itself; they must not pass for installed ones.
    command += ["--ignore-installed", *os.environ.get("PIP_ARGS", "").split()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
    return Path(done.stdout.splitlines()[-1])
