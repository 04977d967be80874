"""The inference engine in versioned environments with one atomic switch."""
