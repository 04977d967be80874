"""laoka's own tools on the host, in a versioned environment of their own."""
