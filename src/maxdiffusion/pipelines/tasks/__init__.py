"""Tasks of the WAN family: a file each, with its conditioning and its pipeline."""
