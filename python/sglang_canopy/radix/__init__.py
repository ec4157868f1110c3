"""SGLang's radix tree with Canopy's policies on it. Imports sglang; nothing but ``plugin`` imports this."""
