"""How families of models write calls of tools and their thoughts: data, read by `router.parsers.answer_formats`."""
