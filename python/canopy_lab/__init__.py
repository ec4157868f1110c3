"""The laboratory: traces, simulators, advice and plans, and the ``canopy`` command. Needs neither torch nor sglang."""
