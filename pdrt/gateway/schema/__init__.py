"""The requests that are understood, and what they mean. Pure.

Every field is either served, or accepted at the one value that means "off", or refused by name:
nothing that a client asks for is silently left out. `user` and its like ask for nothing.

    bounds      how much a request may hold, and why
    bodies      the fields, as types
    decoding    JSON -> those types; errors that name the field
    prompts     the `prompt` of completions
    sampling    fields -> Sampling
    generation  a validated request, but for what depends on the model
    parsing     body -> Generation
    answers     the fields of answers, as types
"""
