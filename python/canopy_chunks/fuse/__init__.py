"""Turn stored KV into a prefill: encode chunks, select tokens, rotate and place KV."""
