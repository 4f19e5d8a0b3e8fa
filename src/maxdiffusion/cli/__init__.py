"""The command line: usage texts, exit codes and one call into the room that does the work."""
