"""The front side of the engine: the socket to its leader, what came of each request, and metrics."""
