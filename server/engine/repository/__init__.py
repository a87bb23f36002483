"""What lies in model repositories, in folders and elsewhere. Nothing is loaded here."""
