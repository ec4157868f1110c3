"""Admission of sessions: who may start while those under way need the memory."""
