"""Our pyinfra facts, shaped like pyinfra's own."""
