"""Every error that a user of this package can see.

One base class, precise children. A message says what was found, where (file, tensor, rank),
what was expected, and what to do: it is read at three in the morning.
"""

from __future__ import annotations


class UnickptError(Exception):
    """Base of every error raised on purpose by this package.

    Attributes:
        file, tensor: what it is about, as the message says too; '' if it is about nothing in particular.
    """

    file: str = ""
    tensor: str = ""

    def about(self, *, file: str = "", tensor: str = "") -> UnickptError:
        """This error, with the file and the tensor that it is about."""
        self.file, self.tensor = file, tensor
        return self


class ConfigError(UnickptError):
    """An option that the user wrote is unknown, ill-typed or contradicts another one."""


class FormatError(UnickptError):
    """Bytes that claim to be a unickpt file are not one: malformed, out of bounds, inconsistent."""


class NewerFormatError(FormatError):
    """The checkpoint was written in a format version that this release cannot read."""


class NotACheckpointError(UnickptError):
    """A directory has no manifest: the checkpoint does not exist, or its save never finished."""


class CorruptCheckpointError(UnickptError):
    """The manifest is sound, but what it names is missing, truncated or altered."""


class UnsafePathError(FormatError):
    """A manifest names a file outside its own checkpoint directory."""


class MismatchError(UnickptError):
    """The checkpoint and the running job do not describe the same model or optimizer."""


class CoverageError(UnickptError):
    """Fragments leave a hole in a tensor or cover an element twice."""


class LanguageError(UnickptError):
    """A description of how parameters are arranged is malformed, contradicts itself, or does not fit the tensors."""


class UnsupportedLayoutError(UnickptError):
    """The job uses something whose layout this release cannot describe.

    Never reaches a training loop: the adapter turns it into one warning and the framework's
    own checkpoint.
    """


class CoordinationError(UnickptError):
    """Ranks of one save or load did not all arrive, or did not all succeed."""


class NeighbourFailedError(CoordinationError):
    """Another rank of this host failed while this one waited for what it reads. Its own error is the one to show."""


class StorageError(UnickptError):
    """The storage refused an operation (full, gone, read-only)."""


class UncertainCommitError(StorageError):
    """The storage failed while a manifest was written, and whether it was written cannot be seen."""


class SaveFailedError(UnickptError):
    """A checkpoint was not saved, and the caller would take a return for success. Earlier checkpoints are intact."""
