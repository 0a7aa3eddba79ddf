"""Checks that need a checkpoint: the dry run of the doctor, and comparison with reference numbers."""
