"""What routers and engines share to bound what strangers give: grammars for llguidance, and a model folder's files."""
