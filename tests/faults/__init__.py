"""Faults on purpose: the whole system as processes, and a harness that kills or freezes a chosen part at a chosen point.

    python -m tests.faults matrix [--only train]             every part at every point, as a table
    python -m tests.faults chaos --kills 30 --steps 6        random parts at random moments, one chain in the end

Boundary: the product knows nothing of it. Points are hit from outside, by a proxy that stands between the workers and the object
store and holds one request while a process is killed. What is promised and what was measured: docs/faults.md.
"""
