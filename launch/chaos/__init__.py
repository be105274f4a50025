"""``lockstep chaos``: faults put into running ranks, and what became of each, against what was injected."""
