"""What several tests and benchmarks share: trees, traces, small models, oracles."""
