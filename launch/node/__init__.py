"""The processes of one node: agent, zygote, supervisors, and how they end."""
