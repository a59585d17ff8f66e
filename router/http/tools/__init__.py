"""Tools of a request: which there are, which a model may call, how its calls are kept to grammars, and in words."""
