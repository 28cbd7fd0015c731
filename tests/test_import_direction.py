"""The house has a direction: a room (a top-level part of dspark_jax) imports only lower levels.

Everything is read from the syntax tree, nothing is imported, so lazy imports inside functions count as well.
The tables below are the whole rule; a new room or exception is added there, with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LEVELS: tuple[tuple[str, ...], ...] = (
    ("types", "noise", "config", "progress"),  # 0
    ("params", "sharding", "sampling", "kv_cache", "layout", "logit_rule"),  # 1
    ("nn", "verify", "schedule", "calibrate", "data", "checkpoint"),  # 2
    ("targets", "heads"),  # 3
    ("drafters",),  # 4
    ("cycle", "load"),  # 5
    ("generate", "engine", "train", "testing"),  # 6
    ("serve", "evaluate"),  # 7
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# Files and folders that are part of a room with another name.
ROOM_OF_FILE = {
    "cycle_draws": "cycle",
    "command_line": "config",
    "config_io": "config",
    "config_toml": "config",
    "drafter_io": "config",
    "whole_file": "config",
}

# These use the library as its users do, by its public names. No other room may import the package root.
MAY_IMPORT_THE_ROOT = {"serve", "evaluate"}

# (importer, imported) of one level: why it is no tangle.
SAME_LEVEL_EXCEPTIONS = {
    ("noise", "types"): "types is the legend every room reads",
    ("config", "types"): "types is the legend every room reads",
    ("sharding", "params"): "it maps the logical axes written in ParamSpec trees",
    ("sampling", "sharding"): "logits stay cut along the vocabulary",
    ("kv_cache", "layout"): "cells are written where a Layout says",
    ("train", "engine"): "the answers of training text are made by the engine",
}

# The scheduler sees survival probabilities and step times: no tokens, logits, models or noise. So the
# non-anticipation argument of the paper is visible in what it imports.
SCHEDULE_MAY_IMPORT = {"schedule", "types"}

# jit at step boundaries only. Path from the repository's root: why it may say jax.jit.
JIT_ALLOWED = {
    "dspark_jax/engine/programs.py": "the engine's programs",
    "dspark_jax/generate.py": "the research loop",
    "dspark_jax/train/step.py": "the training step",
    "dspark_jax/evaluate/parity.py": "one reference block with everything in view",
    "dspark_jax/evaluate/rounds.py": "one reference round with everything in view",
    "dspark_jax/evaluate/recorder.py": "one cycle with the distributions it compared in view",
    "dspark_jax/evaluate/chain_rounds.py": "the same of a chain",
    "dspark_jax/evaluate/training_step.py": "one reference training step with everything in view",
}

# Besides the standard library and itself.
KERNELS_MAY_IMPORT = {"jax", "jaxlib", "numpy", "jax_triton", "triton"}


def _module_name(path: str) -> tuple[str, ...]:
    """``dspark_jax/nn/norm.py`` -> (dspark_jax, nn, norm); an ``__init__`` has the name of its package."""
    parts = Path(path).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imports(tree: ast.AST, path: str) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, absolute dotted name) of every import; ``from a import b`` gives ``a.b``."""
    package = _module_name(path) if path.endswith("__init__.py") else _module_name(path)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += [node.module] if node.module else []
            for alias in node.names:
                yield node, ".".join([*base, alias.name])


def _module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: not function bodies, nor ``if TYPE_CHECKING`` blocks."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _module_level(child)


def _room(name: str) -> str | None:
    """Room of an absolute dotted name inside dspark_jax; None for the package root itself."""
    parts = name.split(".")
    return ROOM_OF_FILE.get(parts[1], parts[1]) if len(parts) > 1 else None


def _check_room_import(importer: str, imported: str | None, name: str) -> str | None:
    """What is wrong with room ``importer`` importing ``name`` of room ``imported``; None if nothing is."""
    if imported not in LEVEL_OF and importer in MAY_IMPORT_THE_ROOT and name.count(".") < 2:
        return None
    if imported not in LEVEL_OF:
        return f"{name} is in no room of LEVELS (nor may {importer} import it from the package root)"
    if importer == "schedule" and imported not in SCHEDULE_MAY_IMPORT:
        return f"schedule must not see {imported} ({name})"
    if imported == importer or (importer, imported) in SAME_LEVEL_EXCEPTIONS:
        return None
    if LEVEL_OF[imported] < LEVEL_OF[importer]:
        return None
    return f"{importer} (level {LEVEL_OF[importer]}) imports {imported} (level {LEVEL_OF[imported]}): {name}"


def _jit_uses(tree: ast.AST) -> Iterator[int]:
    """Lines that name ``jax.jit`` or another transform that compiles (``jax.pmap``, ``nnx.jit``, ...)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"jit", "pmap"}:
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and any(alias.name in {"jit", "pmap"} for alias in node.names):
            yield node.lineno


def _direction_problems(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    importer = _room(".".join(_module_name(path)))
    if importer is None:  # dspark_jax/__init__.py gathers the public names
        return
    if importer not in LEVEL_OF:
        yield 0, f"room {importer} is not in LEVELS"
        return
    for node, name in _imports(tree, path):
        if name.split(".")[0] == "dspark_jax":
            problem = _check_room_import(importer, _room(name), name)
            if problem:
                yield node.lineno, problem


def problems(path: str, source: str) -> list[str]:
    """Every breach in one module. ``path`` is relative to the repository's root, with forward slashes."""
    tree = ast.parse(source)
    found: list[tuple[int, str]] = []
    if path.startswith("pallas_kernels/"):
        allowed = KERNELS_MAY_IMPORT | {"pallas_kernels"} | set(sys.stdlib_module_names)
        for node, name in _imports(tree, path):
            if name.split(".")[0] not in allowed:
                found.append((node.lineno, f"pallas_kernels must not import {name}"))
    else:
        found += _direction_problems(path, tree)
        if path not in JIT_ALLOWED:
            found += [(line, "jax.jit outside the step boundaries of JIT_ALLOWED") for line in _jit_uses(tree)]
        at_import = {id(node) for node in _module_level(tree)}
        for node, name in _imports(tree, path):
            if name.split(".")[0] == "torch" and id(node) in at_import:
                found.append((node.lineno, "torch is imported at module level"))
    return [f"{path}:{line}: {what}" for line, what in sorted(found)]


