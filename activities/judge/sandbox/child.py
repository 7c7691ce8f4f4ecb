"""The script that a judged process starts with: reads its order from stdin and runs ``inside.py``, which comes along compiled.

Compiling it anew would double the cost of a start, and a judge's installation need not have or allow compiled files.
"""

import marshal

with open(0, "rb", closefd=False) as stream:
    order = marshal.load(stream)
inside = {"__name__": "inside", "__file__": "inside.py"}
exec(marshal.loads(order["inside"]), inside)
inside["main"](order)  # type: ignore[operator]
