"""What a person types: from a config to video files."""