def modules() -> list[str]:
    """Every module of both packages, relative to the repository's root."""
    packages = ("dspark_jax", "pallas_kernels")
    return sorted(p.relative_to(ROOT).as_posix() for top in packages for p in (ROOT / top).rglob("*.py"))


def test_every_module_keeps_the_direction_of_imports() -> None:
    found = [what for path in modules() for what in problems(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


def test_the_walk_sees_the_library() -> None:
    """An empty walk would pass everything above."""
    assert {"dspark_jax/types.py", "dspark_jax/config.py", "dspark_jax/params.py"} <= set(modules())


def test_every_exception_is_between_rooms_of_one_level() -> None:
    for importer, imported in SAME_LEVEL_EXCEPTIONS:
        assert LEVEL_OF[importer] == LEVEL_OF[imported], (importer, imported)
        assert (imported, importer) not in SAME_LEVEL_EXCEPTIONS, "a cycle"


WRONG = {
    "a lower room imports a higher one": ("dspark_jax/params.py", "from dspark_jax.targets import base"),
    "a plain import counts": ("dspark_jax/nn/mlp.py", "import dspark_jax.engine.loop"),
    "a room is imported from the root": ("dspark_jax/nn/mlp.py", "from dspark_jax import generate"),
    "a public name is taken from the root": ("dspark_jax/engine/loop.py", "from dspark_jax import Sampling"),
    "the root itself is imported": ("dspark_jax/load.py", "import dspark_jax"),
    "a relative import counts": ("dspark_jax/nn/mlp.py", "from ..drafters.base import Drafter"),
    "a relative import from a package counts": ("dspark_jax/nn/__init__.py", "from .. import cycle"),
    "an import inside a function counts": (
        "dspark_jax/cycle.py",
        "def f():\n    import dspark_jax.serve.app",
    ),
    "rooms of one level": ("dspark_jax/heads/markov.py", "import dspark_jax.targets.llama"),
    "drafters import load": ("dspark_jax/drafters/dspark.py", "from dspark_jax.load import load_target"),
    "an unknown room": ("dspark_jax/attic.py", "import jax"),
    "an import of an unknown room": ("dspark_jax/serve/app.py", "from dspark_jax.attic import old"),
    "the scheduler sees logits": (
        "dspark_jax/schedule/prefix.py",
        "from dspark_jax.sampling import filtered",
    ),
    "the scheduler sees noise": ("dspark_jax/schedule/prefix.py", "from dspark_jax import noise"),
    "a kernel imports the library": ("pallas_kernels/markov/xla.py", "from dspark_jax.types import EMPTY"),
    "a kernel imports a framework": ("pallas_kernels/markov/xla.py", "def f():\n    import flax"),
    "jit in a layer": ("dspark_jax/nn/mlp.py", "import jax\n\n@jax.jit\ndef f(x):\n    return x"),
    "jit by its own name": ("dspark_jax/engine/loop.py", "from jax import jit"),
    "jit through partial": ("dspark_jax/cycle.py", "import jax, functools\nf = functools.partial(jax.jit)"),
    "torch at module level": (
        "dspark_jax/checkpoint/safetensors.py",
        "try:\n    import torch\nexcept E:\n    pass",
    ),
    "a part of torch at module level": ("dspark_jax/load.py", "from torch.nn import functional"),
}

RIGHT = {
    "a higher room imports a lower one": ("dspark_jax/engine/loop.py", "from dspark_jax.cycle import draft"),
    "a room imports itself": ("dspark_jax/nn/mlp.py", "from dspark_jax.nn.norm import rms_norm"),
    "a relative import inside a room": ("dspark_jax/nn/mlp.py", "from .norm import rms_norm"),
    "a lower room from the root": ("dspark_jax/nn/mlp.py", "from dspark_jax import types"),
    "a listed exception": ("dspark_jax/sharding.py", "from dspark_jax.params import ParamSpec"),
    "the library uses a kernel": ("dspark_jax/nn/attention.py", "from pallas_kernels.ragged import attend"),
    "the server uses public names": (
        "dspark_jax/serve/app.py",
        "import dspark_jax\nfrom dspark_jax import Engine",
    ),
    "the root gathers names": ("dspark_jax/__init__.py", "from dspark_jax.serve.app import app"),
    "jit at a step boundary": ("dspark_jax/train/step.py", "import jax\nf = jax.jit(lambda x: x)"),
    "torch inside a function": ("dspark_jax/evaluate/suites.py", "def f():\n    import torch"),
    "torch for types only": ("dspark_jax/load.py", "if TYPE_CHECKING:\n    import torch"),
    "the scheduler sees types": ("dspark_jax/schedule/prefix.py", "from dspark_jax.types import Array"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_import_is_caught(case: str) -> None:
    path, source = WRONG[case]
    found = problems(path, source)
    assert found and all(what.startswith(f"{path}:") for what in found)


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_import_is_accepted(case: str) -> None:
    path, source = RIGHT[case]
    assert problems(path, source) == []
