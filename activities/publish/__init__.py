"""The publish room: put an adapter beside the served one in one engine, and prove that the engine serves it (design 4).

    gate.py          the mathematics of the proof, numpy float64
    placing.py       adapter directories on the engine's disk
    publishing.py    load, score, compare, clean up, against an engine's HTTP interface
    activity.py      the only file that knows Temporal

Boundary: never computes a log-prob itself; what the trainer found is stored evidence, what the engine finds comes over HTTP.
"""
