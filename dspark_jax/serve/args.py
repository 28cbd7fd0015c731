"""Command line of ``python -m dspark_jax.serve``: names and meanings as in ``vllm serve``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dspark_jax.load import SHIPPED_DRAFTERS, shipped_drafter

DEFAULT_TARGET = "smollm2-135m-instruct"
DEFAULT_DRAFTER = SHIPPED_DRAFTERS[0]
DEFAULT_MAX_MODEL_LEN = 2048

METHODS = ("dspark", "dflash", "eagle3", "mtp", "none")
BACKENDS = ("auto", "xla", "mosaic_gpu", "triton")
_BACKEND_ALIASES = {"TRITON_ATTN": "triton"}
QUANTIZATIONS = ("int8",)
DTYPES = ("auto", "float32", "bfloat16", "float")
_DTYPE_ALIASES = {"float": "float32"}
_SPECULATIVE_TYPES: Mapping[str, tuple[type, str]] = {
    "method": (str, "a string"),
    "model": (str, "a string"),
    "num_speculative_tokens": (int, "an integer"),
    "enable_adaptive_verification": (bool, "true or false"),
    "verification": (str, "a string"),
}
_SPECULATIVE_WORDS = {"method": METHODS, "verification": ("rejection", "coupled")}


class UsageError(ValueError):
    """A command line that cannot be served; the message names the flag or key."""


@dataclasses.dataclass(frozen=True)
class Speculation:
    """``--speculative-config``, defaults filled in.

    Attributes:
        drafter: what to load, or None for plain decoding.
        method: the drafter's kind if the caller named it.
        num_speculative_tokens: drafts a block; None means the drafter's own block.
        adaptive: the scheduler chooses how many drafts are verified; else all of them are.
        verification: rule of requests that do not choose ("rejection" or "coupled").
        implied: nobody asked for this drafter by name: serving without it is better than not serving.
    """

    drafter: str | None = None
    method: str | None = None
    num_speculative_tokens: int | None = None
    adaptive: bool = False
    verification: str = "rejection"
    implied: bool = False


@dataclasses.dataclass(frozen=True)
class ServeArgs:
    """The parsed command line. None means "not given" where a default depends on the model."""

    model: str
    speculation: Speculation
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 8
    dtype: str = "auto"
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    max_num_batched_tokens: int | None = None
    attention_backend: str = "auto"
    api_key: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quantization: str | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    seed: int = 0
    compilation_cache_dir: str | None = None
    uvicorn_log_level: str = "warning"

    @property
    def name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse_args(argv: Sequence[str] | None = None) -> ServeArgs:
    """Reads the command line.

    Raises:
        UsageError: naming the flag or the JSON key at fault.
        SystemExit: after --help.
    """
    given = vars(_parser().parse_args(argv))
    model = given.pop("model")
    config = given.pop("speculative_config")
    given["dtype"] = _DTYPE_ALIASES.get(given["dtype"], given["dtype"])
    given["attention_backend"] = _BACKEND_ALIASES.get(given["attention_backend"], given["attention_backend"])
    kwargs = given.pop("default_chat_template_kwargs")
    if given["node_rank"] >= given["nnodes"]:
        raise UsageError(f"argument --node-rank: {given['node_rank']} is not below --nnodes {given['nnodes']}")
    return ServeArgs(
        model=model or DEFAULT_TARGET,
        speculation=_speculation(model, config),
        default_chat_template_kwargs=_json_object("--default-chat-template-kwargs", kwargs) if kwargs else {},
        **given,
    )


def _parser() -> argparse.ArgumentParser:
    p = _Parser(
        allow_abbrev=False,
        prog="python -m dspark_jax.serve",
        description="An OpenAI-compatible server with DSpark speculation.",
    )
    add = p.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"HF directory, .gguf file or cached hub id ({DEFAULT_TARGET})",
    )
    add(
        "--speculative-config",
        metavar="JSON",
        help=f"keys: {', '.join(_SPECULATIVE_TYPES)}; method none: off",
    )
    add("--host", default="127.0.0.1")
    add("--port", type=_integer(0, 65535), default=8000, help="0: any free port")
    add("--served-model-name", metavar="NAME", help="the name clients use (MODEL as given)")
    add(
        "--max-model-len",
        type=_integer(2),
        metavar="N",
        help="prompt + answer, tokens (2048 or the model's window)",
    )
    add("--max-num-seqs", type=_integer(1), default=8, metavar="S", help="requests that decode at once (8)")
    add("--dtype", choices=DTYPES, default="auto")
    add(
        "--gpu-memory-utilization",
        type=_fraction,
        metavar="F",
        help="share of the device's memory to use, in (0, 1]",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compute a beginning that prompts share once (on)",
    )
    add(
        "--max-num-batched-tokens",
        type=_integer(1),
        metavar="N",
        help="of a step: answers, drafts and pieces of prompts (everything, and one large piece)",
    )
    add("--attention-backend", choices=(*BACKENDS, *_BACKEND_ALIASES), default="auto")
    add("--api-key", metavar="KEY", help="wanted of clients as 'Authorization: Bearer KEY'")
    add("--default-chat-template-kwargs", metavar="JSON", help="for every chat; a request's own ones win")
    add("--quantization", choices=QUANTIZATIONS, help="of the target's weights, made at the start (none)")
    add("--tensor-parallel-size", type=_integer(1), default=1, metavar="N", help="devices that share every weight (1)")
    add("--data-parallel-size", type=_integer(1), default=1, metavar="N", help="groups that share the slots (1)")
    add("--nnodes", type=_integer(1), default=1, metavar="N", help="processes that serve together (1)")
    add("--node-rank", type=_integer(0), default=0, metavar="I", help="of this process; 0 has the port (0)")
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="where the others reach process 0")
    add("--master-port", type=_integer(1, 65535), default=29501, help="for the processes to meet")
    add("--seed", type=_integer(0, 2**32 - 1), default=0, help="of requests that bring none (0)")
    add(
        "--compilation-cache-dir",
        metavar="DIR",
        help="compiled programs are kept here; '' keeps none (user cache)",
    )
    levels = ("critical", "error", "warning", "info", "debug", "trace")
    add("--uvicorn-log-level", choices=levels, default="warning", help="info also logs every request")
    return p


def _integer(low: int, high: int | None = None) -> Any:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"in {low}..{high}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, found {value}")
        return value

    return parse


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], found {text}")
    return value


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"argument {flag}: not valid JSON: {error}; found {text!r}") from None
    if not isinstance(value, dict):
        raise UsageError(f"argument {flag}: must be a JSON object, found {text!r}")
    return value


def _speculation(model: str | None, text: str | None) -> Speculation:
    flag = "--speculative-config"
    if text is None:
        if model is not None:
            return Speculation()
        return Speculation(drafter=DEFAULT_DRAFTER, adaptive=True, implied=True)
    config = _checked_config(flag, _json_object(flag, text))
    method = config.get("method")
    verification = config.get("verification", "rejection")
    if method == "none":
        return Speculation(method=method, verification=verification)
    drafter = config.get("model") or shipped_drafter(model or DEFAULT_TARGET, method or "dspark")
    if drafter is None and method == "mtp":
        drafter = model or DEFAULT_TARGET  # multi-token-prediction layers come with the target
    elif drafter is None:
        raise UsageError(f'argument {flag}: "model" is missing: the drafter to load')
    return Speculation(
        drafter=drafter,
        method=method,
        num_speculative_tokens=config.get("num_speculative_tokens"),
        adaptive=config.get("enable_adaptive_verification", model is None),
        verification=verification,
    )


def _checked_config(flag: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config without nulls, its keys, types and values checked."""

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"argument {flag}: {message}")

    unknown = [key for key in config if key not in _SPECULATIVE_TYPES]
    if unknown:
        refuse(f"unknown key {', '.join(map(repr, unknown))}; known: {', '.join(_SPECULATIVE_TYPES)}")
    config = {key: value for key, value in config.items() if value is not None}
    for key, value in config.items():
        kind, wanted = _SPECULATIVE_TYPES[key]
        if type(value) is not kind or value == "":
            refuse(f"{key!r} must be {wanted}, found {value!r}")
        if key in _SPECULATIVE_WORDS and value not in _SPECULATIVE_WORDS[key]:
            refuse(f"{key!r} must be one of {', '.join(_SPECULATIVE_WORDS[key])}; found {value!r}")
    if config.get("num_speculative_tokens", 1) < 1:
        refuse(f"'num_speculative_tokens' must be at least 1, found {config['num_speculative_tokens']}")
    return config
