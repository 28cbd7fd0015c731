"""The Triton backend: its kernels interpreted and compiled, and what is said where it cannot be had."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import deviceless, triton_call
from pallas_kernels import markov_sample as head_op
from pallas_kernels import verify as rows_op
from pallas_kernels.dispatch import BackendError
from pallas_kernels.markov_sample import triton_gpu
from tests.kernels import test_deviceless, test_markov_sample, test_verify

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install '.[triton]'"
)

# torch brings triton, and no jax-triton. (That JAX has its CUDA plugin is what the marker ``aot`` asks for.)
needs_jax_triton = pytest.mark.skipif(triton_call.missing() is not None, reason=f"{triton_call.missing()}")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


@pytest.mark.slow
@needs_triton
def test_kernels_equal_the_reference_in_tritons_interpreter() -> None:
    """The tests of ``triton_interpreted.py``, where their claims stand."""
    done = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/triton_interpreted.py", TRITON_INTERPRET="1"
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def on(kind: str) -> Any:
    """As if traced for a device of this name."""
    device = AbstractDevice(device_kind=kind, num_cores=100, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def chosen() -> tuple[str, str]:
    """The backends of both operations where nobody names one."""
    return head_op.backend(*test_markov_sample.case()), rows_op.backend(test_verify.random_rows(8, 300))


@pytest.mark.parametrize("card", ["NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA GeForce RTX 4090"])
def test_an_older_card_takes_triton_where_it_is_installed_and_xla_elsewhere(
    card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reason, backend in ((None, "triton"), ("jax-triton is not installed", "xla")):
        monkeypatch.setattr(triton_gpu, "missing", lambda reason=reason: reason)
        monkeypatch.setattr("pallas_kernels.verify.triton_gpu.missing", lambda reason=reason: reason)
        with on(card):
            assert chosen() == (backend, backend)
        assert chosen() == ("xla", "xla")  # a CPU


@pytest.mark.parametrize("card", ["Tesla T4", "Quadro RTX 3000", "Quadro RTX 4000", "NVIDIA B200"])
def test_a_card_that_the_kernels_were_not_made_for_takes_xla(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Turing cannot multiply bfloat16, though two of them are named like Ampere's and Ada's."""
    monkeypatch.setattr(triton_gpu, "missing", lambda: None)
    monkeypatch.setattr("pallas_kernels.verify.triton_gpu.missing", lambda: None)
    with on(card):
        assert chosen() == ("xla", "xla")


def test_hopper_keeps_its_own_kernels_and_takes_triton_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gpu, "missing", lambda: None)
    head, block = test_markov_sample.case()
    with on("NVIDIA H100 80GB HBM3"):
        assert chosen() == ("mosaic_gpu", "mosaic_gpu")
        assert head_op.backend(head, block, implementation="triton") == "triton"


def test_naming_triton_where_it_cannot_run_is_one_error_with_reason_and_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, block = test_markov_sample.case()
    sample = partial(head_op.markov_sample, head, block, implementation="triton")
    monkeypatch.setattr(triton_gpu, "missing", lambda: None)
    with pytest.raises(BackendError, match="needs an ampere or hopper device, the default one is 'cpu'; .*'xla' runs"):
        sample()
    wide = head._replace(w2=head.w2.astype(jnp.float32))  # type: ignore[union-attr]
    with pytest.raises(BackendError, match="W2 is float32"):
        head_op.markov_sample(wide, block, implementation="triton", aot=True)
    monkeypatch.undo()
    triton_call.missing.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"triton is not installed: pip install -e '\.\[triton\]'.*'xla' can"):
        sample()
    triton_call.missing.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("triton", "jax_triton") or None)
    for version, reason in (("0.4.1", "jax-triton is 0.4.1.*<0.4"), ("0.3.1", r"no CUDA plugin.*dspark-jax\[cuda\]")):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        triton_call.missing.cache_clear()
        with pytest.raises(BackendError, match=reason):
            sample()
    triton_call.missing.cache_clear()


