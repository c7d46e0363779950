"""The model: fetching, loading, tokenizing, paged attention, sampling, and the executor.

`identity`, `fetch` and `resources` import no torch, so that the gateway stays small.
"""
