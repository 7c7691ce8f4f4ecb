"""What the judge must know of an interpreter that runs programs: where it imports from, and our code compiled by it.

Asked of the interpreter itself, since it need not be the judge's own.
"""

from __future__ import annotations

import base64
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOURCES: Final = tuple(Path(__file__).with_name(name) for name in ("closing.py", "inside.py"))
"""Run in this order, in one namespace."""

FLAGS: Final = ("-s", "-P", "-B")
"""No user packages, nothing imported from the working directory, no files written; not -I, which ignores PYTHONHASHSEED."""

_QUESTION = """
import base64, json, marshal, os, sys, sysconfig
keep = ("stdlib", "platstdlib", "purelib", "platlib")
paths = [path for name, path in sysconfig.get_paths().items() if name in keep]
paths += [sysconfig.get_config_var("LIBDIR") or "", sys.base_prefix + "/lib", sys.executable, sys.prefix + "/pyvenv.cfg"]
sources = json.load(sys.stdin)
codes = [marshal.dumps(compile(text, name, "exec", dont_inherit=True)) for name, text in sources]
paths = [path for path in paths if path and os.path.exists(path)]
print(json.dumps({"paths": paths, "python": sys.executable, "codes": [base64.b64encode(code).decode() for code in codes]}))
"""


@dataclass(frozen=True)
class Interpreter:
    python: Path
    """Absolute; a virtual environment's own link, through which it finds its packages."""
    readable: tuple[str, ...]
    """Directories that it imports from, and its own files."""
    codes: tuple[bytes, ...]
    """:data:`SOURCES` as marshalled code objects of its version."""


def ask(python: Path) -> Interpreter:
    """Start an interpreter as programs are started, and ask it.

    Raises:
        OSError: it cannot be started.
        subprocess.SubprocessError: it does not take our flags (older than 3.11), or fails.
    """
    command = [str(python), *FLAGS, "-c", _QUESTION]
    sources = json.dumps([(path.name, path.read_text(encoding="utf-8")) for path in SOURCES])
    found = subprocess.run(command, env={}, input=sources.encode(), capture_output=True, timeout=60)
    if found.returncode:
        said = found.stderr.decode("utf-8", "backslashreplace").strip().rpartition("\n")[2]
        raise subprocess.SubprocessError(f"it exits with {found.returncode}: {said or 'no message'}")
    answer = json.loads(found.stdout)
    return Interpreter(
        python=Path(answer["python"]),
        readable=tuple(dict.fromkeys(answer["paths"])),
        codes=tuple(base64.b64decode(code) for code in answer["codes"]),
    )
