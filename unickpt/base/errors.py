"""Exceptions of this package.

A message names the place (file, tensor, rank), what was found, what was expected, and what to do.
"""

from __future__ import annotations


class UnickptError(Exception):
    """Base class of the exceptions of this package.

    Attributes:
        file, tensor: the file and the tensor that the error concerns, or ''. The message names them too.
    """

    file: str = ""
    tensor: str = ""

    def about(self, *, file: str = "", tensor: str = "") -> UnickptError:
        """Set file and tensor, and return this error."""
        self.file, self.tensor = file, tensor
        return self


class ConfigError(UnickptError):
    """An option is unknown, has a wrong type, or contradicts another option."""


class UnsupportedFrameworkError(UnickptError):
    """The hooks cannot be used with this version of a framework, and ``UNICKPT_REQUIRE=1`` requires them."""


class FormatError(UnickptError):
    """The content of a file is malformed, out of bounds or inconsistent."""


class NewerFormatError(FormatError):
    """The format version of the checkpoint is newer than this release."""


class NotACheckpointError(UnickptError):
    """A directory has no manifest: there is no checkpoint, or its save did not finish."""


class CorruptCheckpointError(UnickptError):
    """The manifest is valid, but a file that it lists is missing, truncated or altered."""


class UnsafePathError(FormatError):
    """A path in the manifest leads outside the checkpoint directory."""


class MismatchError(UnickptError):
    """The checkpoint and the running job do not describe the same model or optimizer."""


class ChangedError(UnickptError):
    """A tensor changed between two steps of the optimizer, while a save copied it behind training."""


class CoverageError(UnickptError):
    """Fragments of a tensor leave a hole or overlap."""


class LanguageError(UnickptError):
    """A dialect, which describes how parameters are arranged, is malformed, contradictory, or does not fit the tensors."""


class UnsupportedLayoutError(UnickptError):
    """This release cannot describe the layout of a part of the job.

    It does not reach the training loop: the adapter logs one warning, and the framework saves in its own format.

    Attributes:
        resumable: the framework's own files of such a job can be resumed. If not, nothing is saved.
    """

    resumable: bool = True

    def unless(self, resumable: bool) -> UnsupportedLayoutError:
        """Set ``resumable``, and return this error."""
        self.resumable = resumable
        return self


class CoordinationError(UnickptError):
    """A rank of a save or load did not arrive in time, or failed."""


class HostPeerFailedError(CoordinationError):
    """Another rank of this host failed while it read data for this rank. The error of that rank has the cause."""


class StorageError(UnickptError):
    """The storage failed or refused an operation (full, unreachable, read-only)."""


class UncertainCommitError(StorageError):
    """The storage failed while the manifest was written. It is unknown whether the checkpoint exists."""


class OtherModelError(UnickptError):
    """A save would replace the checkpoint of another model."""


class SaveFailedError(UnickptError):
    """A checkpoint was not saved. Earlier checkpoints are intact."""
