"""The cluster key: a CURVE key pair in a file, which makes those who have it one cluster.

One pair for all instead of a pair per process: there is one secret to hand out and to keep, and no
list of members that must be kept up to date wherever somebody joins.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import zmq

from pdrt.config import SecurityConfig
from pdrt.errors import ConfigError

PREFIX = "pdrt-cluster-key-1:"
"""Before the secret, so that no other file passes for a key; the number is the format's."""
FILE_BYTES_MAX = 4096
"""A key file has a fraction of it."""


class ClusterKey(msgspec.Struct, frozen=True):
    """Both halves, in Z85 (40 characters), as libzmq takes them."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        """Without the secret, which has no business in logs and tracebacks."""
        return "ClusterKey(…)"


def write_new_key(path: str) -> None:
    """Draw a key and write it to a new file that its owner alone may read.

    Raises:
        ConfigError: `path` exists, or cannot be written.
    """
    _check_curve()
    _, secret = zmq.curve_keypair()
    text = (
        "# Cluster key of pdrt: whoever has it is a member of the cluster. Keep it secret.\n"
        f"{PREFIX}{secret.decode()}\n"
    )
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists, and is not overwritten: its cluster could not talk to itself any "
            "more; name another file, or remove this one first"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(fd, "w") as file:
        file.write(text)


def read_key(config: SecurityConfig) -> ClusterKey | None:
    """The key that the configuration names; None when it names none.

    Raises:
        ConfigError: it cannot be read, is none, or libzmq cannot use it.
    """
    path = config.cluster_key
    if path is None:
        return None
    _check_curve()
    try:
        with open(path, "rb") as file:
            lines = file.read(FILE_BYTES_MAX).decode(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"--cluster-key {path}: {error.strerror}") from error
    except ValueError as error:  # a NUL
        raise ConfigError(f"--cluster-key {path!r}: {error}") from error
    keys = [line.strip() for line in lines if line.startswith(PREFIX)]
    if len(keys) != 1:
        raise ConfigError(f"--cluster-key {path} is no cluster key; `pdrt keygen FILE` makes one")
    secret = keys[0].removeprefix(PREFIX).encode()
    try:
        return ClusterKey(zmq.curve_public(secret), secret)
    except (ValueError, zmq.ZMQError):
        raise ConfigError(
            f"--cluster-key {path} is damaged; copy it again from where it was made"
        ) from None


def is_open_to_others(path: str) -> bool:
    """Somebody besides its owner may read the key file."""
    return bool(Path(path).stat().st_mode & 0o077)


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError(
            "this libzmq was built without CURVE, which cluster keys need; the one in pyzmq's own "
            "wheels has it: pip install --force-reinstall --only-binary=:all: pyzmq"
        )
