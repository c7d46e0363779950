"""The `mooncake` engine: Mooncake's TransferEngine, over TCP, or RDMA and others by configuration.

The library writes into a peer's memory without the peer's doing, cannot cancel, and its word that
a transfer failed proves nothing. So success alone is believed, everything else is UNSETTLED, and
what proves that a writer is out is done on the receiving side (`instance.Instance.retire`).
"""
