"""Load an adapter beside the served one, prove that the engine serves it, clean up behind it. Source: design 4.

Talks to one engine through a small interface, so that it runs against SGLang, the embedded engine and a test's scorer alike. Knows
nothing of Temporal, nor of how an engine is started.

Every version is proved, also one that is loaded already: a retry or a restarted worker must not believe what it did not see.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from activities.blobs import Blobs
from activities.engine_http import EngineClient
from activities.errors import EngineError, InputError, NotReady, PublishRefused
from activities.publish.gate import EngineScores, Names, compare, compare_names, plain_gap, served_share
from activities.publish.placing import materialise, remove, variant
from activities.publish.scoring import EngineApi, Scorer
from activities.records import AdapterManifest, GateEvidence, PublishReport
from activities.run_store import RunStore
from workflows.contracts.base import PolicyRef
from workflows.contracts.messages import Published, PublishRequest

Floats = NDArray[np.float64]

_PROBES, _PROBE_TOKENS = 8, 48
_IDENTITY_FLOOR = 2e-3
"""Nats (rms) that version 0 may lie from the base where the engine repeats itself exactly: one step at 4e-5 moves it more."""


_PASSING = re.compile(r"-(x[0-9.]+|again)$")
"""Names of adapters that are loaded for a proof and unloaded behind it."""
_ONE_AT_A_TIME = threading.Lock()
"""A worker has one engine, and both its activities and its restorer publish to it."""


class RunningEngine(Protocol):
    """One engine process that answers."""

    @property
    def url(self) -> str: ...

    @property
    def boot_id(self) -> str:
        """Another one for every start of the process."""


class EngineAccess(Protocol):
    """The engine beside this worker, as its supervisor knows it at the moment of asking."""

    @property
    def engine_id(self) -> str: ...

    @property
    def current(self) -> RunningEngine | None:
        """None while the process is starting."""

    @property
    def adapter_directory(self) -> Path:
        """Where adapter directories go; the engine process sees the same path."""

    def on_verified(self, request: PublishRequest, boot_id: str, served: dict[str, int]) -> None:
        """The gate passed in this boot; `served` is policy name -> version of what it proved."""

    def on_unloaded(self, names: tuple[str, ...]) -> None:
        """These adapters are not served any more."""


@dataclass(frozen=True)
class Versions:
    """The policies of one publication."""

    policy: PolicyRef
    previous: PolicyRef | None
    initial: PolicyRef

    def __post_init__(self) -> None:
        version, before = self.policy.version, self.previous
        if self.initial.version != 0:
            raise InputError(f"initial policy {self.initial.name} is version {self.initial.version}, not 0")
        if version == 0:
            if self.policy != self.initial:
                raise InputError(f"version 0 to publish is {self.policy.name}, the run's is {self.initial.name}")
        elif before is None or before.version != version - 1:
            raise InputError(f"version {version} is compared with version {version - 1}, given is {before and before.name}")

    @property
    def needed(self) -> list[PolicyRef]:
        """Versions that must be loaded, oldest first, each once."""
        ordered = [self.initial, *([self.previous] if self.previous else []), self.policy]
        return list({p.name: p for p in ordered}.values())


def publish(
    blobs: Blobs,
    access: EngineAccess,
    request: PublishRequest,
    *,
    progress: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Published:
    """Publish one version to the engine beside this worker, and tell its supervisor.

    Raises:
        InputError: the request is meant for another engine, or its versions do not follow each other.
        NotReady: the engine is starting, or restarted meanwhile.
        PublishRefused, EngineError: see :meth:`Publisher.publish`.
    """
    if request.engine != access.engine_id:
        raise InputError(f"publication for engine {request.engine} came to engine {access.engine_id}: do two share one id?")
    store = RunStore(blobs, request.run.run_id)

    def boot_id() -> str:
        return _running(access).boot_id

    progress("waiting for another publication")
    with _ONE_AT_A_TIME, contextlib.closing(EngineClient(_running(access).url)) as client:
        publisher = Publisher(
            blobs=blobs,
            engine=access.engine_id,
            api=client,
            boot_id=boot_id,
            directory=access.adapter_directory,
            clock=clock,
            progress=progress,
            on_unloaded=access.on_unloaded,
        )
        report = publisher.publish(store, Versions(request.policy, request.previous, request.initial))
        access.on_verified(request, report.boot_id, {request.policy.name: request.policy.version})
    return Published(report=store.put(report), engine=report.engine, boot_id=report.boot_id, passed=report.passed)


def _running(access: EngineAccess) -> RunningEngine:
    engine = access.current
    if engine is None:
        raise NotReady(f"engine {access.engine_id} is starting; its worker's log says how far it is")
    return engine


@dataclass
class Publisher:
    """Publishes to one engine.

    Args:
        engine: the engine's id, for the report.
        boot_id: the engine process as it is now; asked again at the end, since a restart in between voids every proof.
        directory: where adapter directories are written, as the engine process sees it.
        clock: seconds, monotonic.
    """

    blobs: Blobs
    engine: str
    api: EngineApi
    boot_id: Callable[[], str]
    directory: Path
    clock: Callable[[], float]
    progress: Callable[[str], None] = lambda _: None
    on_unloaded: Callable[[tuple[str, ...]], None] = lambda _: None
    """Told the names that the engine no longer serves."""
    scorer: Scorer = field(init=False)

    def __post_init__(self) -> None:
        self.scorer = Scorer(self.api, self.progress)

    def publish(self, store: RunStore, versions: Versions) -> PublishReport:
        """Load, prove, unload what is old.

        Raises:
            PublishRefused: the engine does not serve this adapter; the numbers, and what they look like. The name is unloaded.
            NotReady: the engine restarted meanwhile; another attempt starts over.
            EngineError: it did not answer.
        """
        started, boot, policy = self.clock(), self.boot_id(), versions.policy
        try:
            self._load(versions)
            outcome = self._prove_trained(store, versions) if policy.version else self._prove_initial(policy)
        except EngineError:
            self._same_boot(boot, policy)  # a restart explains any error better than the error itself
            raise
        self._same_boot(boot, policy)
        report = outcome.model_copy(update={"boot_id": boot, "seconds": round(self.clock() - started, 3)})
        if not report.passed:
            self._unload_quietly(policy.name)
            raise PublishRefused(
                f"engine {self.engine} does not prove that it serves {policy.name}: {report.note}. "
                f"Numbers: {_numbers(report)}. Report: blob {store.put(report)}. See the engine's log, restart it, then retry."
            )
        self._unload_old(versions)
        return report

    # Loading --------------------------------------------------------------------------------------------------------------
    def _load(self, versions: Versions) -> None:
        loaded = self.api.loaded_adapters()
        for name in (n for n in loaded if _PASSING.search(n) and n.startswith(_family(versions.policy))):
            self._unload_quietly(name)  # of a proof that was cut off
        for policy in versions.needed:
            self.progress(f"loading {policy.name}")
            directory = materialise(self.blobs, policy.adapter, self.directory, policy.name)
            if policy.name not in loaded:
                self.api.load_adapter(policy.name, str(directory))
        if missing := [p.name for p in versions.needed if p.name not in (loaded := self.api.loaded_adapters())]:
            raise EngineError(f"engine {self.engine} accepted {', '.join(missing)} but lists only {', '.join(loaded) or 'nothing'}")

    def _unload_old(self, versions: Versions) -> None:
        """Unload this run's versions before the previous one, and never a later one, which a late retry of an old step may meet."""
        oldest_kept = versions.previous.version if versions.previous else 0
        pattern = re.compile(re.escape(_family(versions.policy)) + r"(\d{4,})-[0-9a-f]{12}")
        for name in self.api.loaded_adapters():
            match = pattern.fullmatch(name)
            if match and 0 < int(match.group(1)) < oldest_kept:
                self._unload_quietly(name)

    def _unload_quietly(self, name: str) -> None:
        try:
            self.api.unload_adapter(name)
        except EngineError:
            return  # it keeps some memory; the next publication tries again
        self.on_unloaded((name,))
        remove(self.directory, name)

    def _same_boot(self, boot: str, policy: PolicyRef) -> None:
        now = self.boot_id()
        if now != boot:
            raise NotReady(
                f"engine {self.engine} restarted while {policy.name} was proved (boot {boot} -> {now}); it is proved anew"
            )

    # Proving --------------------------------------------------------------------------------------------------------------
    def _prove_trained(self, store: RunStore, versions: Versions) -> PublishReport:
        policy, previous, initial = versions.policy, versions.previous, versions.initial
        assert previous is not None  # by construction of Versions
        if policy.gate is None:
            raise InputError(f"{policy.name} has no gate evidence; only version 0 is published without")
        evidence = store.load(GateEvidence, policy.gate)
        plain = {p.name: self.scorer.score(evidence.sequences, p.name) for p in versions.needed}
        named, before, start = plain[policy.name], plain[previous.name], plain[initial.name]
        first = previous.name == initial.name
        factor, name = evidence.amplification, None
        if factor == 1:
            result = compare(evidence, EngineScores(named, before, start), first_version=first)
        else:
            new = self._score_again(evidence, policy, f"x{factor:g}", factor)
            old = start if first else self._score_again(evidence, previous, f"x{factor:g}", factor)
            result = compare(evidence, EngineScores(new, old, start), first_version=first)
            fresh = self._score_again(evidence, policy, "again", 1.0)
            again = [self.scorer.score(evidence.sequences, p.name) for p in (policy, previous)]
            name = compare_names(evidence, Names(named, fresh, before, start, *again), first_version=first)
        share = served_share(evidence, named, before)
        return PublishReport(
            engine=self.engine,
            boot_id="",
            policy=policy.name,
            version=policy.version,
            passed=result.passed and (name is None or not name.cause),
            comparisons=result.comparisons,
            engine_gap=plain_gap(evidence, named),
            amplification=factor,
            served_share=share,
            name_gap=name.gap if name else None,
            note=result.cause or (name.cause if name else ""),
        )

    def _score_again(self, evidence: GateEvidence, policy: PolicyRef, label: str, factor: float) -> tuple[Floats, ...]:
        """The engine's log-probs under a version's files, given to it once more under a passing name, alpha times a factor."""
        name = f"{policy.name}-{label}"
        self.progress(f"loading {name}")
        self.api.load_adapter(name, str(variant(self.directory / policy.name, name, factor)))
        try:
            return self.scorer.score(evidence.sequences, name)
        finally:
            self._unload_quietly(name)

    def _prove_initial(self, policy: PolicyRef) -> PublishReport:
        """Version 0 changes nothing: its stored B is zero, the engine lists it, and under it the base's log-probs come back."""
        weights = safetensors.numpy.load(
            self.blobs.get(AdapterManifest.model_validate_json(self.blobs.get(policy.adapter)).weights)
        )
        if any(tensor.any() for key, tensor in weights.items() if ".lora_B." in key):
            raise InputError(f"{policy.name} is version 0, but its lora_B is not zero")
        probes = _probes()
        named = _joined(self.scorer.score(probes, policy.name))
        base = _joined(self.scorer.score(probes, None))
        alone = _joined([row for probe in probes for row in self.scorer.score([probe], None)])
        # How far the engine lies from itself when it computes the same in other batches: its own arithmetic noise.
        bound = max(_IDENTITY_FLOOR, 4 * _rms(base - alone))
        gap = _rms(named - base)
        return PublishReport(
            engine=self.engine,
            boot_id="",
            policy=policy.name,
            version=0,
            passed=gap <= bound,
            engine_gap=gap,
            note="" if gap <= bound else f"version 0 must equal the base, but lies {gap:.2g} nats (rms) from it, above {bound:.2g}",
        )


def _family(policy: PolicyRef) -> str:
    """What the names of all versions of a run begin with."""
    return policy.name.split("-v")[0] + "-v"


def _probes() -> list[list[int]]:
    """Fixed token ids, small enough for any vocabulary; what they say does not matter."""
    rng = np.random.default_rng(0)
    return [[int(t) for t in rng.integers(3, 60, size=_PROBE_TOKENS)] for _ in range(_PROBES)]


def _joined(rows: Sequence[Floats]) -> Floats:
    return np.concatenate(rows)


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _numbers(report: PublishReport) -> str:
    parts = [f"against {c.against}: {c.reason or 'passed'} over {c.tokens} tokens" for c in report.comparisons]
    if report.amplification != 1:
        parts.append(f"adapters amplified {report.amplification:g} times")
    if report.name_gap is not None:
        parts.append(f"the name lies {report.name_gap:.2g} nats (rms) from its own files")
    return "; ".join([*parts, f"engine gap {report.engine_gap:.2g} nats (rms)"])
