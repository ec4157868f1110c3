try:
    from support.kit_tree import kit_tree
except ImportError:  # SGLang 0.5.22 has no such fixtures
    collect_ignore = ["test_sglang_kit.py", "test_token_pairs.py"]
    collect_ignore += ["test_hybrid_state_machine.py", "test_hybrid_tree.py"]

__all__ = ["kit_tree"]
