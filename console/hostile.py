"""Answers that no judge may stumble over: texts that reach it, and programs that return what is no answer.

Every judge meets them sooner or later. None may make it raise, and none may score better than the best known answer.
"""

from __future__ import annotations

from typing import Final

TEXTS: Final[dict[str, bytes]] = {
    "empty": b"",
    "not JSON": b"[1, 2",
    "NaN": b"[NaN, NaN]",
    "infinity": b"[Infinity, 1]",
    "overflow": b"[1e400]",
    "a mantissa beyond every double": b"[" + b"9" * 24 + b"e300]",
    "null": b"null",
    "true": b"true",
    "text": b'"1"',
    "an object": b'{"score": 1e9}',
    "numbers as text": b'["1", "2"]',
    "a number": b"7",
    "a huge number": b"1e308",
    "a negative number": b"-1",
    "an integer of 25 digits": b"9999999999999999999999999",
    "an empty list": b"[]",
    "empty lists": b"[[], [], 0]",
    "a list of lists of nothing": b"[[[[]]]]",
    "nested too deep": b"[" * 200 + b"]" * 200,
    "ragged": b"[[1, 2], 3, [[4]]]",
    "zeros": b"[" + b"0," * 99 + b"0]",
    "many numbers": b"[" + b"0.5," * 99_999 + b"0.5]",
    "many pairs": b"[[" + b"[0.5,0.5]," * 9_999 + b"[0.5,0.5]],[" + b"0.1," * 9_999 + b"0.1],0]",
    "subnormal numbers": b"[5e-324, 5e-324, 5e-324]",
    "huge numbers": b"[1e308, 1e308, 1e308]",
}
"""What may arrive as a program's result."""

_PYTHON: Final[dict[str, str]] = {
    "returns None": "return None",
    "returns a claim": 'return {"score": 1e9}',
    "returns text": 'return "1e9"',
    "returns NaN": 'return [float("nan")] * 26',
    "returns infinity": 'return float("inf")',
    "returns a masked array": "import numpy as np\n    return np.ma.masked_all((26, 2)), np.full(26, 1e300), 0.0",
    "returns half precision": "import numpy as np\n    return np.full((26, 2), 0.5, np.float16)",
    "returns complex numbers": "return [1j, 2j]",
    "returns a generator": "return (i for i in range(9))",
    "returns itself": "x = []\n    x.append(x)\n    return x",
    "returns a number that lies": (
        "class Liar(float):\n"
        "        def __lt__(self, other): return False\n"
        "        def __gt__(self, other): return True\n"
        "    return Liar(1e9)"
    ),
    "exits": "raise SystemExit(0)",
    "raises": 'raise ValueError("1e9")',
}


def programs(entry: str) -> dict[str, str]:
    """Python programs by what they do; each defines the task's entry."""
    return {name: f"def {entry}(*args, **kwargs):\n    {body}\n" for name, body in _PYTHON.items()}
