"""OpenAI-compatible HTTP in front of the workers: validation, routing, streams. Holds no KV."""
