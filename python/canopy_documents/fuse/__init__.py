"""Turn stored KV into a prefill: encode chunks, select tokens, rotate keys and place KV."""
