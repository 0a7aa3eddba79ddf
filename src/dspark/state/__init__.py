"""Position-addressed state of requests: stores, pages, views of a pass, images."""
