"""CacheTune (arXiv 2605.24022): its figures and tables with SmolLM2-135M-Instruct on a CPU."""
