"""Data sent between processes: stamps, hints, field names and status files."""
