"""The contents of model repositories, local and remote. Nothing is loaded here."""
