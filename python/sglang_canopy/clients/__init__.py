"""For agents: hints that clients send by themselves, from what their client library sees anyway."""
