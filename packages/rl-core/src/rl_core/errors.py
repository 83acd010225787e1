"""Exceptions of all packages; each also derives from a matching standard exception."""


class RLError(Exception):
    """Base class of all exceptions that this project raises."""


class ShapeError(RLError, ValueError):
    """An array or tensor has an unexpected shape or dtype."""


class SettingsError(RLError, ValueError):
    """A setting is invalid; the message names the setting and how to fix it."""


class DataError(RLError, ValueError):
    """A file, row or field of the user's data cannot be used."""


class UnknownColumnError(DataError):
    """A column is neither built in nor declared in this process."""


class NotReadyError(RLError, RuntimeError):
    """An object was used before it started or after it closed."""


class DeadlineError(RLError, TimeoutError):
    """A wait exceeded its deadline; the message names who waited, for what, and for how long."""


class NothingToLeaseError(RLError, LookupError):
    """A lease can never be served: every issued prompt is acked or dropped."""


class OutdatedLeaseError(RLError, RuntimeError):
    """A lease was used after it expired, was released or was acked."""


class AlreadySettledError(DataError):
    """A session was put or failed twice; the first result is kept."""


class SegmentError(RLError, ValueError):
    """A stored or received segment is truncated, has a wrong checksum, or has invalid contents."""


class UndeclaredColumnError(SegmentError, DataError):
    """A segment has a column that this process has not declared; the segment itself may be intact."""


class JournalError(RLError, OSError):
    """A queue's directory cannot be read or written; the message includes the error of the file system or SQLite."""


class DiskError(RLError, OSError):
    """A file cannot be written; the message includes the file, the system's error and the free space."""


class WeightProofError(RLError, RuntimeError):
    """An engine's weights differ from the learner's; `tensor` is the first that differs.

    Attributes:
        tensor: Hugging Face name of the first differing tensor; None if only the canary differs.
    """

    def __init__(self, message: str, *, tensor: str | None = None) -> None:
        """Store the message and the tensor's name."""
        super().__init__(message)
        self.tensor = tensor


class RoleError(RLError, RuntimeError):
    """A role raised or died; the message includes its name, rank and remote traceback.

    Attributes:
        role: Name of the role, if known.
        rank: Rank of the role within its group, if known.
    """

    def __init__(self, message: str, *, role: str | None = None, rank: int | None = None) -> None:
        """Store the message, the role's name and its rank."""
        super().__init__(message)
        self.role = role
        self.rank = rank


class RoleDiedError(RoleError):
    """A role's process ended unexpectedly; the message includes how it ended and its last output."""


class TransferError(RLError, ConnectionError):
    """Weights could not be sent or received: the other side ended or refused."""


class EngineError(RLError, RuntimeError):
    """An engine cannot serve a request."""


class EngineDiedError(EngineError):
    """An engine failed or its process ended; another engine may serve the request."""


class WeightsGoneError(EngineError):
    """The weights of an update no longer exist: their sender ended or closed the transport. Publish new ones."""


class TeacherError(RLError, RuntimeError):
    """A teacher cannot score, or its scores cannot be trained on.

    Attributes:
        teacher: Name of the teacher, if known.
    """

    def __init__(self, message: str, *, teacher: str | None = None) -> None:
        """Store the message and the teacher's name."""
        super().__init__(message)
        self.teacher = teacher


class ToolError(RLError, RuntimeError):
    """A tool or its server cannot serve a call; the message is meant for the model."""


class RolloutError(RLError, RuntimeError):
    """No rollout returned rows that can be trained on."""


class HangError(RLError, TimeoutError):
    """The run made no progress for too long; the message says which role waits for which."""


class CheckpointError(RLError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another model."""


class CacheError(RLError, RuntimeError):
    """A cache of rollouts cannot be written or used."""


class CacheMismatchError(CacheError):
    """A stored entry was made with other settings or inputs; the message lists the differences."""


class BrokenEntryError(CacheError):
    """A stored entry is incomplete, malicious, or not an entry.

    Attributes:
        path: The invalid file or folder.
        reason: What was expected and what was found.
    """

    def __init__(self, path: str, reason: str) -> None:
        """Build the message from the path and the reason."""
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type["BrokenEntryError"], tuple[str, str]]:
        return type(self), (self.path, self.reason)


class MissingExtraError(RLError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""
