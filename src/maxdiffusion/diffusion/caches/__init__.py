"""Step caches: lossy, off by default, each one file.

A run imports the file of its own cache only.
"""
