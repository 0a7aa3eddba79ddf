"""Plans of engine steps: integers only, no torch."""
