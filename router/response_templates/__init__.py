"""How families of models write calls of tools and their thoughts: data, read by `router.text.answer_formats`."""
