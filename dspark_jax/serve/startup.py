"""From the command line to a running engine: cache, model, drafter, engine, every shape compiled."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dspark_jax.load import check_drafter
from dspark_jax.serve.args import DEFAULT_MAX_MODEL_LEN, ServeArgs, Speculation, UsageError
from dspark_jax.serve.processes import Processes
from dspark_jax.serve.service import ServedModel
from dspark_jax.targets import stop_ids

Say = Callable[[str], None]


class Progress:
    """Start-up lines: seconds since the start, then what was done."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._start = clock()

    def __call__(self, line: str) -> None:
        self._write(f"[{self._clock() - self._start:5.1f} s] {line}")


def enable_compilation_cache(directory: str | None, say: Say) -> None:
    """Keeps compiled programs between starts. Call before anything is compiled.

    The directory is ``directory`` ("" disables), else ``$DSPARK_CACHE_DIR/xla``, else jax's own
    ``$JAX_COMPILATION_CACHE_DIR``, else ``dspark_jax/xla`` in the user's cache directory (XDG).
    """
    if directory == "":
        say("compilation cache: off")
        return
    path = Path(directory) if directory is not None else _default_cache_dir(os.environ)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        if directory is not None:
            raise UsageError(f"argument --compilation-cache-dir: cannot write to {path}: {error}") from None
        say(f"compilation cache: off, cannot write to {path}: {error}")
        return
    import jax

    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    say(f"compilation cache: {path}")


def _default_cache_dir(environ: Mapping[str, str]) -> Path:
    own = environ.get("DSPARK_CACHE_DIR")
    if own:
        return Path(own) / "xla"
    jaxs = environ.get("JAX_COMPILATION_CACHE_DIR")
    if jaxs:
        return Path(jaxs)
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dspark_jax" / "xla"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A warm engine and what the service must know of it."""

    engine: Any
    model: ServedModel


def load(args: ServeArgs, say: Say, processes: Processes | None = None) -> Loaded:
    """Loads, builds and compiles everything.

    Args:
        processes: what is to know of the other processes, where there are some.

    Raises:
        UsageError: a flag that this machine, model or version cannot honour.
        Finished: this process is not process 0 and has followed it to its end.
        ConnectionError: it has followed, and process 0 is gone.
        Exception: whatever the loaders find wrong with the files.
    """
    import jax

    import dspark_jax
    from dspark_jax import engine as engine_module

    _check_drafter(args)
    processes = processes or Processes()
    processes.join(args, say)
    say(f"jax {jax.__version__}, {len(jax.devices())} x {jax.devices()[0].device_kind}")
    mesh = _mesh(args)
    quantization = {} if args.quantization is None else {"quantization": args.quantization}
    target = dspark_jax.load_target(args.model, dtype=args.dtype, mesh=mesh, **quantization)
    say(f"loaded target {args.model}: {target.config.num_layers} layers, vocabulary {target.vocab_size}")
    drafter, speculation = _load_drafter(args, target, mesh, say)
    window = _window(args.max_model_len, target.max_positions)
    config = _engine_config(args, speculation, window, engine_module.EngineConfig, say)
    link = processes.connect(args)
    engine = engine_module.Engine(target, drafter, config, **({} if link is None else {"link": link}))
    if link is not None and not link.leads:
        say(f"process {args.node_rank} of {args.nnodes} follows process 0")
        engine.follow()
        processes.leave()
        raise Finished
    for note in engine.notes:
        say(note)
    say(
        f"engine: {args.max_num_seqs} slots of {window} tokens, mode {engine.mode}, "
        f"verification {config.verification} by default"
    )
    engine.warmup(say)
    tokenizer = target.tokenizer
    if tokenizer is None:
        say("no tokenizer: only /v1/completions with token ids is served")
    return Loaded(
        engine,
        ServedModel(
            name=args.name,
            root=args.model,
            tokenizer=tokenizer,
            vocab_size=target.vocab_limit,
            max_model_len=window,
            eos_token_ids=stop_ids(target),
            make_request=engine_module.Request,
            default_template_kwargs=args.default_chat_template_kwargs,
        ),
    )


class Finished(Exception):
    """This process followed process 0, which has ended."""


