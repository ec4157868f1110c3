"""Run before a process serves: flags, hooks, and the check that every hook is installed."""
