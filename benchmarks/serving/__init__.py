"""What the serving benchmarks share: arms, cells of load on a real engine, acceptance traces, a simulated engine."""
