"""Turn stored KV into a prefill: encode, select tokens, rotate and place."""
