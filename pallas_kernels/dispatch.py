"""Which backend runs an operation: None picks by device and falls back to XLA, a name means that one or an error."""

from __future__ import annotations

import jax

BACKENDS = ("xla", "mosaic_gpu", "triton", "tpu")


class BackendError(ValueError):
    """The backend that was named cannot run this operation on these arguments or this device."""


_HOPPER = ("H100", "H200", "H800", "H20")
# "Quadro RTX 4000" is of the generation before.
_AMPERE = (
    "A100",
    "A800",
    "A30",
    "A40",
    "A10",
    "L4",
    "L20",
    "RTX A",
    "GeForce RTX 30",
    "GeForce RTX 40",
    "Ada Generation",
)


def device_kind() -> str:
    """``hopper``, ``ampere`` (Ada too), ``tpu`` or ``other``: what the device that is traced for is to a kernel.

    That is the one an abstract mesh describes (a program compiled for a device that is not here), else the default
    device. A mesh of several devices is ``other``: no kernel is cut for them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1:
        return "other"
    if mesh.abstract_device is not None:
        name = mesh.abstract_device.device_kind
        if name.startswith("TPU"):
            return "tpu"
        if any(card in name for card in _HOPPER):
            return "hopper"
        return "ampere" if any(card in name for card in _AMPERE) else "other"
    if jax.default_backend() == "tpu":
        return "tpu"
    if jax.default_backend() == "gpu":
        capability = getattr(jax.devices()[0], "compute_capability", None)
        return {"8": "ampere", "9": "hopper"}.get(str(capability).split(".")[0], "other")
    return "other"


# Where a backend is taken unasked, and where it runs if it is named.
_NATIVE = {"mosaic_gpu": "hopper", "triton": "ampere", "tpu": "tpu"}
_RUNS_ON = {"mosaic_gpu": ("hopper",), "triton": ("ampere", "hopper"), "tpu": ("tpu",)}


def choose(
    op: str,
    implementation: str | None,
    refusals: dict[str, str | None],
    *,
    interpret: bool = False,
    aot: bool = False,
    spread: bool = False,
) -> str:
    """The backend to run.

    Args:
        op: name of the operation, for messages.
        implementation: None, or one of ``BACKENDS``.
        refusals: for each Pallas backend of the operation, why it cannot take these arguments (None: it can).
        interpret: the kernel is interpreted on the CPU, so any device will do.
        aot: compiled for a device that is not there, so any device will do.
        spread: the arguments live on several devices, for which no Pallas kernel is cut.

    Raises:
        BackendError: the named backend is unknown, refuses the arguments, or is not for this device.
    """
    if spread:
        reason = "its arguments are spread over several devices"
        refusals = {name: reason for name in refusals}
    if implementation is None:
        kind = device_kind()
        for name, refusal in refusals.items():
            if refusal is None and _NATIVE[name] == kind:
                return name
        return "xla"
    if implementation == "xla":
        return "xla"
    if implementation not in BACKENDS or implementation not in refusals:
        known = ", ".join(("xla", *refusals))
        raise BackendError(f"{op}: no backend {implementation!r}; known: {known}")
    refusal = refusals[implementation]
    if refusal is not None:
        raise BackendError(f"{op}: backend {implementation!r} cannot run this: {refusal}; implementation='xla' can")
    if not (interpret or aot) and device_kind() not in _RUNS_ON[implementation]:
        kinds = " or ".join(_RUNS_ON[implementation])
        article = "an" if kinds.startswith("a") else "a"
        raise BackendError(
            f"{op}: backend {implementation!r} needs {article} {kinds} device, the default one is "
            f"{jax.devices()[0].device_kind!r}; implementation='xla' runs here"
        )
    return implementation
