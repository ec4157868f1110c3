"""Tail-Optimized Caching (arXiv 2510.15152): its figures, tables and theorems, regenerated."""
