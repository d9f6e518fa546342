"""The treatment of samples whose images cannot be used."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from odb_nodes._core.checks import check_choice

Policy = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class BadImages:
    """The treatment of a sample with an image that cannot be used, by reason.

    `"error"` raises a `SampleError`, before which nothing is lost. `"skip"` leaves the whole sample
    out of the epoch and counts it in `skipped_samples`, by the name of the field.

    A file that exists but cannot be read (no permission, a network file system that fails) is
    always an error: skipping it would make the run depend on the moment.

    Args:
        missing: the policy for a file that does not exist.
        corrupt: the policy for what is no image, has no pixels, or is truncated or damaged.
        huge: the policy for an image of more pixels than the `ImageReader` allows.
        elongated: the policy for an image whose longer side is over 200 times the other, which no
            patch grid can hold.
    """

    missing: Policy = "error"
    corrupt: Policy = "error"
    huge: Policy = "error"
    elongated: Policy = "error"

    def __post_init__(self) -> None:
        for field in fields(self):
            check_choice(field.name, getattr(self, field.name), get_args(Policy))

    @classmethod
    def skipped(cls) -> BadImages:
        """Return the policy that skips them all."""
        return cls(missing="skip", corrupt="skip", huge="skip", elongated="skip")

    def skips(self, reason: str) -> bool:
        """Tell whether a sample is left out for this reason, the name of a field."""
        return bool(getattr(self, reason) == "skip")
