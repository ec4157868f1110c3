"""Check answers from reused KV: at start, by tenant, and while serving."""
