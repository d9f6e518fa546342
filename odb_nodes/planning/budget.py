"""What one group of samples may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from odb_nodes.checks import check_count


@dataclass(frozen=True)
class TokenBudget:
    """What a group may cost: its longest sample, padded, times its number of samples.

    Args:
        tokens: most padded tokens of a group.
        max_samples: most samples of a group; `None` for no limit.
        max_patches: most image patches of a group, summed over its samples; `None` for no limit.
        pad_to_multiple_of: tokens; a group is as wide as its longest sample rounded up to a
            multiple of this. The collate function must pad to the same multiple.
        layout: `"padded"`, one row per sample.
        oversize: what becomes of a sample that exceeds the budget on its own: `"alone"` gives it a
            group of its own (with one warning and a count), `"error"` raises, `"drop"` leaves it
            out (with one warning and a count).

    Raises:
        TypeError, ValueError: a field is not what is said above; names it and its value.
    """

    tokens: int
    max_samples: int | None = None
    max_patches: int | None = None
    pad_to_multiple_of: int = 1
    layout: Literal["padded"] = "padded"
    oversize: Literal["alone", "error", "drop"] = "alone"

    def __post_init__(self) -> None:
        for name in ("tokens", "max_samples", "max_patches", "pad_to_multiple_of"):
            value = getattr(self, name)
            if value is not None or name in ("tokens", "pad_to_multiple_of"):
                object.__setattr__(self, name, check_count(name, value))
        if self.layout != "padded":
            raise ValueError(f'`layout` must be "padded", but is {self.layout!r} instead.')
        if self.oversize not in ("alone", "error", "drop"):
            raise ValueError(
                f'`oversize` must be "alone", "error" or "drop", but is {self.oversize!r} instead.'
            )
        if self.pad_to_multiple_of > self.tokens:
            raise ValueError(
                f"`pad_to_multiple_of` must be at most `tokens` ({self.tokens}), "
                f"but is {self.pad_to_multiple_of} instead."
            )

    @classmethod
    def of(cls, budget: int | TokenBudget, name: str = "budget") -> TokenBudget:
        """Return `budget` itself, or a budget of that many padded tokens.

        Raises:
            TypeError, ValueError: it is neither; names it `name`.
        """
        return budget if isinstance(budget, TokenBudget) else cls(check_count(name, budget))

    def width(self, tokens: int) -> int:
        """Return the padded length of a row of `tokens` tokens."""
        return round_up(tokens, self.pad_to_multiple_of)

    def is_oversize(self, tokens: int, patches: int = 0) -> bool:
        """Tell whether one sample exceeds the budget on its own."""
        too_long = self.width(tokens) > self.tokens
        return too_long or (self.max_patches is not None and patches > self.max_patches)


def round_up(tokens: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `tokens`."""
    return -(-tokens // multiple) * multiple
