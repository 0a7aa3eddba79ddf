"""Modules of the model, built from frozen plans; the state arrives as an argument."""
