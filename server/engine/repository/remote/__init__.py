"""Remote repositories: in object stores (`stores`, `mirror`) and on the Hugging Face Hub (`hub`)."""
