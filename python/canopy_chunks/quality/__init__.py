"""Check answers from reused KV: at the start, by tenant, and while serving."""
