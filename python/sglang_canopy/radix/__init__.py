"""SGLang's radix tree with a Canopy policy on each tier."""
