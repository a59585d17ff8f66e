"""Tools and schemas of a request, and the grammars that bind its answer."""
