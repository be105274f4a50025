"""Traces: the parts that ranks wrote, merged into one file and summed up."""
