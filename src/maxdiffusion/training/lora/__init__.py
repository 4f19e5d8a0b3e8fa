"""LoRA adapters: trained on frozen weights, started from files and written to files."""