def test_a_jax_triton_that_was_never_installed_as_a_package_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout on the path. Whoever names no backend asks about it as well, on every device."""

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("triton", "jax_triton") or None)
    monkeypatch.setattr("importlib.metadata.version", unknown)
    triton_call.missing.cache_clear()
    try:
        assert chosen() == ("xla", "xla")
        assert "jax-triton is of an unknown version" in str(triton_call.missing())
    finally:
        triton_call.missing.cache_clear()


def test_nothing_of_triton_is_imported_where_nobody_chose_it() -> None:
    code = """
        import sys
        from tests.kernels import test_markov_sample, test_verify
        from pallas_kernels import markov_sample, verify
        markov_sample.markov_sample(*test_markov_sample.case(places=1))
        verify.row_statistics(test_verify.random_rows(8, 300))
        wrong = {"triton", "jax_triton"} & set(sys.modules)
        sys.exit(f"imported: {wrong}" if wrong else 0)
    """
    done = python("-c", "\n".join(line.strip() for line in code.splitlines()))
    assert done.returncode == 0, done.stderr[-2000:]


SIGNATURE = {
    "k_ptr": "*i32", "ids_ptr": "*i32", "token_ptr": "*i32", "column_ptr": "*i32", "word0_ptr": "*u32",
    "word1_ptr": "*u32", "z_ptr": "*bf16", "w2_ptr": "*bf16", "base_ptr": "*bf16",
}  # fmt: skip
"""Types of a kernel's pointers; the others are float32."""


def assembled(kernel: Any, capability: int, warps: int, **sizes: int) -> str:
    """What ptxas says of a kernel's registers, compiled by Triton alone for a card of this compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    pointers = [name for name in kernel.arg_names if name not in sizes]
    signature = {name: SIGNATURE.get(name, "*fp32") for name in pointers} | dict.fromkeys(sizes, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=aligned)
    built = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 2}
    )
    arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
    command = [get_ptxas(capability).path, "-v", f"-arch={arch}", "-", "-o", os.devnull]
    return subprocess.run(command, input=built.asm["ptx"], capture_output=True, text=True, check=True).stderr


@pytest.mark.aot
@needs_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_kernels_compile_for_cards_from_ampere_on_and_spill_no_registers(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Triton's compiler and its ptxas, at the sizes of Qwen3-8B."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pallas_kernels.markov_sample.triton_kernel import markov_tile
    from pallas_kernels.verify import triton_gpu as rows_gpu
    from pallas_kernels.verify.triton_kernel import rows_tile

    vocab, rank = test_deviceless.VOCAB, test_deviceless.RANK
    reports = [
        assembled(
            markov_tile, capability, triton_gpu.WARPS, COUNT=rows, VOCAB=vocab, RANK=rank, TRIMMED=True,
            ROWS=triton_gpu.row_block(rows), TILE=triton_gpu.TILE, DEPTH=triton_gpu.DEPTH,
        )
        for rows in (8, 64)
    ]  # fmt: skip
    reports.append(
        assembled(rows_tile, capability, rows_gpu.WARPS, COUNT=512, VOCAB=vocab, ROWS=rows_gpu.ROWS, TILE=rows_gpu.TILE)
    )
    for report in reports:
        assert "0 bytes spill stores, 0 bytes spill loads" in report, report


@pytest.mark.aot
@needs_jax_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("card", ["H100", "A100"])
@pytest.mark.parametrize("op", test_deviceless.OPS)
def test_kernel_is_in_the_program_and_nothing_of_width_v_is_copied(op: str, card: str) -> None:
    """Whole operations through jax-triton; on an A100 nobody has to name it."""
    exe = test_deviceless.OPS[op](deviceless.gpu_mesh(card), "triton" if card == "H100" else None)
    assert "triton_kernel_call" in exe.as_text()
    test_deviceless.assert_small(exe)
