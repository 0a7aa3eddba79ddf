"""What stands between the engine and the people who talk to it."""
