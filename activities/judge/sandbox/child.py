"""What a judged process starts with (as `python -c`): reads its order from stdin and runs the code that comes along compiled.

Compiling it anew would double the cost of a start, and a judge's installation need not have or allow compiled files. Given as
text and not as a file, so that nothing needs to be readable for it, and so that multiprocessing finds no main module to run again.
"""

import marshal

with open(0, "rb", closefd=False) as stream:
    order = marshal.load(stream)
inside = {"__name__": "inside", "__file__": "inside.py"}
for code in order["code"]:
    exec(marshal.loads(code), inside)
inside["main"](order)  # type: ignore[operator]
