"""Where a run's documents lie, and the one way to read and write them.

    runs/<run>/open                               RunSpec, created by the first open
    runs/<run>/steps/000003/plan                  StepPlan
    runs/<run>/steps/000003/g05/r17/rollout       RolloutRecord
    runs/<run>/steps/000003/g05/r17/verdict       Verdict
    runs/<run>/steps/000003/batch | train         Batch, TrainRecord
    runs/<run>/steps/000003/commit                StepCommit: the chain (step 0 is the opening commit)
    runs/<run>/steps/000003/report                StepReport: times, hosts, metrics; beside the chain, not hashed into it
    runs/<run>/steps/000003/retired               RetiredBlobs: what retention dropped of the step; the one entry that is rewritten

Each entry holds the digest of a blob with the document's canonical JSON. An entry is created once; who comes second reads
the winner. The chain of a fork begins at the step after which it left the other run: that step holds its opening commit.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from activities.blobs import Blobs, MissingKey
from activities.errors import NewerDocument
from activities.records import Document, RetiredBlobs, RunSpec, canonical_json
from workflows.contracts.base import Coordinate, Message, RunRef

D = TypeVar("D", bound=BaseModel)

SEED = Coordinate(step=0, group=0, rollout=0)
"""Where the verdict on a run's seed program stands; on roots that differ, it is that of the first."""


def seed_at(root: int) -> Coordinate:
    """Where the verdict on one root's construction stands, in a run whose roots differ."""
    return SEED.model_copy(update={"group": root})


class RunStore:
    """Typed access to one run's documents. All reading and writing of a run goes through here."""

    def __init__(self, blobs: Blobs, run_id: str) -> None:
        self.blobs = blobs
        self.run_id = run_id

    # Keys -----------------------------------------------------------------------------------------------------------------
    @property
    def root(self) -> str:
        return f"runs/{self.run_id}"

    def step_key(self, step: int, what: str) -> str:
        return f"{self.root}/steps/{step:06d}/{what}"

    def rollout_key(self, at: Coordinate, what: str) -> str:
        return self.step_key(at.step, f"g{at.group:02d}/r{at.rollout:02d}/{what}")

    # Blobs ----------------------------------------------------------------------------------------------------------------
    def put(self, document: Any) -> str:
        return self.blobs.put(canonical_json(document))

    def load(self, kind: type[D], digest: str) -> D:
        """The document with this digest.

        Raises:
            NewerDocument: it has fields that this version of tttd does not know.
            CorruptBlob: the stored bytes do not have this digest.
        """
        try:
            return kind.model_validate_json(self.blobs.get(digest))
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            unknown = [".".join(map(str, e["loc"])) for e in found if e["type"] == "extra_forbidden"]
            if len(unknown) < len(found):
                raise
            raise NewerDocument(
                f"run {self.run_id}: {kind.__name__} {digest[:12]} has fields that this process does not know: "
                f"{', '.join(unknown)}. A newer tttd wrote it: install that version here too (docs/operate.md, Upgrading)"
            ) from error

    # Create-once entries --------------------------------------------------------------------------------------------------
    def claim(self, key: str, document: Document | Message) -> tuple[str, bool]:
        """Store the document under the key unless somebody has. Returns (digest of the winner, whether we won)."""
        digest = self.put(document)
        if self.blobs.store.create(key, digest.encode()):
            return digest, True
        return self.blobs.store.get(key).decode(), False

    def find(self, key: str) -> str | None:
        """Digest stored under the key, or None."""
        try:
            return self.blobs.store.get(key).decode()
        except MissingKey:
            return None

    def read(self, kind: type[D], key: str) -> D | None:
        """The document stored under the key, or None."""
        digest = self.find(key)
        return None if digest is None else self.load(kind, digest)

    # The chain ------------------------------------------------------------------------------------------------------------
    def spec(self, ref: RunRef) -> RunSpec:
        return self.load(RunSpec, ref.spec)

    def last_step(self) -> int | None:
        """Number of the last committed step; None before the opening commit."""
        store = self.blobs.store
        # From the newest folder back: a step in progress has one without a commit, and no key of a rollout is listed.
        folders = (int(name) for name in reversed(store.folders(f"{self.root}/steps/")) if name.isdigit())
        return next((step for step in folders if store.exists(self.step_key(step, "commit"))), None)

    def commit_digest(self, step: int) -> str | None:
        return self.find(self.step_key(step, "commit"))

    def retired(self, step: int) -> RetiredBlobs | None:
        """What was dropped of a step on purpose; None if it is whole."""
        return self.read(RetiredBlobs, self.step_key(step, "retired"))
