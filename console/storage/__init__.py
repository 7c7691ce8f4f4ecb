"""What happens to stored documents after they were written: retention, collection, checking, bundles.

    reach.py        which blobs a run's documents name, directly or through each other
    retention.py    which steps keep what going on from them needs
    collection.py   deletes what nothing needs
    chain.py        replays a run from its records and compares it with its commits
    checking.py     reads every blob, names what is damaged or missing, mends it from a bundle
    bundle.py       the file that `tttd export` writes, read as an object store
    exporting.py, importing.py

Boundary: works on the object store alone. Knows no Temporal and no terminal; clocks come in as arguments.
"""
