"""How fast a model server is, by one fixed recipe: what is asked, how it is timed, and when two runs differ."""
