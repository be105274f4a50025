"""The engine of one rank: requests, scheduler, model, KV cache, step loop, client socket."""
