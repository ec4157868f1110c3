try:
    from support.kit_tree import kit_tree
except ImportError:  # SGLang 0.5.22 has no such fixtures
    collect_ignore = ["test_sglang_kit.py"]

__all__ = ["kit_tree"]
