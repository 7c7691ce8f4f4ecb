"""What the judge must know of the interpreter that runs programs: where it imports from, and ``inside.py`` compiled by it.

Asked of the interpreter itself, since it need not be the judge's own.
"""

from __future__ import annotations

import base64
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INSIDE: Final = Path(__file__).with_name("inside.py")

_QUESTION = """
import base64, json, marshal, sys, sysconfig
keep = ("stdlib", "platstdlib", "purelib", "platlib")
paths = [path for name, path in sysconfig.get_paths().items() if name in keep]
paths += [sysconfig.get_config_var("LIBDIR") or "", sys.base_prefix + "/lib", sys.executable]
code = compile(sys.stdin.read(), "inside.py", "exec", dont_inherit=True)
print(json.dumps({"paths": paths, "code": base64.b64encode(marshal.dumps(code)).decode()}))
"""


@dataclass(frozen=True)
class Interpreter:
    python: Path
    readable: tuple[str, ...]
    """Directories that it imports from, and its own file."""
    inside: bytes
    """``inside.py`` as a marshalled code object of its version."""


def ask(python: Path) -> Interpreter:
    """Start an interpreter as programs are started, and ask it.

    Raises:
        OSError: it cannot be started.
        subprocess.SubprocessError: it does not take our flags (older than 3.11), or fails.
    """
    command = [str(python), "-s", "-P", "-B", "-c", _QUESTION]
    found = subprocess.run(command, env={}, input=INSIDE.read_bytes(), capture_output=True, check=True, timeout=60)
    answer = json.loads(found.stdout)
    readable = tuple(dict.fromkeys(path for path in answer["paths"] if path))
    return Interpreter(python, readable, base64.b64decode(answer["code"]))
