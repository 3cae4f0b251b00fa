"""`mlxspec bench`: what speculation brings on this machine, measured against the same engine
without it.

Rule: both sides run the same prompts in turn, in alternating order, with nothing cached, and their
tokens are compared; a figure is a measurement or it is not shown.
"""
