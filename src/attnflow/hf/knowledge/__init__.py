"""Knowledge bases inside transformers models: convert feed-forward layers to entries and back."""
