"""A real completion from a model server, judged: the only proof that it is healthy."""
