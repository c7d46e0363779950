"""What of a grammar is refused before xgrammar sees it."""

from __future__ import annotations

from pdrt.sampling import Grammar


def check_grammar(grammar: Grammar) -> None:
    """Raises RequestRefused; see `LIMITS`."""
