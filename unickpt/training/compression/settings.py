"""What a job asks for: the scheme and its parameters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.base.options.job import GRADIENT_SCHEMES

NONE = "none"
POWERSGD = "powersgd"
SCHEMES = GRADIENT_SCHEMES


@dataclass(frozen=True, slots=True)
class Compression:
    """Settings of gradient compression. They are equal on all ranks.

    Attributes:
        scheme: one of ``SCHEMES``. ``none``: gradients travel as float32.
        ratio: share of the elements that ``top-k`` and ``random-k`` send, from 0 to 1.
        rank: columns of the factors of ``powersgd``.
        block: elements with a common scale of ``int8``.
        error_feedback: add what a step did not send to the gradient of the next step.
        least_elements: smaller parameters, such as biases, travel as float32.
        seed: seed of ``random-k`` and of the first factors of ``powersgd``.
    """

    scheme: str = NONE
    ratio: float = 0.01
    rank: int = 2
    block: int = 256
    error_feedback: bool = True
    least_elements: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is unknown or out of bounds.
        """
        if self.scheme not in SCHEMES:
            raise ConfigError(f"compression scheme {self.scheme!r} is unknown; known: {', '.join(SCHEMES)}")
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"compression ratio must be above 0 and at most 1, not {self.ratio!r}")
        if self.rank < 1 or self.block < 1 or self.least_elements < 0:
            raise ConfigError("compression needs rank and block of at least 1, and least_elements of at least 0")

    def as_json(self) -> dict[str, Any]:
        """Return the settings as JSON types."""
        return asdict(self)
