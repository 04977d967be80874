"""Power caps and persistence that come back after every boot."""
