"""Admission of sessions: decides which may start while active sessions need the memory."""