def _mesh(args: ServeArgs) -> Any:
    """The devices that serve: ``data`` x ``model``, or None for one device."""
    import jax

    devices, wanted = jax.devices(), args.tensor_parallel_size * args.data_parallel_size
    if wanted > len(devices):
        raise UsageError(
            f"argument --tensor-parallel-size: {args.tensor_parallel_size} (times --data-parallel-size "
            f"{args.data_parallel_size}) is more than the {len(devices)} devices there are"
        )
    if args.nnodes > 1 and wanted < len(devices):
        raise UsageError(
            f"argument --tensor-parallel-size: {args.nnodes} processes use all their {len(devices)} devices"
        )
    if args.max_num_seqs % args.data_parallel_size:
        raise UsageError(f"argument --data-parallel-size: {args.data_parallel_size} does not divide --max-num-seqs")
    if wanted == 1:
        return None
    shape = (args.data_parallel_size, args.tensor_parallel_size)
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("data", "model"), axis_types=auto, devices=devices[:wanted])


def _check_drafter(args: ServeArgs) -> None:
    """Refuses a drafter that is not there, before the target is loaded. One that nobody asked for may be missing."""
    speculation = args.speculation
    if speculation.drafter is None or speculation.implied:
        return
    try:
        check_drafter(speculation.drafter)
    except ValueError as error:
        _explain(args, error)
        raise


def _explain(args: ServeArgs, error: ValueError) -> None:
    """Raises what an error about the drafter means to who asked for the MTP layers of the target itself."""
    if args.speculation.method == "mtp" and args.speculation.drafter == args.model:
        raise UsageError(
            "argument --speculative-config: MTP layers inside a target's checkpoint are not read: name a directory "
            f'of an MTP module as "model" ({error})'
        ) from error


def _load_drafter(args: ServeArgs, target: Any, mesh: Any, say: Say) -> tuple[Any, Speculation]:
    """The drafter, or None with a line that says why not."""
    import dspark_jax

    speculation = args.speculation
    if speculation.drafter is None:
        say("no drafter: plain decoding")
        return None, speculation
    try:
        drafter = dspark_jax.load_drafter(speculation.drafter, target, dtype=args.dtype, mesh=mesh)
    except FileNotFoundError as error:
        if not speculation.implied:
            raise
        say(f"WARNING the shipped drafter is missing, plain decoding instead: {error}")
        return None, dataclasses.replace(speculation, drafter=None)
    except ValueError as error:
        _explain(args, error)
        raise
    found = getattr(getattr(drafter, "config", None), "method", None)
    if None not in (speculation.method, found) and speculation.method != found:
        raise UsageError(
            f"argument --speculative-config: method is {speculation.method!r}, but {speculation.drafter} is "
            f"a {found!r} drafter"
        )
    say(f"loaded drafter {speculation.drafter}: {found or '?'}, {drafter.block_size} drafts a block")
    return drafter, speculation


def _window(asked: int | None, model_window: int) -> int:
    if asked is None:
        return min(DEFAULT_MAX_MODEL_LEN, model_window)
    if asked > model_window:
        raise UsageError(f"argument --max-model-len: {asked} is more than the model's window of {model_window} tokens")
    return asked


def _engine_config(args: ServeArgs, speculation: Speculation, window: int, config_type: type, say: Say) -> Any:
    """EngineConfig. A flag that this version's engine does not have yet is said, never silently dropped."""
    values: dict[str, Any] = {
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": window,
        "mode": _mode(speculation),
        "num_speculative_tokens": speculation.num_speculative_tokens,
        "verification": speculation.verification,
        "seed": args.seed,
        "profile_dir": _profile_dir(args.compilation_cache_dir),
    }
    known = {field.name for field in dataclasses.fields(config_type)}
    for name in (
        "enable_prefix_caching",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "attention_backend",
    ):
        value = getattr(args, name)
        if value in (None, "auto"):
            continue
        if name in known:
            values[name] = value
        elif name == "attention_backend" and value != "xla":  # naming a backend means that one or an error
            raise UsageError(f"argument --attention-backend: {value} is not in this version")
        elif name != "attention_backend":
            say(f"WARNING --{name.replace('_', '-')} has no effect in this version")
    return config_type(**values)


def _profile_dir(compilation_cache_dir: str | None) -> str | None:
    """Measured step times are kept where compiled programs are: "" keeps neither."""
    return str(Path(compilation_cache_dir) / "step_time") if compilation_cache_dir else compilation_cache_dir


def _mode(speculation: Speculation) -> str:
    """What to ask of the engine; it says itself (``notes``) where it has to do something simpler."""
    if speculation.drafter is None:
        return "none"
    return "lagged" if speculation.adaptive else "fixed"
