"""Makes a release out of a commit, and publishes it: packages, images, chart. Nothing that runs imports this."""
