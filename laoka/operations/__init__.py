"""Our pyinfra operations, shaped like pyinfra's own: each reads its facts and yields only what is missing."""
