"""Command lines that refuse in one sentence."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong and where the usage is, instead of a page of usage first; so do parsers of its commands, which get its class."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")
