"""pdrt: an async prefill/decode disaggregation runtime for LLM serving."""

__version__ = "0.1.0"
