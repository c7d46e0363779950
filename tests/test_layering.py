"""Who may import whom, read from the source: imports point left only.

    base ← protocol, kv ← scheduling, transfer, model ← prefill, decode ← gateway ← cli

`base` is ids, errors, config, sampling and context. docs/architecture.md gives the reasons.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pdrt"

BASE = {"ids", "errors", "config", "sampling", "context"}
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    "kv": BASE,
    "protocol": BASE | {"kv.layout", "kv.pages"},
    "observe": BASE,
    "scheduling": BASE | {"kv", "protocol"},
    "transfer": BASE | {"kv", "protocol"},
    "model": BASE | {"kv"},
    "prefill": BASE | {"kv", "protocol", "scheduling", "transfer", "model", "observe"},
    "decode": BASE | {"kv", "protocol", "scheduling", "transfer", "model", "observe"},
}
# Left of it are the workers too, but it holds no KV: it knows their messages only.
MAY_IMPORT["gateway"] = BASE | {
    "protocol", "kv.prefix", "transfer.channel", "transfer.cluster_key", "model", "observe",
}  # fmt: skip
MAY_IMPORT["cli"] = MAY_IMPORT["prefill"] | {"prefill", "decode", "gateway"}
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["__init__"] = set()
"""By first part of a module's name below `pdrt`; each may import itself too."""

PURE = (
    "protocol",
    "scheduling",
    "kv/layout.py",
    "kv/pages.py",
    "kv/prefix.py",
    "transfer/liveness.py",
    "gateway/prefix_index.py",
    "gateway/chat",
    "gateway/router.py",
)
IMPURE_MODULES = {
    "asyncio", "concurrent", "logging", "multiprocessing", "numpy", "os", "queue", "random",
    "secrets", "selectors", "signal", "socket", "subprocess", "threading", "time", "torch",
    "uvloop", "zmq",
}  # fmt: skip
CARRY_TORCH = {"kv.pool"}
"""Nothing pure may import these of our own modules: they carry torch along."""
PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name below `pdrt`: `kv.layout`; a package's own is its folder's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path) for path in FILES}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, also inside functions and under
    TYPE_CHECKING. `from a import b` is `a.b` where that is one of our modules, else `a`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module, names, level):
                assert level == 0, f"{path}:{node.lineno}: relative import"
                assert module is not None
                for alias in names:
                    full = f"{module}.{alias.name}"
                    is_module = full.removeprefix("pdrt.") in MODULES
                    yield node.lineno, full if is_module else module


def ours(path: Path) -> Iterator[tuple[int, str]]:
    """Imports of our own modules, named below `pdrt`."""
    for line, name in imports(path):
        if name == "pdrt":
            yield line, "__init__"
        elif name.startswith("pdrt."):
            yield line, name.removeprefix("pdrt.")


def covers(allowed: set[str], name: str) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in allowed)


def by_name(paths: list[Path]) -> dict[str, object]:
    return {"argvalues": paths, "ids": [name_of(path) for path in paths]}


@pytest.mark.parametrize("path", **by_name(FILES))
def test_imports_point_left_only(path: Path) -> None:
    layer = name_of(path).partition(".")[0]
    assert layer in MAY_IMPORT, f"{layer} has no place in the layers: give it one here"
    allowed = MAY_IMPORT[layer] | {layer, "__init__"}
    for line, name in ours(path):
        assert covers(allowed, name), f"{path}:{line}: {layer} may not import {name}"


def is_pure(path: Path) -> bool:
    relative = path.relative_to(PACKAGE).as_posix()
    return any(relative == pure or relative.startswith(f"{pure}/") for pure in PURE)


@pytest.mark.parametrize("path", **by_name([path for path in FILES if is_pure(path)]))
def test_pure_code_touches_no_loop_socket_clock_thread_or_tensor(path: Path) -> None:
    for line, name in imports(path):
        root = name.partition(".")[0]
        assert root not in IMPURE_MODULES, f"{path}:{line}: pure code may not import {name}"
    for line, name in ours(path):
        assert name not in CARRY_TORCH, f"{path}:{line}: pure code may not import {name}"


@pytest.mark.parametrize("path", **by_name(FILES))
def test_only_its_adapter_imports_mooncake(path: Path) -> None:
    if name_of(path).startswith("transfer.mooncake"):
        return
    for line, name in imports(path):
        assert name.partition(".")[0] != "mooncake", f"{path}:{line}: {name}"


@pytest.mark.parametrize("path", **by_name(FILES))
def test_nothing_is_pickled(path: Path) -> None:
    for line, name in imports(path):
        assert name.partition(".")[0] not in PICKLES, f"{path}:{line}: {name}"


def test_the_rules_bite() -> None:
    """The table itself: nobody to the left may reach to the right."""
    order = ["ids", "kv", "scheduling", "prefill", "gateway", "cli"]
    for left, layer in enumerate(order):
        for other in order[left + 1 :]:
            assert not covers(MAY_IMPORT[layer], other), (layer, other)
    for a, b in (("prefill", "decode"), ("scheduling", "transfer"), ("kv", "protocol")):
        assert not covers(MAY_IMPORT[a], b)
        if (a, b) != ("kv", "protocol"):
            assert not covers(MAY_IMPORT[b], a)
    for forbidden in ("protocol", "transfer"):
        assert not covers(MAY_IMPORT["model"], forbidden)
    assert covers(MAY_IMPORT["protocol"], "kv.layout")
    assert not covers(MAY_IMPORT["protocol"], "kv.pool")


RUNS_CODE = {"eval", "exec", "compile", "__import__"}
"""Built-in functions that make code of data."""
READS_PICKLES = {("torch", "load"), ("yaml", "load"), ("numpy", "load"), ("np", "load")}


def code_of_data(source: str) -> Iterator[str]:
    """Calls that would run what data says, by name."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(name) if name in RUNS_CODE:
                yield name
            case ast.Attribute(ast.Name(module), name) if (module, name) in READS_PICKLES:
                yield f"{module}.{name}"
        for keyword in node.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == "trust_remote_code" and not is_off:
                yield keyword.arg


@pytest.mark.parametrize("path", **by_name(FILES))
def test_no_data_is_run_as_code(path: Path) -> None:
    assert not list(code_of_data(path.read_text(encoding="utf-8")))
    # Its queues and pipes pickle what passes through them.
    for line, name in imports(path):
        assert name.partition(".")[0] != "multiprocessing", f"{path}:{line}"


def test_code_of_data_is_found() -> None:
    for source in ("eval(x)", "f(exec(y))", "torch.load(p)", "load(p, trust_remote_code=True)",
                   "load(p, trust_remote_code=flag)", "__import__(name)"):  # fmt: skip
        assert list(code_of_data(source)), source
    for source in ("model.eval()", "re.compile(x)", "load(p, trust_remote_code=False)"):
        assert not list(code_of_data(source)), source
