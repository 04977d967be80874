"""Throw-away hosts on this machine with a simulated V100: the demo and the test bed."""
