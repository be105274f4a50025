"""Pipeline parallelism: which layers a stage holds, and the link between stages."""
