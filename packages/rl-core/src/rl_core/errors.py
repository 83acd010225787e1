"""Every error that the packages raise on purpose; each is also the standard error it resembles."""


class RLError(Exception):
    """Base of all errors raised on purpose by this project."""


class ShapeError(RLError, ValueError):
    """An array or tensor has a shape or dtype other than the one documented."""


class SettingsError(RLError, ValueError):
    """A user's setting is impossible; the message names the setting and what to do."""


class DataError(RLError, ValueError):
    """A file, row or field of the user's data cannot be used."""


class UnknownColumnError(DataError):
    """A column is not in the table of columns, nor declared in this process."""


class NotReadyError(RLError, RuntimeError):
    """An object was used before it was started, or after it was closed."""


class DeadlineError(RLError, TimeoutError):
    """A wait ran out of time; the message names who waited for what, and since when."""


class NothingToLeaseError(RLError, LookupError):
    """A lease asked for rows that will never come: nothing was issued that is not acked or dropped."""


class OutdatedLeaseError(RLError, RuntimeError):
    """A lease was acked or extended after it had expired, been released or been acked."""


class AlreadySettledError(DataError):
    """A session was put or failed a second time; what was there first stays."""


class SegmentError(RLError, ValueError):
    """A stored or received segment is torn, has a wrong checksum, or asks for what cannot be."""


class UndeclaredColumnError(SegmentError, DataError):
    """A segment has a column that this process has not declared; the segment may be sound."""


class JournalError(RLError, OSError):
    """A queue's directory cannot be written or read; the message says what the file system or SQLite said."""


class WeightProofError(RLError, RuntimeError):
    """An engine's weights are not the learner's; `tensor` is the first that differs.

    Attributes:
        tensor: Hugging Face name of the first differing tensor, or None when only the canary differs.
    """

    def __init__(self, message: str, *, tensor: str | None = None) -> None:
        """Keep the tensor's name beside the message."""
        super().__init__(message)
        self.tensor = tensor


class RoleError(RLError, RuntimeError):
    """A role raised or died; the message carries its name, rank and remote traceback.

    Attributes:
        role: Name of the role, where one is meant.
        rank: Which of several equal roles.
    """

    def __init__(self, message: str, *, role: str | None = None, rank: int | None = None) -> None:
        """Keep who it was beside the message."""
        super().__init__(message)
        self.role = role
        self.rank = rank


class RoleDiedError(RoleError):
    """A role's process ended while it was needed; the message says how, and what it printed last."""


class TransferError(RLError, ConnectionError):
    """Weights could not be sent or received: the other side is gone, or refused."""


class EngineError(RLError, RuntimeError):
    """An engine cannot serve a request."""


class EngineDiedError(EngineError):
    """An engine serves no more: it failed, or its process ended. Another one may serve the request."""


class WeightsGoneError(EngineError):
    """The weights of an update are gone: who packed them has ended, or closed their transport. Publish others."""


class TeacherError(RLError, RuntimeError):
    """A teacher cannot score, or its scores cannot be trained on.

    Attributes:
        teacher: Its name, where one is meant.
    """

    def __init__(self, message: str, *, teacher: str | None = None) -> None:
        """Keep whose fault it was beside the message."""
        super().__init__(message)
        self.teacher = teacher


class ToolError(RLError, RuntimeError):
    """A tool, or the server that has it, cannot do what the model asked; the message is for the model."""


class RolloutError(RLError, RuntimeError):
    """Rollouts returned nothing that can train."""


class HangError(RLError, TimeoutError):
    """Nothing has happened for too long; the message says who waits for whom."""


class CheckpointError(RLError, RuntimeError):
    """A checkpoint is missing, torn, or belongs to another model."""


class CacheError(RLError, RuntimeError):
    """A cache of rollouts cannot be written or used."""


class CacheMismatchError(CacheError):
    """A stored entry was made under other circumstances than the present ones; the message lists what differs."""


class BrokenEntryError(CacheError):
    """A stored entry is torn, hostile, or no entry.

    Attributes:
        path: Of the file or folder that is not as it must be.
        reason: What it must be, and what it is.
    """

    def __init__(self, path: str, reason: str) -> None:
        """Name the place and the reason."""
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type["BrokenEntryError"], tuple[str, str]]:
        return type(self), (self.path, self.reason)


class MissingExtraError(RLError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""
