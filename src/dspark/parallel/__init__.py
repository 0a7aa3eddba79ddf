"""Ranks that share one model: which part of each dimension a rank holds, and how ranks add up and exchange rows."""
