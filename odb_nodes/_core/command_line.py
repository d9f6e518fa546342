"""Command lines of modules, without a package to read them."""

from __future__ import annotations

import argparse
from typing import NoReturn

__all__ = ["OneLineParser"]


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit."""
        self.exit(2, f"{self.prog}: {message.rstrip('.')}. See `{self.prog} --help`.\n")
