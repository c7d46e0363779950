"""What the `local` engine needs of the kernel, ports, the loopback, and the model cache. Each check
does the thing itself, in small."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from pdrt.cli.doctor.finding import GIB, Finding, fails, gib, ok, warning
from pdrt.cli.ports import check_port
from pdrt.errors import ConfigError
from pdrt.model.fetch import cache_dir

CACHE_BYTES = 1 * GIB
"""Of the default model: what is downloaded, and what is made of it."""
SECONDS_MAX = 20.0
SHARE_MEMORY = """
import os, sys
fd = os.memfd_create("pdrt-doctor")
os.ftruncate(fd, 4096)
os.pwrite(fd, b"pdrt", 0)
print(fd, flush=True)
sys.stdin.read()
"""
"""A decode worker in small: memory without a name, for another process to map."""


def shared_memory() -> Finding:
    """Whether a process can map another's memfd through /proc, as prefill workers do."""
    name = "shared memory"
    with subprocess.Popen(
        [sys.executable, "-c", SHARE_MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        try:
            fd = int(child.stdout.readline())
            with (
                open(f"/proc/{child.pid}/fd/{fd}", "r+b", buffering=0) as file,
                mmap.mmap(file.fileno(), 4096) as view,
            ):
                is_same = view[:4] == b"pdrt"
        except (OSError, ValueError) as error:
            text = f"another process's memory cannot be mapped through /proc ({error})"
            remedy = "mount /proc without hidepid; run all roles as one user, in one PID namespace"
            return fails(name, text, remedy)
        finally:
            child.kill()
    if not is_same:
        return fails(name, "what is mapped is not what was written", "report this kernel")
    return ok(name, "another process's memfd can be mapped through /proc")


def pidfd() -> Finding:
    """Whether the death of another process can be proved: the `local` engine's fence."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as child:
        try:
            fd = os.pidfd_open(child.pid)
        except OSError as error:
            child.kill()
            return fails("pidfd", f"pidfd_open: {error.strerror}", "Linux 5.3 or newer is needed")
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except OSError as error:
            child.kill()
            text = f"pidfd_send_signal: {error.strerror}"
            return fails("pidfd", text, "allow the system call in the container's seccomp profile")
        finally:
            os.close(fd)
    return ok("pidfd", "a writer's death can be proved")


def ptrace(proc: Path = Path("/proc")) -> Finding:
    """Yama's ptrace_scope, which people ask about."""
    path = proc / "sys" / "kernel" / "yama" / "ptrace_scope"
    try:
        scope = path.read_text().strip()
    except OSError:
        return ok("ptrace", "no Yama; not used anyway")
    return ok("ptrace", f"ptrace_scope {scope}: irrelevant, no process is attached to")


def pid_namespace(proc: Path = Path("/proc")) -> Finding:
    """Where this process is number 1 or /proc shows only few, roles must share the namespace."""
    pids = [name for name in os.listdir(proc) if name.isdecimal()]
    if str(os.getpid()) not in pids:
        text = "/proc is of another PID namespace"
        return fails("processes", text, "mount /proc of this namespace (unshare --mount-proc)")
    return ok(
        "processes", f"/proc shows {len(pids)}; all roles of a host must share this namespace"
    )


def ports(host: str, wanted: dict[str, int]) -> list[Finding]:
    """By flag."""
    found = []
    for flag, port in wanted.items():
        try:
            check_port(flag, host, port)
        except ConfigError as error:
            remedy = f"another {flag}, unless it is a pdrt of yours that runs"
            found.append(warning(f"port {port}", str(error), remedy))
        else:
            found.append(ok(f"port {port}", f"free on {host}"))
    return found


def loopback() -> Finding:
    """A connection to ourselves: a new network namespace has its loopback down."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=SECONDS_MAX),
        ):
            pass
    except OSError as error:
        text = f"127.0.0.1 cannot be reached ({error.strerror or error})"
        return fails("loopback", text, "ip link set lo up")
    return ok("loopback", "127.0.0.1 answers")


def host_name() -> Finding:
    """The host's own name, under which other hosts would be told to dial."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return ok("host name", f"{name} is not resolved; needed between hosts only")
    if address.startswith("127."):
        return ok("host name", f"{name} is {address}: for other hosts, give --host an address")
    return ok("host name", f"{name} is {address}")


def proxies(environment: dict[str, str]) -> Finding:
    """Variables that send HTTP clients elsewhere; pdrt's own ask gateways directly."""
    names = [
        n for n in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environment.get(n)
    ]
    excluded = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    if not names or {"127.0.0.1", "localhost"} <= {part.strip() for part in excluded}:
        return ok("proxy", "clients on this machine reach the gateway directly")
    text = f"{', '.join(names)} is set: curl and the openai client may ask it for 127.0.0.1"
    return warning("proxy", text, "export no_proxy=127.0.0.1,localhost")


def model_cache(folder: Path | None = None) -> list[Finding]:
    """Where models are downloaded and converted to."""
    folder = cache_dir() if folder is None else folder
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    remedy = "set XDG_CACHE_HOME to a folder that can be written"
    try:
        with contextlib.closing(tempfile.TemporaryFile(dir=existing)) as file:
            file.write(b"x")
    except OSError as error:
        return [fails("model cache", f"{folder} cannot be written ({error.strerror})", remedy)]
    free = shutil.disk_usage(existing).free
    if free < CACHE_BYTES:
        text = f"{folder}: {gib(free)} free, the default model takes {gib(CACHE_BYTES)}"
        return [warning("model cache", text, "make room, or " + remedy)]
    return [ok("model cache", f"{folder} can be written, {gib(free)} free")]
