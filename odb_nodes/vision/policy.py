"""What becomes of samples whose images cannot be used."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

Policy = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class BadImages:
    """What becomes of a sample with an image that cannot be used.

    `"error"` raises a `SampleError`, before which nothing is lost. `"skip"` leaves the whole sample
    out of the epoch and counts it in `skipped_samples`, by the name of the field.

    A file that is there but cannot be read (no permission, a network file system that fails) is an
    error always: to skip it would make the run depend on the moment.

    Args:
        missing: there is no such file.
        corrupt: it is no image, has no pixels, or is truncated or damaged.
        huge: it has more pixels than the `ImageReader` allows.
        elongated: its longer side is over 200 times the other, which no patch grid can hold.
    """

    missing: Policy = "error"
    corrupt: Policy = "error"
    huge: Policy = "error"
    elongated: Policy = "error"

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) not in get_args(Policy):
                raise ValueError(
                    f'`{field.name}` must be "error" or "skip", but is {value!r} instead.'
                )

    @classmethod
    def skipped(cls) -> BadImages:
        """Return the policy that skips them all."""
        return cls(missing="skip", corrupt="skip", huge="skip", elongated="skip")

    def skips(self, reason: str) -> bool:
        """Tell whether a sample is left out for this reason, the name of a field."""
        return bool(getattr(self, reason) == "skip")
