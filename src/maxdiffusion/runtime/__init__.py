"""What every room may lean on: problems told to people, progress, timing, video files."""
