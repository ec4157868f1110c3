"""KVCache Cache in the Wild (USENIX ATC 2025, arXiv 2506.02634), figure by figure."""
