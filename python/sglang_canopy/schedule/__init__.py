"""Order of the waiting queue: prefill cost, fair shares between tenants, bounded shortest-first."""
