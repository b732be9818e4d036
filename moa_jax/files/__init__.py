"""Model folders: Hugging Face configs, tensor files, each drafter kind's own layout."""
