"""`segue bench`: how fast a server of OpenAI's API is, whoever made it, seen from outside by one light client.

words ──► scenarios ──► client ──HTTP──► any server        recording ──► figures ──► report

It knows nothing of Segue but its version: Segue and its peers are measured by the same code or not at all.
"""
