"""Two hosts in one machine: a search whose judges live behind a network link, which is cut for a minute in the middle of a step.

    network.py   two network namespaces with addresses of their own, a switch between them, and the cable that is pulled
    on_host.py   puts one command on one of the hosts
    store.py     the object store of host A, with an identity for each role
    trial.py     the experiment, and what it finds
    __main__.py  python -m tests.two_hosts --cut-seconds 60

Knows tttd from outside only: settings, commands, what is stored.
"""
