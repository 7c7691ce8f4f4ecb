"""The exception tree of the activities.

    TttdError                      what we raise on purpose; carries no live objects, so it pickles
    ├── InputError                 the request cannot be met as it stands (never retried)
    │   ├── IdentityChanged        a resume with another science; names the fields that differ
    │   └── Retired                a step's adapter or optimizer state was dropped on purpose; nothing can go on from it
    ├── ConflictError              two different contents for one place (never retried)
    │   ├── ArchiveFork            two commits for one step
    │   └── TrainConflict          two training results for one step from different inputs
    ├── IncompleteGrid             a coordinate without record or verdict, or a second policy version (never retried)
    ├── TrainCheckFailed           what must hold after an optimizer step does not (never retried)
    ├── PublishRefused             the gate did not recognise the adapter that the engine serves (never retried)
    ├── CorruptBlob                stored bytes do not have their digest (never retried)
    └── TransientError             worth another attempt: somebody else must come back first
        ├── NotReady               no engine has proved that it serves this policy version yet
        ├── NewerDocument          stored by a newer tttd than this process runs; a worker of that version reads it
        ├── EngineError            the engine did not answer, or answered with an error
        ├── TrainerLost            a process of the trainer died or hangs; all of them are started again
        └── JudgeError             the sandbox or the judge failed, not the program
            └── JudgeStarved       the program timed out while it waited for a core: the host ran too much at once

Messages say what, where (run, step, group, rollout), the number against the limit, and what to do next.
The class name is the Temporal error type; ``activities/context.py`` does the translation.
"""

from __future__ import annotations


class TttdError(Exception):
    retryable = False


class InputError(TttdError): ...


class IdentityChanged(InputError): ...


class Retired(InputError): ...


class ConflictError(TttdError): ...


class ArchiveFork(ConflictError): ...


class TrainConflict(ConflictError): ...


class IncompleteGrid(TttdError): ...


class TrainCheckFailed(TttdError): ...


class PublishRefused(TttdError): ...


class CorruptBlob(TttdError): ...


class TransientError(TttdError):
    retryable = True


class NotReady(TransientError): ...


class NewerDocument(TransientError): ...


class EngineError(TransientError): ...


class TrainerLost(TransientError): ...


class JudgeError(TransientError): ...


class JudgeStarved(JudgeError): ...
