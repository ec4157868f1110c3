from support.kit_tree import kit_tree

__all__ = ["kit_tree"]
