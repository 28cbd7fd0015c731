"""Test programs that run as one process or as several of ``jax.distributed``, on CPU devices."""

from __future__ import annotations

import argparse

import jax


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``--local-devices``, and which of how many processes this is."""
    parser.add_argument("--local-devices", type=int, default=1)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)


def join(args: argparse.Namespace) -> None:
    """Before JAX is used: makes the devices, and meets the other processes where there are some."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.local_devices)
    if args.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, num_processes=args.processes, process_id=args.process)
