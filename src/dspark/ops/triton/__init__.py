"""Triton twins of the ops: one kernel family a file, each beside the torch twin whose contract it keeps.

A program computes one row, or elements that no sum joins, so no reduction spans rows and the row law needs no argument
about tiles. What a kernel is compiled for depends on widths alone: row counts are not specialised, and inputs arrive
contiguous and aligned (`launch.packed`), because the order inside a reduction follows from the layout of its loads.
"""
