"""What happens, in what order, and how often it is retried. Deterministic.

Boundary: imports only the standard library, temporalio and pydantic. Activities are reached by name (``names.py``), never by
import, so a control host needs neither torch nor numpy and a package can move without a running history noticing.
"""
