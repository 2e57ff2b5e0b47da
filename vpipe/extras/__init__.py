"""The extras: what one kind of user wants, a folder each, added by entry points as a stranger's package is.

An extra has its own configs, docs and tests. Whoever deletes its folder loses that, and nothing else.
"""
