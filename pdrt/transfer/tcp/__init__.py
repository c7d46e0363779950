"""The `tcp` engine: the receiver itself reads from sockets into its pages.

A prefill rank connects to each decode rank several times, and proves by the segment's token, which
the handshake alone carries, that it was shown that segment. It sends pieces of writes; the decode
rank judges each of them by its room, its generation and its pages before the first byte of it is
taken, reads it straight into the pool, and answers when the last byte is in place.

Nothing lands but what the receiver takes out of a socket itself. So the fence is its own doing:
no more is read for that generation, and the reads under way are waited for.
"""

NAME = "tcp"
