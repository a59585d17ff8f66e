"""The one version of Segue: packages, images and chart have it from here, and a test compares them.

`.dev0` stands behind the next version until that is released (CONTRIBUTING.md, "A release"). Written here rather than
asked of the installed package, so that a checkout tells its own version without being installed anew.
"""

VERSION = "0.2.0.dev0"
