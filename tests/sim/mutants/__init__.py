"""Deliberate breaches of the protocol, each of which the simulator must catch.

A mutant replaces a method of the product, or of the simulator's adapters where the rule lives
there. Its docstring says which rule it breaks.
"""

from tests.sim.mutants import cache, decode_side, engine_side, fences, prefill_side
from tests.sim.mutants.registry import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "cache", "decode_side", "engine_side", "fences", "prefill_side"]
