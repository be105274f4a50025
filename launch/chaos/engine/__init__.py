"""Faults in the ranks of Lockstep's own engine, judged against what the runtime promises."""
