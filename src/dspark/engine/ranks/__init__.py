"""Several processes that share every layer of one engine: rank 0 decides, the others repeat its passes."""
