"""Trees, traces, small models and oracles for tests and benchmarks."""
