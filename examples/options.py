"""Types of options on the command line.

    parser.add_argument("--window", type=at_least(1))

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of options: an integer that is no less."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, but is {value} instead")
        return value

    return integer
